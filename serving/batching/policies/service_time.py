"""A model of the time that a batch takes, learned from the batches that were run."""

from __future__ import annotations

import math
from collections import deque

_DECAY = 0.97
_RIDGE = 0.02
_SIZE_RATE = 0.25
_ANSWER_RATE = 0.1
_NUM_TRUSTED = 3
_OUTLIER = 4.0


class ServiceTimeModel:
    """A predictor of the seconds for a batch of b requests: a + c b, with a correction for each observed size.

    The line is a recursive least-squares fit with exponential forgetting, and with a ridge towards its last value. If
    all batches have one size, only the sum is learned and the split stays as it was. (A plain fit of such data has no
    solution.) The corrections are moving averages of what the line leaves. They follow the staircase of a model whose
    batches are padded to a few sizes.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._scale = float(max_batch_size)
        self.a_s = 0.0
        """Seconds that a batch costs regardless of its size."""
        self.c_s = 0.0
        """Seconds each request adds."""
        self.deviation_s = 0.0
        """Mean absolute error of the predictions, in seconds."""
        self.answer_s = 0.0
        """Seconds from the end of a batch until its answers have been handed to their callers and sent."""
        self.num_observed = 0
        self._num_answers = 0
        self._weight = self._x = self._xx = self._y = self._xy = 0.0
        self._corrections_s: dict[int, float] = {}
        self._recent_s: deque[float] = deque(maxlen=64)

    @property
    def trusted(self) -> bool:
        """True if enough batches were observed to refuse requests by the prediction."""
        return self.num_observed >= _NUM_TRUSTED

    @property
    def fastest_s(self) -> float:
        """Time of the shortest of the last batches; 0 before the first."""
        return min(self._recent_s, default=0.0)

    def predict_s(self, num_items: int) -> float:
        """Predict the seconds for a batch of `num_items`; 0 before the first observation."""
        return max(0.0, self.a_s + self.c_s * num_items + self._corrections_s.get(num_items, 0.0))

    def cautious_s(self, num_items: int) -> float:
        """Predict the seconds for a batch with a margin for errors, to compare with a deadline."""
        return self.predict_s(num_items) + 2.0 * self.deviation_s + self.answer_s

    def observe_answers(self, seconds: float) -> None:
        """Learn the seconds from the end of a batch until its answers were sent."""
        self._num_answers += 1
        if self._num_answers > _NUM_TRUSTED:
            seconds = min(seconds, _OUTLIER * self.answer_s + 1e-9)  # clipped as in `observe`
        self.answer_s += _ANSWER_RATE * (seconds - self.answer_s)

    def observe(self, num_items: int, seconds: float) -> None:
        """Learn that a batch of `num_items` took `seconds`."""
        if not (seconds >= 0 and math.isfinite(seconds)):
            return
        predicted_s = self.predict_s(num_items)
        self._recent_s.append(seconds)
        self.num_observed += 1
        if self.num_observed > _NUM_TRUSTED:
            # One pause of the machine does not make a new model: a lasting change gets through, a few batches later.
            seconds = min(seconds, _OUTLIER * predicted_s + 1e-9)
            rate = 0.05
            self.deviation_s += rate * (abs(seconds - predicted_s) - self.deviation_s)
        self._fit(num_items / self._scale, seconds)
        left_s = seconds - (self.a_s + self.c_s * num_items)
        known_s = self._corrections_s.get(num_items)
        self._corrections_s[num_items] = (
            _SIZE_RATE * left_s if known_s is None else known_s + _SIZE_RATE * (left_s - known_s)
        )

    def _fit(self, x: float, y: float) -> None:
        keep = _DECAY if self.num_observed > 1 else 0.0
        self._weight = keep * self._weight + 1.0
        self._x = keep * self._x + x
        self._xx = keep * self._xx + x * x
        self._y = keep * self._y + y
        self._xy = keep * self._xy + x * y
        a, c = self.a_s, self.c_s * self._scale
        if self.num_observed == 1:
            # One observation cannot tell the two apart: most of the time of a small batch is overhead.
            a, c = y / (1.0 + x * x), y * x / (1.0 + x * x)
        gap_y = self._y - a * self._weight - c * self._x
        gap_xy = self._xy - a * self._x - c * self._xx
        weight, xx = self._weight + _RIDGE, self._xx + _RIDGE
        determinant = weight * xx - self._x * self._x
        a += (xx * gap_y - self._x * gap_xy) / determinant
        c += (weight * gap_xy - self._x * gap_y) / determinant
        if c < 0.0:
            a, c = self._y / self._weight, 0.0
        elif a < 0.0:
            a, c = 0.0, self._xy / self._xx
        self.a_s, self.c_s = a, c / self._scale
