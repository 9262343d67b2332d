"""A served cluster for tests, and what they ask of it."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.http_client import Answer
from tests.live.lab import PDEMU, SMALL, all_gone, children_of, eventually

READY_S = 60.0


class Up(NamedTuple):
    """A served cluster."""

    port: int
    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    @property
    def run_folder(self) -> Path:
        """Where its results are, once it has ended."""
        return next(path for path in self.out.iterdir() if path.is_dir())

    def stop(self, signal_number: int = signal.SIGINT) -> int:
        """End it as a user does; its exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(30)


@contextmanager
def up(folder: Path, *options: str, deployment: str = "1P1D", topology: Path = SMALL) -> Iterator[Up]:
    """`pdemu up` of the small lab, or a variant of it; whatever happens, nothing of it is left."""
    log = folder / "stderr"
    out = folder / "out"
    command = [*PDEMU, "up", str(topology), "--deployment", deployment, "--http", "127.0.0.1:0", "--out", str(out)]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=stderr)
    children: list[psutil.Process] = []
    try:
        pattern = re.compile(r"http://127\.0\.0\.1:(\d+)/v1")
        assert eventually(lambda: pattern.search(log.read_text()) is not None or process.poll() is not None, READY_S)
        found = pattern.search(log.read_text())
        assert found is not None, log.read_text()
        children = children_of(process.pid)
        yield Up(int(found[1]), process, out, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert all_gone(children, within_s=10.0)


def chat_body(**more: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "good day"}], "max_tokens": 12} | more


def completion_body(**more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "ba ba ba", "max_tokens": 12} | more


BODIES = {"/v1/completions": completion_body, "/v1/chat/completions": chat_body}


def check_refusal(answer: Answer, status: int) -> None:
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
