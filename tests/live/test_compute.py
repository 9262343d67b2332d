"""A computing device in fake time: what it enqueues and when, what it tells, and that it ends whenever it is closed."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence

import pytest

from emulator.core.effects import KvWrite
from emulator.core.errors import CapacityError, ConfigError, RunError
from emulator.core.scaling import Scaling
from emulator.core.specs import Scale
from emulator.core.step_portions import PORTION_S
from emulator.live.compute import AHEAD_S, WORK_SHARE, ComputeDevice, Hardware
from emulator.live.device import DeviceStep
from tests.live.fake_backend import UNITS, FakeBackend, FakeStore, in_fake_time

START_S = 100.0
DEADLINE_S = 30.0

Told = tuple[str, float]


class Rig:
    """A device on a fake backend; `told` is what it tells, with the fake instant at which it does."""

    def __init__(self, *, alone: bool = True, scale: Scale | None = None) -> None:
        self.backend = FakeBackend(START_S)
        self.store = FakeStore(self.backend)
        self.told: list[Told] = []
        self.slips: list[float] = []
        self.failures: list[Exception] = []
        self.over = asyncio.Event()
        self.device = ComputeDevice(
            asyncio.get_running_loop(),
            lambda _: Hardware(self.backend, UNITS, self.store),
            step_done=self._done,
            step_progress=lambda passes: self.told.append((f"passed {passes}", self.backend.now_s)),
            failed=self._failed,
            scaling=Scaling(scale or Scale()),
            alone=alone,
            name="node-0",
        )

    def _done(self, woke_s: float, slipped_s: float) -> None:
        self.told.append(("done", woke_s))
        self.slips.append(slipped_s)
        self.over.set()

    def _failed(self, error: Exception) -> None:
        self.failures.append(error)
        self.over.set()

    async def run(self, step: DeviceStep) -> None:
        self.over.clear()
        self.backend.now_s = max(self.backend.now_s, step.start_s)
        self.device.run(step)
        await asyncio.wait_for(self.over.wait(), DEADLINE_S)


def a_step(
    seconds: float,
    prefill_s: float = 0.0,
    progress: Sequence[float] = (),
    writes: Sequence[KvWrite] = (),
    start_s: float = START_S,
) -> DeviceStep:
    return DeviceStep(
        deadline_s=start_s + seconds,
        progress_at_s=[start_s + share * seconds for share in progress],
        start_s=start_s,
        prefill_s=prefill_s,
        progress=progress,
        writes=writes,
    )


def on_rig(
    patch: pytest.MonkeyPatch,
    *steps: DeviceStep,
    before: Callable[[Rig], None] = lambda _: None,
    alone: bool = True,
    scale: Scale | None = None,
) -> Rig:
    """The steps run one after the other; the device is closed then."""

    async def live() -> Rig:
        rig = Rig(alone=alone, scale=scale)
        in_fake_time(patch, rig.backend)
        await rig.device.opened()
        try:
            before(rig)
            for step in steps:
                await rig.run(step)
        finally:
            await asyncio.to_thread(rig.device.close)
        assert rig.backend.closed == rig.store.closed == 1
        return rig

    return asyncio.run(live())


def test_a_step_is_arithmetic_then_reads_then_kv_and_ends_to_the_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    write = KvWrite("r0", 500, 2_000, (3, 4, 5))
    rig = on_rig(monkeypatch, a_step(0.010, prefill_s=0.004, writes=[write]))
    kinds = [kind for kind, _ in itertools.groupby(rig.backend.kinds())]
    assert kinds == ["gemm", "fill", "read", "write", "mark", "wait"]
    assert ("write", "r0", 500, 2_500) in rig.backend.calls
    assert rig.told == [("done", START_S + 0.010)]
    assert rig.slips == [0.0]
    assert rig.backend.worked_s == pytest.approx(WORK_SHARE * 0.010, rel=0.01)
    (read,) = [call[1] for call in rig.backend.calls if call[0] == "read"]
    assert read / UNITS.read_bytes_per_s == pytest.approx(WORK_SHARE * 0.006, rel=0.01)


def test_a_step_without_prompts_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = on_rig(monkeypatch, a_step(0.010))
    assert rig.backend.kinds() == ["read", "mark", "wait"]


def test_progress_is_told_at_its_instants_when_the_kv_up_to_there_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, writes = (0.25, 0.75), [KvWrite("a", 0, 1_001, (0, 1)), KvWrite("b", 7, 3, (2,))]
    step = a_step(0.020, prefill_s=0.015, progress=progress, writes=writes)
    rig = on_rig(monkeypatch, step)
    assert [what for what, _ in rig.told] == ["passed 1", "passed 2", "done"]
    done_s = rig.told[-1][1]
    assert done_s == step.deadline_s
    kinds = rig.backend.kinds()
    assert kinds.count("mark") == kinds.count("wait") == 3
    assert kinds.index("wait") > len(kinds) - 1 - kinds[::-1].index("mark"), "all is enqueued before it waits"
    marks = [n for n, kind in enumerate(kinds) if kind == "mark"]
    for share, mark in zip(progress, marks, strict=False):
        written = dict.fromkeys("ab", 0)
        for call in rig.backend.calls[:mark]:
            if call[0] == "write":
                written[call[1]] = max(written[call[1]], call[3])
        assert written["a"] >= int(1_001 * share)
        assert written["b"] >= 7 + int(3 * share)


def test_every_byte_is_written_once_in_order_and_on_the_wire_s_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    step = a_step(0.5, prefill_s=0.4, progress=(0.1, 0.5), writes=[KvWrite("a", 1_000, 99_000, (0,))])
    rig = on_rig(monkeypatch, step, scale=Scale(bytes=3.0))
    spans = [call[2:] for call in rig.backend.calls if call[0] == "write"]
    assert spans[0][0] == 333
    assert spans[-1][1] == 33_334
    for (_, stop), (start, _) in itertools.pairwise(spans):
        assert stop - 1 <= start <= stop


def test_a_long_step_is_fed_in_portions_a_little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[float] = []

    def watch(rig: Rig) -> None:
        rig.backend.on_wait = lambda: ahead.append(rig.backend.free_s - rig.backend.now_s)

    rig = on_rig(monkeypatch, a_step(2.0, prefill_s=1.0), before=watch)
    assert rig.told == [("done", START_S + 2.0)]
    assert rig.backend.worked_s == pytest.approx(WORK_SHARE * 2.0, rel=0.01)
    assert max(ahead) <= AHEAD_S + PORTION_S
    assert min(ahead[:-3]) > PORTION_S, "the device never runs out of work"


def test_work_that_overruns_slips_by_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def contend(rig: Rig) -> None:
        rig.backend.slowness = 1.5

    rig = on_rig(monkeypatch, a_step(0.010, prefill_s=0.005), before=contend)
    assert rig.slips == [pytest.approx(1.5 * WORK_SHARE * 0.010 - 0.010, rel=0.02)]
    ((what, woke_s),) = rig.told
    assert what == "done"
    assert woke_s == pytest.approx(START_S + 0.010 + rig.slips[0])


def test_work_within_the_pad_does_not_slip(monkeypatch: pytest.MonkeyPatch) -> None:
    def drift(rig: Rig) -> None:
        rig.backend.slowness = 1.01

    rig = on_rig(monkeypatch, a_step(0.010, prefill_s=0.005), before=drift)
    assert rig.slips == [0.0]
    assert rig.told == [("done", START_S + 0.010)]


def test_a_host_that_is_late_does_less_work_but_not_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(seconds: float) -> Callable[[Rig], None]:
        def set_on(rig: Rig) -> None:
            rig.backend.now_s += seconds

        return set_on

    little = on_rig(monkeypatch, a_step(0.010, prefill_s=0.005), before=late(0.001))
    assert little.backend.worked_s == pytest.approx(WORK_SHARE * 0.009, rel=0.01)
    assert little.slips == [0.0]
    very = on_rig(monkeypatch, a_step(0.010, prefill_s=0.005), before=late(0.005))
    assert very.backend.worked_s == pytest.approx(WORK_SHARE * 0.0075, rel=0.01)
    assert very.slips == [pytest.approx(0.005 + WORK_SHARE * 0.0075 - 0.010, rel=0.05)]


@pytest.mark.parametrize(
    ("alone", "copies", "follows"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_drift_is_followed_by_steps_that_have_the_device_for_themselves(
    monkeypatch: pytest.MonkeyPatch, alone: bool, copies: bool, follows: bool
) -> None:
    def drift(rig: Rig) -> None:
        rig.backend.slowness = 1.05
        if copies:
            rig.backend.on_wait = lambda: rig.device.store.scatter((0,), 0, [b"kv"])

    steps = [a_step(0.010, prefill_s=0.005, start_s=START_S + n) for n in range(300)]
    rig = on_rig(monkeypatch, *steps, before=drift, alone=alone)
    assert rig.slips[0] > 0.0
    assert (rig.slips[-1] == 0.0) == follows


def test_a_copy_that_lasts_longer_than_the_step_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    within, go_on = threading.Event(), threading.Event()

    class SlowStore(FakeStore):
        def gather(self, blocks: Sequence[int], offset: int, nbytes: int) -> memoryview:
            within.set()
            go_on.wait(DEADLINE_S)
            return super().gather(blocks, offset, nbytes)

    async def live() -> tuple[bool, bool]:
        rig = Rig()
        await rig.device.opened()
        rig.device.store._store = SlowStore(rig.backend)
        in_fake_time(monkeypatch, rig.backend)
        copier = asyncio.create_task(asyncio.to_thread(rig.device.store.gather, (0,), 0, 1))
        await asyncio.to_thread(within.wait, DEADLINE_S)
        copies = rig.device.store.copies
        during = rig.device.store.still_since(copies)
        go_on.set()
        await copier
        after = rig.device.store.still_since(rig.device.store.copies)
        await asyncio.to_thread(rig.device.close)
        return during, after

    assert asyncio.run(live()) == (False, True)


def test_closing_within_a_step_tells_nothing_and_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> Rig:
        rig = Rig()
        await rig.device.opened()
        in_fake_time(monkeypatch, rig.backend)
        waits, closing = threading.Event(), threading.Event()

        def hold() -> None:
            waits.set()
            closing.wait(DEADLINE_S)

        rig.backend.on_wait = hold
        rig.device.run(a_step(5.0, prefill_s=2.0, progress=(0.5,)))
        await asyncio.to_thread(waits.wait, DEADLINE_S)
        closer = asyncio.create_task(asyncio.to_thread(rig.device.close))
        await asyncio.to_thread(rig.device._stop.wait, DEADLINE_S)
        closing.set()
        await closer
        rig.device.close()
        await asyncio.sleep(0.01)
        return rig

    rig = asyncio.run(live())
    assert rig.told == []
    assert rig.failures == []
    assert rig.backend.closed == rig.store.closed == 1
    assert rig.backend.kinds().count("wait") == 1
    assert rig.backend.worked_s < 0.2


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (RuntimeError("it broke\nin two lines"), RunError, "node-0: the device failed: RuntimeError: it broke"),
        (CapacityError("node-0: no memory"), CapacityError, "node-0: no memory"),
    ],
)
def test_a_failure_in_the_thread_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception], text: str
) -> None:
    def fail() -> None:
        raise raised

    def break_it(rig: Rig) -> None:
        rig.backend.on_wait = fail

    rig = on_rig(monkeypatch, a_step(0.010), before=break_it)
    (error,) = rig.failures
    assert type(error) is kind
    assert str(error) == text
    assert rig.told == []


def opening(open_hardware: Callable[[threading.Event], Hardware]) -> ComputeDevice:
    return ComputeDevice(
        asyncio.get_running_loop(),
        open_hardware,
        step_done=lambda *_: None,
        step_progress=lambda _: None,
        failed=lambda _: None,
        scaling=Scaling(Scale()),
        alone=True,
        name="node-0",
    )


def test_a_device_that_cannot_be_opened_says_so_at_once() -> None:
    def absent(_: threading.Event) -> Hardware:
        raise ConfigError("no such device")

    async def live() -> None:
        await opening(absent).opened()

    with pytest.raises(ConfigError, match="no such device"):
        asyncio.run(live())


def test_the_loop_goes_on_while_a_device_is_opened_and_whoever_cancels_that_ends_it() -> None:
    backend = FakeBackend()
    store = FakeStore(backend)

    def late(stop: threading.Event) -> Hardware:
        assert stop.wait(DEADLINE_S), "it is not stopped"
        return Hardware(backend, UNITS, store)

    async def live() -> ComputeDevice:
        device = opening(late)
        opened = asyncio.create_task(device.opened())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not opened.done()
        opened.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opened
        return device

    device = asyncio.run(live())
    assert not device._thread.is_alive()
    assert backend.closed == store.closed == 1
