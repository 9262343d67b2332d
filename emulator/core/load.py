"""The load generator as a state machine: what to send when, for the live client and for the simulator alike.

Open-loop requests follow their schedule whatever the cluster does; a closed-loop user waits for its last one to end.
Latency counts from the scheduled instant, so a driver that asks late changes nothing but its own schedule delay.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import MappingProxyType

from emulator.core.errors import ProtocolError
from emulator.core.lengths import LengthSource
from emulator.core.workload import LoadPlan, PlannedRequest, UserPlan

# A user whose requests are refused at once, without think time, would otherwise send for ever at one instant.
MIN_USER_PERIOD_S = 1e-3


class _User:
    """A closed-loop user's plan and how many requests it has scheduled."""

    def __init__(self, plan: UserPlan) -> None:
        self.plan = plan
        self.lengths = LengthSource(plan.lengths, plan.seed)
        self.scheduled = 0

    def next_request(self, scheduled_s: float) -> PlannedRequest:
        prompt, output = self.lengths.draw(1)[0]
        request_id = self.plan.request_id(self.scheduled)
        self.scheduled += 1
        return PlannedRequest(request_id, self.plan.stream, scheduled_s, prompt, output)


class LoadGenerator:
    """Hands out each request of a plan once, when it is due. Times are model seconds from the start of the run."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._next_open = 0
        self._now_s = 0.0
        self._queue: list[tuple[float, str, PlannedRequest, _User]] = []
        self._outstanding: dict[str, PlannedRequest] = {}
        self._waiting: dict[str, _User] = {}  # request id -> the user whose turn ends with it
        self._handed_out = 0
        self._finished = 0
        for user_plan in plan.users:
            self._schedule(_User(user_plan), user_plan.start_s)

    @property
    def outstanding(self) -> Mapping[str, PlannedRequest]:
        """Requests handed out and not finished, by id, in the order of sending."""
        return MappingProxyType(self._outstanding)

    def over(self) -> bool:
        """Whether nothing is outstanding and nothing will ever be due again."""
        return not self._outstanding and self.exhausted()

    def next_due_s(self) -> float | None:
        """The instant of the next scheduled request; None when nothing is scheduled (users may be waiting)."""
        instants = [self._queue[0][0]] if self._queue else []
        if self._next_open < len(self._plan.open):
            instants.append(self._plan.open[self._next_open].scheduled_s)
        return min(instants, default=None)

    def due(self, now_s: float) -> list[PlannedRequest]:
        """Everything scheduled at or before `now_s` and not handed out yet, in order of time, ties by id."""
        self._now_s = max(self._now_s, now_s)
        requests: list[PlannedRequest] = []
        planned = self._plan.open
        while self._next_open < len(planned) and planned[self._next_open].scheduled_s <= now_s:
            requests.append(planned[self._next_open])
            self._next_open += 1
        while self._queue and self._queue[0][0] <= now_s:
            _, request_id, request, user = heapq.heappop(self._queue)
            self._waiting[request_id] = user
            requests.append(request)
        requests.sort(key=lambda request: (request.scheduled_s, request.request_id))
        self._outstanding.update((request.request_id, request) for request in requests)
        self._handed_out += len(requests)
        return requests

    def finished(self, request_id: str, now_s: float) -> None:
        """A request has ended, well or badly: its user, if it has one, goes on at now + think time.

        A user sends at most once every MIN_USER_PERIOD_S, and nothing at or after the plan's duration. Raises
        ProtocolError for a request that is not outstanding.
        """
        request = self._outstanding.pop(request_id, None)
        if request is None:
            raise ProtocolError(f"request {request_id} has ended but is not outstanding")
        self._now_s = max(self._now_s, now_s)
        self._finished += 1
        user = self._waiting.pop(request_id, None)
        if user is not None:
            self._schedule(user, max(now_s + user.plan.think_s, request.scheduled_s + MIN_USER_PERIOD_S))

    def exhausted(self) -> bool:
        """Whether nothing will ever be due again, judged at the latest instant that this generator was told."""
        if self._queue or self._next_open < len(self._plan.open):
            return False
        return not any(self._now_s + user.plan.think_s < self._plan.duration_s for user in self._waiting.values())

    def check_integrity(self) -> None:
        """Assert that every request is in one place and every user has one turn at most."""
        assert self._handed_out == self._finished + len(self._outstanding), "a request was lost or counted twice"
        assert self._waiting.keys() <= self._outstanding.keys(), "a user waits for a request that is not outstanding"
        turns = [id(user) for user in self._waiting.values()] + [id(entry[3]) for entry in self._queue]
        assert len(turns) == len(set(turns)) <= len(self._plan.users), "a user has two turns"
        assert all(entry[0] < self._plan.duration_s for entry in self._queue), "scheduled after the end"
        assert 0 <= self._next_open <= len(self._plan.open), "beyond the plan"

    def _schedule(self, user: _User, at_s: float) -> None:
        if at_s < self._plan.duration_s:
            request = user.next_request(at_s)
            heapq.heappush(self._queue, (at_s, request.request_id, request, user))
