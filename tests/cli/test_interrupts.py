"""A command ends by SIGTERM and SIGHUP as by Ctrl-C, also where a shell started it with SIGINT ignored."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from emulator.cli.interrupts import SAME_S, Ending, hear_the_end
from tests.live.lab import PDEMU, SMALL, all_gone, children_of, eventually

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IN_THE_BACKGROUND = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *PDEMU]


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of this process are put back."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_signals_that_come_together_interrupt_once() -> None:
    now_s, interrupts = [10.0], []
    ending = Ending(lambda: interrupts.append(now_s[0]), clock=lambda: now_s[0])
    for at_s in (10.0, 10.0, 10.0 + SAME_S / 2, 10.0 + SAME_S, 10.0 + 1.5 * SAME_S, 30.0):
        now_s[0] = at_s
        ending(signal.SIGTERM, None)
    assert interrupts == [10.0, 10.0 + SAME_S, 30.0]


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.usefixtures("handlers")
def test_each_signal_interrupts_this_process(number: signal.Signals, ignored: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    hear_the_end()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the handler runs before the next instruction, not in the call
        signal.raise_signal(number)
        pytest.fail("nothing came of it")


@pytest.mark.usefixtures("handlers")
def test_what_nohup_started_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hear_the_end()
    signal.raise_signal(signal.SIGHUP)


@contextmanager
def _started(folder: Path, *args: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A command that inherits that SIGINT is ignored, and its standard error; it is gone afterwards."""
    log = folder / f"{args[0]}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen([*IN_THE_BACKGROUND, *map(str, args)], stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _says(log: Path, process: subprocess.Popen[bytes], words: str) -> None:

    assert eventually(lambda: words in log.read_text() or process.poll() is not None)
    assert process.poll() is None, log.read_text()


def _interrupted(process: subprocess.Popen[bytes], log: Path, children: list[psutil.Process]) -> None:
    assert process.wait(30) == 130
    assert log.read_text().strip().splitlines()[-1] == "pdemu: interrupted"
    assert "Traceback" not in log.read_text()
    assert all_gone(children, within_s=5.0)


@pytest.mark.live
def test_a_run_in_the_background_ends(tmp_path: Path) -> None:
    log_of_client = tmp_path / "o" / "1P1D@0.2Gbps" / "logs" / "client.log"
    options: list[str | Path] = ["--deployment", "1P1D", "--duration", "60", "--out", tmp_path / "o"]

    with _started(tmp_path, "run", SMALL, *options) as (process, log):
        assert eventually(lambda: log_of_client.exists() and len(children_of(process.pid)) == 4), log.read_text()
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # as `timeout` does
        _interrupted(process, log, children)


@pytest.mark.live
def test_members_in_the_background_end(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common: list[str | Path] = [
        "--topology",
        SMALL,
        "--deployment",
        "1P1D",
        "--secret",
        "of the test",
        "--shaping",
        "paced",
    ]
    at = ["--router", address, "--kv-address", "127.0.0.1"]
    with (
        _started(tmp_path, "router", *common, "--listen", address) as (router, router_log),
        _started(tmp_path, "node", *common, "--name", "prefill-0", *at) as (node, node_log),
    ):
        _says(router_log, router, "router: ready")
        _says(node_log, node, "prefill-0: ready")
        for process, log, number in ((node, node_log, signal.SIGTERM), (router, router_log, signal.SIGHUP)):
            process.send_signal(number)
            _interrupted(process, log, [])


@pytest.mark.live
def test_an_endpoint_in_the_background_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "o"
    options: list[str | Path] = ["--deployment", "1P1D", "--http", "127.0.0.1:0", "--out", out]
    with _started(tmp_path, "up", SMALL, *options) as (process, log):
        _says(log, process, "/v1; Ctrl-C ends it")
        children = children_of(process.pid)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)  # as systemd does
        assert process.wait(30) == 0, log.read_text()
        assert all_gone(children, within_s=5.0)
    assert (out / "report.html").exists()
    assert (out / "summary.json").exists()
