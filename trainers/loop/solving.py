"""A step of the loop by a solver, which evaluates the batch's loss at several places."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.task import training_batch_of
from orchestray.trainers.core.task_calls import refuse
from orchestray.trainers.loop.solver_oracle import SharedOracle
from orchestray.trainers.solvers.admm import SampleSolver
from orchestray.trainers.solvers.penalised import Penalised
from orchestray.trainers.solvers.solver_optimizer import SolverOptimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from orchestray.platform.data.stream import SampleStream, Share
    from orchestray.trainers.loop.replica import Replica
    from orchestray.trainers.loop.step_log import Step
    from orchestray.trainers.parallel.whole_model import WholeNetwork
    from orchestray.trainers.solvers.base import Oracle, Taken

_OTHER_DRAWS = 1 << 30
"""Number added to a step's: that of draws which no step has."""


class Solving:
    """The steps of a replica by a solver. All replicas compute the same step, from the same sums."""

    def __init__(self, replica: Replica, optimizer: SolverOptimizer, stream: SampleStream) -> None:
        """
        Args:
            replica: replica to train, which is connected.
            optimizer: its solver.
            stream: its training samples.

        Raises:
            ConfigError: the solver cannot take this model, or this data.
        """
        self._replica, self._optimizer = replica, optimizer
        self._refuse(stream)
        network, replicas = cast("WholeNetwork", replica.network), replica.groups.data
        self._oracle = SharedOracle(network, replicas, stream, replica.world.rank)
        self._penalised = Penalised(self._oracle, optimizer.weight_decay)
        self._function: Oracle = self._oracle if isinstance(optimizer.solver, SampleSolver) else self._penalised
        self._is_to_check = True

    def take(self, share: Share, step: Step, votes: Sequence[float]) -> None:
        """Make one step. The weights are moved once all replicas have come through it.

        Args:
            share: this replica's share of the batch.
            step: the step, which gets its loss and metrics.
            votes: numbers whose sums over all workers the step gets.

        Raises:
            PeerLostError: another replica is gone; weights and solver are as before the step.
            TrainingError: the loss is not a number, or not a function of the weights alone.
        """
        replica, oracle, solver = self._replica, self._oracle, self._optimizer.solver
        if replica.checkpoints is not None:
            replica.checkpoints.wait_copied()
        oracle.see(share, step.number)
        x = oracle.weights()
        try:
            taken = self._find(x, step)
            sums = torch.tensor([*votes, replica.buffers.apart()], dtype=torch.float64)
            replica.world.all_reduce(sums)
        except BaseException:
            oracle.place(x)
            raise
        solver.make(taken)
        oracle.place(taken.x)
        step.loss = taken.value - self._penalised.penalty(x)
        step.sums = [step.loss, *sums.tolist()]
        if step.sums[-1]:
            replica.buffers.agree(share.num_samples, share.batch_samples)
        step.done_s = time.time()
        step.metrics |= taken.metrics

    def _find(self, x: Tensor, step: Step) -> Taken:
        replica, number = self._replica, step.number
        with replica.passes(number):
            self._check_draws(x, number)
            taken = self._optimizer.solver.find(x, self._function, step.lr)
        if not math.isfinite(taken.value):
            raise TrainingError(
                f"The loss is {taken.value} at step {number}, before the solver moves the weights. Look for NaN and "
                "infinity in the data, lower train.solver.lr, or raise train.solver.weight_decay."
            )
        return taken

    def _refuse(self, stream: SampleStream) -> None:
        section, name, replica = self._optimizer.section, self._optimizer.kind, self._replica
        if section.needs_same_batch and stream.steps_per_epoch > 1:
            raise ConfigError(
                f"config: train.batch_size: {name} learns from what the loss of one batch does along a step, so each "
                f"step has to see all {stream.num_samples:,} samples; set it to {stream.num_samples} or more, or use "
                "hessian_free or stochastic_lbfgs"
            )
        changes = training_batch_of(replica.task) is not None
        if changes and (section.needs_same_batch or section.needs_whole_data):
            raise ConfigError(
                f"config: train.solver.type: the task changes its samples at random in each epoch, and {name} compares "
                "gradients of the same samples; use hessian_free, or train.optimizer"
            )
        replicas = replica.groups.data.size
        if section.needs_curvature and replicas > 1:
            refuse(replica.task, ("gather",), f"{name} on several replicas", "use lbfgs, bfgs or svrg, or one replica")
        if isinstance(self._optimizer.solver, SampleSolver) and stream.num_samples < replicas:
            raise ConfigError(
                f"config: strategy.network.data: {name} needs samples on each replica, and {replicas} replicas share "
                f"{stream.num_samples}; use {stream.num_samples} or fewer"
            )
        if layer := next((n for n, m in replica.model.named_modules() if isinstance(m, _BatchNorm)), None):
            raise ConfigError(
                f"config: train.solver.type: {name} evaluates a batch several times in a step, and each pass would "
                f"move the running statistics of batch normalisation ({layer!r}); use a model without it, or "
                "train.optimizer"
            )

    def _check_draws(self, x: Tensor, step: int) -> None:
        """Refuse a loss that draws random numbers, in the first step after connecting.

        Raises:
            TrainingError: it does.
        """
        if not self._is_to_check:
            return
        self._is_to_check = False
        draw = self._replica.draw
        before = self._oracle.value(x)
        draw.step = step + _OTHER_DRAWS
        after = self._oracle.value(x)
        draw.step = step
        if before != after and not (math.isnan(before) and math.isnan(after)):
            raise TrainingError(
                f"The loss of the same samples and weights was {before:.8g} and then {after:.8g}: the model draws "
                "random numbers, as dropout does, and a solver has to see a function of the weights alone. Take them "
                "out (dropout: 0), or use train.optimizer."
            )
