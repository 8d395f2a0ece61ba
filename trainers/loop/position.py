"""The position of a replica in its run, kept in checkpoints beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.platform.run.checkpoint_files import BEST_STEP, checkpoint_name

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import ReplicaSettings


@dataclass
class Position:
    """The position of a replica in the run: all state of a checkpoint besides its tensors. JSON values only."""

    step: int = 0
    """Number of completed steps."""
    validated_step: int = 0
    validation: dict[str, Any] | None = None
    """Metrics of the last validation."""
    epoch: int = 0
    """Epoch of the sums below, counted from 0."""
    epoch_loss_sum: float = 0.0
    epoch_samples: int = 0
    bytes_sent: int = 0
    """Bytes that all replicas sent in the completed steps."""
    bytes_dense: int = 0
    """Bytes that they would have sent without compression."""
    stopped_by: str | None = None
    """Reason that ended the run, `until`, `early_stopping` or `time_limit_s`; None before."""
    best: float | None = None
    """Best value of the metric of `train.early_stopping`."""
    num_worse: int = 0
    """Number of validations since that value."""
    best_checkpoint: dict[str, Any] | None = None
    """Best checkpoint so far: `step`, `metric`, `mode` and `value`; None if there is none."""

    batch_sizes: list[list[int]] = field(default_factory=list)
    """Growths of the batch by what was measured: the step after which, and the size from there on."""
    noise: dict[str, float] | None = None
    """State of the measurement of the gradient noise scale; None before there is one."""
    has_checked_loss: bool = False
    """True if the loss was found to be a mean over samples: a run that recovers does not look again."""

    def begin_attempt(self, settings: ReplicaSettings) -> None:
        """Forget the reason for which an earlier attempt ended, if it is none any more.

        Each attempt has its own time limit, and may have another goal or more patience.
        """
        until, early = settings.until, settings.early_stop
        still = {
            "until": until is not None and self.validation is not None and until.reached(self.means),
            "early_stopping": early is not None and self.num_worse >= early.patience,
        }
        if self.stopped_by is not None and not still.get(self.stopped_by, False):
            self.stopped_by = None

    @property
    def means(self) -> dict[str, Any]:
        """The means of the last validation; over all members, if the run trains an ensemble."""
        return {key: value for key, value in (self.validation or {}).items() if key != "members"}

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's state, JSON values, in which a run that resumes finds its position."""
        best = self.best_checkpoint
        return {"position": dict(vars(self)), BEST_STEP: None if best is None else best["step"]}

    def summary(self) -> dict[str, Any]:
        """Return the entry of the run's result for the best checkpoint; empty if there is none."""
        best = self.best_checkpoint
        return {} if best is None else {"best": {"checkpoint": checkpoint_name(best["step"]), **best}}

    def complete(self, step: int, epoch: int, batch_samples: int, loss: float | None) -> None:
        """Move on behind a step.

        Args:
            step: number of the step.
            epoch: its epoch, counted from 0.
            batch_samples: samples of its batch.
            loss: its mean loss; None if `add_loss` gets it later.
        """
        if epoch != self.epoch:
            self.epoch, self.epoch_loss_sum, self.epoch_samples = epoch, 0.0, 0
        self.step = step
        self.epoch_samples += batch_samples
        if loss is not None:
            self.epoch_loss_sum += loss * batch_samples

    def add_loss(self, epoch: int, batch_samples: int, loss: float) -> None:
        """Add the mean loss of a step that was completed in `epoch`, if that is still the epoch."""
        if epoch == self.epoch:
            self.epoch_loss_sum += loss * batch_samples
