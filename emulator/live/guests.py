"""Requests of a run's guests as the router saw them, for a guest that is gone before it hands in its own records.

A guest is a client beside the run's own. The nodes worked for it, so what its requests came to belongs to the run.
"""

from __future__ import annotations

from emulator.core.messages import Finished, Submit, Tokens
from emulator.core.recorder import END, Recorder
from emulator.core.records import Record
from emulator.core.workload import PlannedRequest


class GuestRecords:
    """A recorder for each guest that has not reported yet. Instants are model seconds on the router's clock.

    A guest's request is taken to have been due when it came here; its stream has the guest's name.
    """

    def __init__(self) -> None:
        self._recorders: dict[str, Recorder] = {}
        self._recording = True

    def heard(self, guest: str, message: Submit, now_s: float) -> None:
        """A request came."""
        if self._recording:
            request = PlannedRequest(message.request_id, guest, now_s, message.prompt_tokens, message.max_tokens)
            self._recorders.setdefault(guest, Recorder()).sent(request, now_s)

    def told(self, guest: str, message: Tokens | Finished, now_s: float) -> None:
        """What a guest is told of its requests, be it there to hear it or not."""
        recorder = self._recorders.get(guest)
        if recorder is None:
            return
        if isinstance(message, Tokens):
            recorder.tokens(message, now_s)
        else:
            recorder.finished(message, now_s)

    def handed_in(self, guest: str) -> None:
        """A guest has reported all its requests itself."""
        self._recorders.pop(guest, None)

    def cut(self, now_s: float) -> None:
        """What has not ended by now is unfinished, and nothing more is recorded. Idempotent."""
        if self._recording:
            self._recording = False
            for recorder in self._recorders.values():
                recorder.cut(now_s, END)

    def records(self) -> tuple[Record, ...]:
        """The requests of those that have not handed in theirs."""
        return tuple(record for recorder in self._recorders.values() for record in recorder.records())
