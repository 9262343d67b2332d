"""How a computing device keeps its steps at the modelled time though clocks and temperatures drift."""

from __future__ import annotations


class StepScale:
    """`factor` by which planned work is multiplied, from a slow moving average of how long steps alone really took.

    A step that shared its device, or whose time only contention or a hiccup explains, says nothing and is left out.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def note(self, planned_s: float, took_s: float, *, alone: bool) -> None:
        """Work planned for `planned_s` took `took_s` on the device."""
        raise NotImplementedError
