"""Model time on a real clock: `scale.time = k` makes each model second last k seconds of the monotonic clock."""

from __future__ import annotations

import time

from emulator.core.clock_offset import ClockOffset


class ModelClock:
    """Model seconds since `t0_s` of the monotonic clock; before `begin` model time stands at 0.

    `offset` tells how far the router's clock is from this process's.
    """

    def __init__(self, scale_time: float) -> None:
        self.scale_time = scale_time
        self.t0_s: float | None = None
        self.offset = ClockOffset()

    def begin(self, router_t0_s: float) -> None:
        """Model time 0 is at `router_t0_s` of the router's monotonic clock."""
        self.t0_s = router_t0_s - self.offset.seconds

    def on_router(self, here_s: float) -> float:
        """An instant of this process's monotonic clock on the router's."""
        return here_s + self.offset.seconds

    def now_s(self) -> float:
        """The present, in model seconds."""
        return self.to_model_s(time.monotonic())

    def to_model_s(self, wall_s: float) -> float:
        """An instant of the monotonic clock in model seconds."""
        return 0.0 if self.t0_s is None else (wall_s - self.t0_s) / self.scale_time

    def to_wall_s(self, model_s: float) -> float:
        """A model instant on the monotonic clock."""
        assert self.t0_s is not None, "the run has not begun"
        return self.t0_s + model_s * self.scale_time
