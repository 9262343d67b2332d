"""A user without root: the command runs again inside namespaces of its own, and nothing of them stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import emulator
from emulator.lab.leftovers import STATE_DIR_ENV
from emulator.lab.unprivileged import GUARD_ENV
from emulator.live import namespace
from tests.lab.inside import CALL, SERVE

CHECKOUT = Path(emulator.__file__).parent.parent
NOBODY = 65534
UNPRIVILEGED = """
import json, os, sys
from pathlib import Path
from emulator.core.errors import ConfigError
from emulator.lab.unprivileged import reexec_if_needed
try:
    reexec_if_needed()
except ConfigError as error:
    sys.exit(f"refused: {error}")
import subprocess
from emulator.lab.leftovers import Ledger, new_run_id
from emulator.lab.netns import NetnsSite
reexec_if_needed()
ledger = Ledger.open(new_run_id("user"))
site = NetnsSite(ledger.run_id, ["a", "b"], ledger)
places = site.open()
a, b = places["a"], places["b"]
server = subprocess.Popen([sys.executable, "-c", sys.argv[2], b.netns, b.kv_address], stdout=subprocess.PIPE, text=True)
port = server.stdout.readline().strip()
call = subprocess.run([sys.executable, "-c", sys.argv[3], a.netns, b.kv_address, port, "hello "],
                      capture_output=True, text=True)
server.wait()
Path(sys.argv[1]).write_text(json.dumps(
    {"run": ledger.run_id, "uid": os.geteuid(), "said": call.stdout, "errors": call.stderr, "asked": a.kv_address,
     "mounts": os.readlink("/proc/self/ns/mnt"), "net": os.readlink("/proc/self/ns/net")}))
if sys.argv[4:] == ["die"]:
    os.kill(os.getpid(), 9)
sys.exit(7)
"""


@pytest.fixture
def lodging() -> Iterator[Path]:
    """A folder that another user can reach, with the script in it and a folder `out` that is theirs."""
    folder = Path(tempfile.mkdtemp(prefix="pdemu-test-"))
    folder.chmod(0o755)
    (folder / "script.py").write_text(UNPRIVILEGED, encoding="utf-8")
    mount_points = [folder / name for name in ("python", "checkout", "site")]
    for place in (folder / "out", *mount_points):
        place.mkdir()
    if os.geteuid() == 0:
        os.chown(folder / "out", NOBODY, NOBODY)
    yield folder
    for place in mount_points:
        place.rmdir()  # refuses, should anything be mounted there
    shutil.rmtree(folder)


def as_nobody(lodging: Path, *arguments: str, inside: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the script, through `inside`, as a user without permissions, with all that it needs where they can read it.

    Interpreter, checkout and libraries are bound there in a mount namespace that ends with the script.
    """
    interpreter = f"python{sys.version_info.major}.{sys.version_info.minor}"
    script = [str(lodging / "python/bin" / interpreter), str(lodging / "script.py"), str(lodging / "out/result")]
    binds = {"python": sys.base_prefix, "checkout": str(CHECKOUT), "site": sysconfig.get_path("purelib")}
    shell = " && ".join(f"mount --bind '{source}' '{lodging / name}'" for name, source in binds.items())
    drop = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--", *inside]
    command = ["unshare", "--mount", "--", "sh", "-c", f'{shell} && exec "$@"', "sh", *drop, *script]
    if os.geteuid() != 0:
        command = [*inside, sys.executable, str(lodging / "script.py"), str(lodging / "out/result")]
    environment = {key: value for key, value in os.environ.items() if key not in (STATE_DIR_ENV, "XDG_RUNTIME_DIR")}
    environment["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *sys.path])
    if os.geteuid() == 0:
        environment |= {"PYTHONPATH": f"{lodging / 'checkout'}:{lodging / 'site'}", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["LD_LIBRARY_PATH"] = str(lodging / "python/lib")  # of an interpreter with a shared library
    return subprocess.run(
        [*command, SERVE, CALL, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


@pytest.mark.netns
@pytest.mark.parametrize(
    ("inside", "arguments", "status"),
    [((), (), 7), ((), ("die",), -9), (("unshare", "--user", "--map-root-user", "--net", "--"), (), 7)],
    ids=["to its end", "until killed", "in a user namespace already"],
)
def test_a_user_without_root_gets_a_site_too_and_nothing_of_it_stays(
    lodging: Path, inside: Sequence[str], arguments: Sequence[str], status: int
) -> None:
    run = as_nobody(lodging, *arguments, inside=inside)
    assert run.returncode == status, run.stderr
    result = lodging / "out/result"
    assert result.stat().st_uid == (NOBODY if os.geteuid() == 0 else os.geteuid())
    found = json.loads(result.read_text())
    assert found["uid"] == 0
    assert found["said"] == f"hello {found['asked']}", found["errors"]
    assert found["net"] != str(Path("/proc/self/ns/net").readlink())
    assert found["mounts"] != str(Path("/proc/self/ns/mnt").readlink())
    assert not list(namespace.FOLDER.glob(f"*{found['run']}*"))
    assert not Path(f"/run/pdemu/{found['run']}.json").exists()
    assert not Path(tempfile.gettempdir(), f"pdemu-{NOBODY}").exists()


@pytest.mark.netns
def test_a_kernel_that_forbids_it_is_told_in_one_line(lodging: Path) -> None:
    """In a user namespace of its own, where no further one may be made, by a process without permissions."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", "--"]
    script = [sys.executable, str(lodging / "script.py"), str(lodging / "out/result"), SERVE, CALL]
    outer = ["unshare", "--user", "--map-root-user", "--", "sh", "-c", forbid, "sh", *drop, *script]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    run = subprocess.run(outer, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert "(user.max_user_namespaces = 0)" in run.stderr
    assert "--launcher local with paced links" in run.stderr
    environment[GUARD_ENV] = "mnt:[1]"
    outer = ["unshare", "--user", "--map-root-user", "--", *drop, *script]
    run = subprocess.run(outer, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert run.returncode == 1
    assert "does not give CAP_NET_ADMIN and CAP_SYS_ADMIN here" in run.stderr, "it does not go round in circles"
