"""A node's end of the KV network between block stores: parts of the model, blocks of the wire, all checked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec
import pytest

from emulator.core.effects import KvWrite, OpenTicket, Transmit
from emulator.core.errors import RunError
from emulator.core.kv_content import KvContent
from emulator.core.run_spec import RunSpec
from emulator.core.scaling import Scaling
from emulator.core.specs import Scale
from emulator.live.clock import ModelClock
from emulator.live.kv_end import KvEnd
from emulator.live.nic import EmulatedNic
from emulator.live.numpy_device import NumpyBackend, NumpyKvStore
from emulator.live.status import Assignment
from tests.builders import KV_BYTES_PER_TOKEN, load_plan, pair, run_spec

pytestmark = pytest.mark.live

TOKENS = 1_000
TOTAL = TOKENS * KV_BYTES_PER_TOKEN
BLOCKS = -(-TOKENS // 16)
SENT_FROM = tuple(range(BLOCKS))
PUT_INTO = tuple(range(2 * BLOCKS, BLOCKS, -1))
DEADLINE_S = 30.0


class Ends:
    """Both ends of one transfer of request r0, which is over when it has arrived or one of them has failed."""

    def __init__(self, stack: ExitStack, run: RunSpec) -> None:
        self.scaling = Scaling(run.scale)
        self.backend = stack.enter_context(closing(NumpyBackend("test")))
        self.arrived: list[tuple[int, int]] = []
        self.failures: list[Exception] = []
        self.over = asyncio.Event()
        self.stores: list[NumpyKvStore] = []
        self.ends: list[KvEnd] = []
        for node in run.nodes:
            task = Assignment(kind="node", name=node.name, run=run, secret="shared")
            block_bytes = run.wire_block_bytes(node)
            store = NumpyKvStore(
                self.backend, block_bytes, 0, limit_bytes=1 << 28, content=KvContent(run.seed), node=node.name
            )
            clock = ModelClock(run.scale.time)
            clock.begin(0.0)
            end = KvEnd(
                task,
                node,
                EmulatedNic.of(task),
                clock,
                arrived=self._arrived,
                probed=lambda _: None,
                failed=self._failed,
                store=store,
            )
            stack.callback(end.close)
            self.stores.append(store)
            self.ends.append(end)

    def _arrived(self, ticket: int, nbytes: int, _start_s: float, _end_s: float) -> None:
        self.arrived.append((ticket, nbytes))
        self.over.set()

    def _failed(self, error: Exception) -> None:
        self.failures.append(error)
        self.over.set()

    async def transfer(self, cuts: Sequence[int], *, corrupt: bool) -> None:
        """Compute each part up to the next cut, as a step does, and send it; `corrupt` a byte of the last one."""
        sender, receiver = self.ends
        receiver.open(OpenTicket("r0", 7, TOTAL, "prefill-0", PUT_INTO))
        for start, stop in itertools.pairwise([0, *cuts, TOTAL]):
            write = KvWrite("r0", start, stop - start, SENT_FROM)
            self.stores[0].write(write, *self.scaling.wire_span(start, stop))
            self.backend.wait(self.backend.mark())
            if corrupt and stop == TOTAL:
                self.stores[0].gather(SENT_FROM, self.scaling.wire_bytes(0, TOTAL, TOTAL) - 9, 1)[0] ^= 1
            sender.transmit(Transmit("r0", 7, receiver.endpoint, "decode-0", start, stop - start, TOTAL, SENT_FROM))
        await asyncio.wait_for(self.over.wait(), DEADLINE_S)


def carried(run: RunSpec, cuts: Sequence[int], *, corrupt: bool = False) -> Ends:
    async def live() -> Ends:
        with ExitStack() as stack:
            ends = Ends(stack, run)
            await ends.transfer(cuts, corrupt=corrupt)
            wire = ends.scaling.wire_bytes(0, TOTAL, TOTAL)
            if not ends.failures:
                sent, put = ends.stores[0].gather(SENT_FROM, 0, wire), ends.stores[1].gather(PUT_INTO, 0, wire)
                assert bytes(sent) == bytes(put)
                assert ends.stores[1].is_right("r0", PUT_INTO, wire)
            return ends

    return asyncio.run(live())


def a_run(shrink: float) -> RunSpec:
    run = run_spec(pair(), load_plan(), payload_bytes_per_s=1e8, scale=Scale(bytes=shrink))
    return msgspec.structs.replace(run, verify_kv=True)


@pytest.mark.parametrize("shrink", [1.0, 3.7, 100.0])
@pytest.mark.parametrize("cuts", [(), (512_000,), (333_333, 333_334, 999_999)])
def test_kv_goes_from_blocks_to_blocks(shrink: float, cuts: tuple[int, ...]) -> None:
    ends = carried(a_run(shrink), cuts)
    assert ends.failures == []
    assert ends.arrived == [(7, TOTAL)]


@pytest.mark.parametrize("shrink", [1.0, 3.7])
def test_a_byte_that_is_corrupted_before_it_leaves_fails_the_node_by_name(shrink: float) -> None:
    ends = carried(a_run(shrink), (512_000,), corrupt=True)
    (error,) = ends.failures
    assert isinstance(error, RunError)
    assert "r0 from prefill-0 to decode-0" in str(error)
    assert ends.arrived == []
