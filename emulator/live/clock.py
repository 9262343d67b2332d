"""Model time on a real clock: `scale.time = k` makes each model second last k seconds of the monotonic clock."""

from __future__ import annotations

import time


class ModelClock:
    """Model seconds since `t0_s` of the monotonic clock; before `begin` model time stands at 0."""

    def __init__(self, scale_time: float) -> None:
        self.scale_time = scale_time
        self.t0_s: float | None = None

    def begin(self, t0_s: float) -> None:
        """Model time 0 is at `t0_s` of `time.monotonic()`."""
        self.t0_s = t0_s

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
