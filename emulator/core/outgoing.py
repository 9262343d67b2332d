"""The sending side of KV hand-over on one node: computed KV that is held until the receiver has it.

KV leaves when it is computed *and* the receiver has issued a ticket; blocks stay until the receiver acknowledges, the
request is aborted or the node gives up on its router. `overlap = none` hands a request's KV to the link as a whole,
`chunk` each time a prompt chunk has been computed, `layer` each time a group of layers has been computed for a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emulator.core.deployments import Overlap
from emulator.core.effects import CancelTransmit, Effect, Transmit


@dataclass(slots=True, eq=False)
class Held:
    """One request's KV at the sending side, in bytes; `in_parts`: it may leave before it is whole."""

    request_id: str
    total_bytes: int
    in_parts: bool
    computed_bytes: int = 0
    sent_bytes: int = 0
    ticket: int | None = None
    endpoint: str = ""
    destination: str = ""
    ready_s: float | None = None


class Outgoing:
    """Held KV by request. `bytes_per_token` is the KV size of the model, of all its layers.

    At each of the shares `progress` of a step one more of the `layer_groups` is computed; the last one is at its end.
    Prompts of fewer than `least_tokens` leave as a whole. `blocks_of` a request has its KV, where blocks have names.
    """

    def __init__(
        self,
        overlap: Overlap,
        bytes_per_token: int,
        layers: int = 1,
        layer_groups: int = 1,
        least_tokens: int = 0,
        *,
        blocks_of: Callable[[str], tuple[int, ...]] = lambda _: (),
    ) -> None:
        self._leaves_in_parts = overlap != "none"
        self._least_tokens = least_tokens
        self._bytes_per_token = bytes_per_token
        self._layers = layers
        self._boundaries = tuple(group * layers // layer_groups for group in range(1, layer_groups))
        self.progress = tuple(boundary / layers for boundary in self._boundaries)
        self._held: dict[str, Held] = {}
        self._blocks_of = blocks_of

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, request_id: str, prompt_tokens: int) -> bool:
        """A prompt whose KV is to be handed over has been queued here; whether it may leave before it is whole."""
        in_parts = self._leaves_in_parts and prompt_tokens >= self._least_tokens
        self._held[request_id] = Held(request_id, prompt_tokens * self._bytes_per_token, in_parts)
        return in_parts

    def computed(self, request_id: str, tokens: int, now_s: float) -> list[Effect]:
        """`tokens` prompt tokens (in total) have their KV now."""
        return self._hold(request_id, tokens * self._bytes_per_token, now_s)

    def computed_groups(self, request_id: str, tokens: int, chunk: int, groups: int, now_s: float) -> list[Effect]:
        """`tokens` prompt tokens have their KV, and the next `chunk` have that of the first `groups` groups of layers.

        `groups` are fewer than all; a byte that the groups share comes with the later one.
        """
        chunk_bytes = chunk * self._bytes_per_token * self._boundaries[groups - 1] // self._layers
        return self._hold(request_id, tokens * self._bytes_per_token + chunk_bytes, now_s)

    def ticket(self, request_id: str, ticket: int, endpoint: str, destination: str, now_s: float) -> list[Effect]:
        """The receiver has reserved memory and waits for the KV at `endpoint`, that of node `destination`."""
        held = self._held.get(request_id)
        if held is None:
            return []
        held.ticket, held.endpoint, held.destination = ticket, endpoint, destination
        return self._hand_to_link(held, now_s)

    def ready_s(self, request_id: str) -> float | None:
        """When the last byte was handed to the link, model seconds; None before that."""
        held = self._held.get(request_id)
        return held.ready_s if held is not None else None

    def is_computed(self, request_id: str) -> bool:
        """Whether all of the prompt has its KV here."""
        held = self._held.get(request_id)
        return held is not None and held.computed_bytes == held.total_bytes

    def drop(self, request_id: str) -> list[Effect]:
        """The KV is no longer needed (acknowledged, aborted or given up)."""
        held = self._held.pop(request_id, None)
        return [CancelTransmit(held.ticket)] if held is not None and held.ticket is not None else []

    def _hold(self, request_id: str, nbytes: int, now_s: float) -> list[Effect]:
        held = self._held[request_id]
        held.computed_bytes = max(held.computed_bytes, nbytes)
        return self._hand_to_link(held, now_s)

    def _hand_to_link(self, held: Held, now_s: float) -> list[Effect]:
        whole, nbytes = held.computed_bytes == held.total_bytes, held.computed_bytes - held.sent_bytes
        if held.ticket is None or nbytes <= 0 or not (whole or held.in_parts):
            return []
        at, total, blocks = held.sent_bytes, held.total_bytes, self._blocks_of(held.request_id)
        effect = Transmit(held.request_id, held.ticket, held.endpoint, held.destination, at, nbytes, total, blocks)
        held.sent_bytes = held.computed_bytes
        if whole:
            held.ready_s = now_s
        return [effect]
