"""The arithmetic of a centralised run: its batches, the shares they are cut into, and what is due after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from orchestray.platform.data.even_split import split_evenly
from orchestray.platform.data.order import share_pieces

Consistency = Literal["synchronous", "stale", "asynchronous"]
Balance = Literal["even", "speed"]


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of the coordinator. Either `total_steps` or `epochs` is given."""

    num_samples: int
    """Number of samples of the training data."""
    num_validation_samples: int
    """Number of samples of the validation data; 0: the run does not validate."""
    batch_size: int
    num_shares: int
    """Number of shares that a batch is cut into at first: workers, less those that only repeat the work of others."""
    consistency: Consistency = "synchronous"
    staleness: int = 0
    """Bound s on the staleness, with `stale`."""
    accumulate: int = 1
    backup_workers: int = 0
    """Number of workers that may repeat the work of others at the same time."""
    lookahead: int = 1
    """Number of shares that a worker may hold at a time. 2 to compute one while the last is being sent; as many as it
    pushes at once, and one more to overlap that.
    """
    total_steps: int | None = None
    epochs: int | None = None
    validate_every_steps: int | None = None
    """None: after every epoch."""
    checkpoint_every_steps: int | None = None
    """None: no checkpoint is ever written."""
    start_step: int = 0
    """Steps that were done before this coordinator began; what was due after them has been done."""
    balance: Balance = "even"
    """Size of the shares of a batch: the same for all, or as the speed of each share's worker allows."""
    one_share_each: bool = False
    """True if no worker may have a second share of a batch while another worker is still expected or may return. A rule
    that withstands f workers would be defeated by fewer that count as f + 1. For `synchronous` batches.
    """

    best: Sequence[str] | None = None
    """Metric and mode of the best checkpoint, which is saved as soon as a validation finds it; None: none is chosen."""
    start_best: Mapping[str, Any] | None = None
    """Best checkpoint of the steps that were done before, as `Best.after` returns it."""
    deposits: bool = False
    """True if workers have state that belongs in a checkpoint; each is then ordered to deposit it before one is saved.
    """

    def __post_init__(self) -> None:
        if (self.total_steps is None) == (self.epochs is None):
            raise ValueError("either total_steps or epochs is to be given")
        for name in ("num_samples", "batch_size", "num_shares", "accumulate", "lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.balance == "speed" and (self.bound is None or self.backup_workers):
            raise ValueError("shares by speed are for batches that every worker has one share of, and no copies")
        if self.one_share_each and self.consistency != "synchronous":
            raise ValueError(f"one share each is of one batch at a time, and {self.consistency} ones are several")

    @cached_property
    def last_step(self) -> int:
        """Last step of the run, unless it is stopped earlier."""
        if self.total_steps is not None:
            return self.total_steps
        return int(self.epochs or 0) * self.steps_per_epoch

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch; the last one may be short."""
        return -(-self.num_samples // self.batch_size)

    @cached_property
    def bound(self) -> int | None:
        """Number of batches that may begin before the oldest incomplete one is complete, less one; None: any number."""
        return {"synchronous": 0, "stale": self.staleness, "asynchronous": None}[self.consistency]

    def batch_samples(self, step: int) -> int:
        """Return the number of samples of batch `step`, from 1."""
        return self.samples_through(step) - self.samples_through(step - 1)

    def samples_through(self, step: int) -> int:
        """Return the number of samples of the run in the batches up to and including `step`."""
        epochs, index = divmod(step, self.steps_per_epoch)
        return epochs * self.num_samples + min(index * self.batch_size, self.num_samples)

    def shares(self, step: int, num_shares: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Return index and pieces of the shares of a batch that have a sample, cut like in `SampleStream`.

        Args:
            step: batch, from 1.
            num_shares: number of shares.

        Returns:
            For each share its index, and for each micro-batch its positions in the epoch, from and up to.
        """
        first, size = (step - 1) % self.steps_per_epoch * self.batch_size, self.batch_samples(step)
        cut = []
        for share in range(num_shares):
            pieces = share_pieces(first, size, accumulate=self.accumulate, num_shares=num_shares, share=share)
            if pieces:
                cut.append((share, tuple(pieces)))
        return cut

    def shares_of(self, step: int, sizes: Sequence[int]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Return the same as `shares`, for shares of given sizes.

        Each micro-batch is cut in the proportions of the whole batch, so with `accumulate` the sizes are approximate.

        Args:
            step: batch, from 1.
            sizes: number of samples of each share; their sum is that of the batch.
        """
        first, ends = (step - 1) % self.steps_per_epoch * self.batch_size, [0, *accumulate(sizes)]
        pieces: list[list[tuple[int, int]]] = [[] for _ in sizes]
        for start, stop in split_evenly(ends[-1], self.accumulate):
            bounds = [first + start + (stop - start) * end // ends[-1] for end in ends]
            for own, (a, b) in zip(pieces, pairwise(bounds), strict=True):
                if a < b:
                    own.append((a, b))
        return [(index, tuple(own)) for index, own in enumerate(pieces) if own]

    def validates_after(self, step: int, last: bool) -> bool:
        """Return True if a validation is due after a step, by the rule of the lock-step replica.

        Args:
            step: number of the step, from 1.
            last: True if it is the last step of the run.
        """
        is_due = last or step % (self.validate_every_steps or self.steps_per_epoch) == 0
        return is_due and self.num_validation_samples > 0

    def saves_after(self, step: int, last: bool, *, is_best: bool = False) -> bool:
        """Return True if a checkpoint is due after a step.

        Args:
            step: number of the step, from 1.
            last: True if it is the last step of the run.
            is_best: True if its validation is the best so far.
        """
        every = self.checkpoint_every_steps
        return every is not None and (last or is_best or step % every == 0)
