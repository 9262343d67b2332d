"""The container engine, through its command line: which compose there is, and taking a project down by its label.

Everything of a project carries its name as a label, under `docker compose` and docker-compose 1.29 alike, so that it
is found and removed without the file that it was started from.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from emulator.core.errors import ConfigError, RunError

ASK_S = 30.0
REMOVE_S = 120.0
_NO_COMPOSE = (
    "--launcher compose: neither `docker compose` nor docker-compose is here; install Docker with its compose plugin, "
    "or use --launcher netns or local"
)


def compose_command() -> list[str]:
    """The compose that this machine has: the plugin, else docker-compose. Raises ConfigError without one, or engine."""
    if shutil.which("docker") is None:
        raise ConfigError(_NO_COMPOSE)
    if _docker("info", "--format", "{{.ServerVersion}}").returncode != 0:
        raise ConfigError(
            "--launcher compose: the Docker engine does not answer (`docker info` fails); start it, get the right to "
            "use it, or use --launcher netns or local"
        )
    if _docker("compose", "version").returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is not None:
        return ["docker-compose"]
    raise ConfigError(_NO_COMPOSE)


def take_down(project: str) -> bool:
    """Remove containers, networks and volumes of a compose project; False when nothing of it was there.

    Raises RunError when the engine does not answer or refuses.
    """
    removed = False
    for listing, removal in (
        (("ps", "--all"), ("rm", "--force", "--volumes")),
        (("network", "ls"), ("network", "rm")),
        (("volume", "ls"), ("volume", "rm")),
    ):
        found = _asked(project, *listing, "--quiet", "--filter", f"label=com.docker.compose.project={project}")
        if found:
            _asked(project, *removal, *found)
            removed = True
    return removed


def _asked(project: str, *arguments: str) -> list[str]:
    answer = _docker(*arguments, limit_s=REMOVE_S)
    if answer.returncode != 0:
        said = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        raise RunError(
            f"`docker {' '.join(arguments[:2])}` failed: {said}; take it down with `docker compose -p {project} down`"
        )
    return answer.stdout.split()


def _docker(*arguments: str, limit_s: float = ASK_S) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = ["docker", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", "docker is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {limit_s:g} s")
