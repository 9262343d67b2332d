"""Which prompts a decode node reads when (`transfer_mode = "pull"`): it asks for KV, instead of being sent it.

A prompt is readable when it has memory here and its KV is computed. Prompts are read in the order in which they became
readable, from each source at most so many at a time; one that cannot be read yet stops no other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt whose KV is to come from node `source`."""

    source: str
    computed: bool
    has_memory: bool = False


class Reads:
    """Prompts by request. A read is under way from `begin` until it is `over`."""

    def __init__(self, most_per_source: int) -> None:
        self._most = most_per_source
        self._prompts: dict[str, _Prompt] = {}
        self._readable: dict[str, str] = {}  # request -> source, in order
        self._under_way: dict[str, str] = {}  # request -> source
        self._busy: Counter[str] = Counter()
        self._readable_s: dict[str, float] = {}
        self.due = False
        """Whether something has changed since `begin`, so that a read may have to begin."""

    def expect(self, request_id: str, source: str, *, computed: bool) -> None:
        """A prompt is to be read from `source`, where it may be `computed` already."""
        self._prompts[request_id] = _Prompt(source, computed)

    def granted(self, request_id: str) -> None:
        """It has memory here."""
        prompt = self._prompts[request_id]
        prompt.has_memory = True
        self._line_up(request_id, prompt)

    def computed(self, request_id: str) -> None:
        """Its KV is there to be read; of a request that has left in the meantime nobody wants to know."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and not prompt.computed:
            prompt.computed = True
            self._line_up(request_id, prompt)

    def over(self, request_id: str) -> None:
        """Its KV is here, or not wanted any more."""
        self._prompts.pop(request_id, None)
        self._readable.pop(request_id, None)
        self._readable_s.pop(request_id, None)
        source = self._under_way.pop(request_id, None)
        if source is not None:
            self._busy[source] -= 1
            self.due = True

    def begin(self, now_s: float) -> list[tuple[str, float]]:
        """The requests whose KV is to be read now, each with the instant at which it became readable.

        Their reads are under way. To be called at every instant at which something is `due`.
        """
        self.due = False
        begun = []
        for request_id in self._readable.keys() - self._readable_s.keys():
            self._readable_s[request_id] = now_s
        for request_id, source in self._readable.items():
            if self._busy[source] < self._most:
                self._busy[source] += 1
                begun.append(request_id)
        for request_id in begun:
            self._under_way[request_id] = self._readable.pop(request_id)
        return [(request_id, self._readable_s[request_id]) for request_id in begun]

    def _line_up(self, request_id: str, prompt: _Prompt) -> None:
        if prompt.computed and prompt.has_memory:
            self._readable[request_id] = prompt.source
            self.due = True

    def check_integrity(self) -> None:
        """Reads are counted by source and kept within bounds, none waits without need, and each is of a prompt here."""
        sources = list(self._under_way.values())
        assert sum(self._busy.values()) == len(sources), "reads are miscounted"
        assert all(busy == sources.count(source) for source, busy in self._busy.items()), "reads are miscounted"
        assert all(busy <= self._most for busy in self._busy.values()), "too many reads from one source"
        assert all(self._busy[source] >= self._most for source in self._readable.values()), "a read waits without need"
        assert self._under_way.keys() | self._readable.keys() <= self._prompts.keys(), "a read of nobody's prompt"
        assert not self._under_way.keys() & self._readable.keys(), "a prompt is read twice"
