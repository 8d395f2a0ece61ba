"""Validations, checkpoints, the best model so far and the end of a run, when they are due between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.comm import objects

if TYPE_CHECKING:
    from orchestray.platform.data.batch_plan import BatchPlan
    from orchestray.trainers.config.goals import Best
    from orchestray.trainers.loop.replica import Replica
    from orchestray.trainers.loop.step_log import Agreed


class Due:
    """All that a replica does between two steps.

    Args:
        replica: the replica. All workers make one at the same time.
        total: steps of the whole run.
        end: step after which this attempt ends, at most `total`.
    """

    def __init__(self, replica: Replica, total: int, end: int) -> None:
        self._replica, self._settings = replica, replica.settings
        self._total, self._end = total, end
        # Rank 0 writes; if the state is sharded, every worker takes part.
        saves = replica.checkpoints is not None
        self._saves = saves if self._settings.is_replicated else any(objects.gather_json(replica.world, saves))

    def after(self, agreed: Agreed, plan: BatchPlan) -> str | None:
        """Validate and save if due, and return the reason to end, or None. Every worker returns the same.

        Args:
            agreed: what all workers agreed on.
            plan: plan of the batches.
        """
        position, settings = self._replica.position, self._settings
        every = settings.validate_every_steps
        is_time = plan.is_epoch_end(position.step) if every is None else position.step % every == 0
        last = position.step >= self._end or agreed.late > 0
        is_new = position.stopped_by is None and position.step > position.validated_step
        if is_new and (is_time or last) and self._replica.validates:
            self._validate(counts=is_time)
        if agreed.late > 0:
            position.stopped_by = position.stopped_by or "time_limit_s"
        if settings.best is None:
            position.best_checkpoint = None  # of a run that is resumed without it
        else:
            self._keep_best(settings.best)
        due = position.step % settings.checkpoint_every_steps == 0 and position.step > self._replica.saved_step
        if self._saves and due:
            self._replica.save()
        if position.stopped_by is not None:
            return position.stopped_by
        return "interrupted" if agreed.stop > 0 and position.step < self._total else None

    def save_the_end(self) -> None:
        """Save the state of the last step, if it is not saved yet."""
        if self._saves and self._replica.saved_step != self._replica.position.step:
            self._replica.save()

    def _validate(self, *, counts: bool) -> None:
        """Validate, and note in the position whether the run has come to its end.

        Args:
            counts: patience counts it. One because the time is up, or a trial pauses, is one more.
        """
        position, settings = self._replica.position, self._settings
        self._replica.validate()
        if settings.until is not None and settings.until.reached(position.means):
            position.stopped_by = "until"
        if (early := settings.early_stop) is not None and counts:
            position.best, position.num_worse = early.after(position.best, position.num_worse, position.means)
            if position.num_worse >= early.patience:
                position.stopped_by = position.stopped_by or "early_stopping"

    def _keep_best(self, rule: Best) -> None:
        """Save a checkpoint if the validation of this step is the best so far, and go on once it is on the disk.

        No worker goes on before, or the best model would be lost with the worker that writes it. A worker that is lost
        meanwhile takes the others back to this step, and they do the same again.
        """
        replica = self._replica
        position, world = replica.position, replica.world
        if position.validation is None or position.validated_step != position.step:
            return
        # Rank 0, which writes, may have finished before a loss that the others saw earlier.
        before = objects.share_json(world, position.best_checkpoint, 0) if world.size > 1 else position.best_checkpoint
        found = rule.after(before, position.step, position.means)
        if found != before and found is not None:
            if world.rank == 0:
                position.best_checkpoint = found  # before it is saved with the position
            if self._saves:
                replica.save()
            if replica.checkpoints is not None:
                replica.checkpoints.wait()
            world.barrier()
        position.best_checkpoint = found
