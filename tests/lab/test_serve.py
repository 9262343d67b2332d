"""How serving is told to end."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from emulator.lab import serve


def test_a_second_interrupt_ends_it_as_an_interrupt_and_a_third_leaves_what_is_undone_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undone = []

    async def served(_: object, service: Any) -> None:
        with serve._told_by_interrupt(service.stop):
            signal.raise_signal(signal.SIGINT)
            await service.stop.wait()
            signal.raise_signal(signal.SIGINT)
            try:
                await asyncio.Event().wait()
            finally:
                signal.raise_signal(signal.SIGINT)
                for _ in range(100):
                    await asyncio.sleep(0)
                undone.append("everything")

    async def stopping() -> SimpleNamespace:
        return SimpleNamespace(stop=asyncio.Event())

    monkeypatch.setattr(serve, "_serve", served)
    with pytest.raises(KeyboardInterrupt):
        serve.serve(None, asyncio.run(stopping()))  # type: ignore[arg-type]
    assert undone == ["everything"]
