"""A worker of a pipeline: its stages, run by a program of actions, with
micro-batches sent and received over channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.trainers.core.buffer_kinds import transient
from orchestray.trainers.core.inputs import ONE_TENSOR, InputForm
from orchestray.trainers.core.loss_parameters import refuse_own_parameters
from orchestray.trainers.core.network import Usage
from orchestray.trainers.core.task_calls import add
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.parallel.pipeline.action_log import ActionLog, now_s
from orchestray.trainers.parallel.pipeline.links import Links, Values
from orchestray.trainers.parallel.pipeline.runner import Job, StageForward, StageRunner
from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind, Program
from orchestray.trainers.parallel.pipeline.tied import TiedGradients, add_up

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.data.stream import Share
    from orchestray.platform.task import Batch, Task
    from orchestray.trainers.core.exchange import Exchange, OptimizedTensor
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.parallel.pipeline.layers import Tied

_ACCUMULATES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class PipelineNetwork:
    """A `Network` whose micro-batches flow through the stages by a synchronous schedule.

    If a schedule runs each stage's backward passes in the order of the micro-batches, gradients have the same bits as
    in one process. That process goes back through the same micro-batches one after the other. The exception is a
    parameter that several workers hold: its parts are summed at the end.
    """

    streams = False
    combines = True

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        stages: Mapping[int, nn.Module],
        *,
        placement: Sequence[Sequence[int]],
        program: Callable[[int], Program],
        groups: Groups,
        draw: RngKey,
        precision: str = "float32",
        device: torch.device | str = "cpu",
        tied: Sequence[Tied] = (),
        pieces: Mapping[str, TensorSlice] | None = None,
        partial: frozenset[str] = frozenset(),
        form: InputForm = ONE_TENSOR,
        one_sample: Callable[[], Batch] | None = None,
    ) -> None:
        """Connect to the workers next to this one; all workers of the copy do so at the same time.

        Args:
            task: the task, for its loss and metrics.
            model: this worker's part of the model, under the plain model's names. Modules that draw random numbers
                are seeded already (`seed_modules`).
            stages: this worker's stages, by number. A stage takes the values that the one before it returned, the
                first one the batch's inputs; it returns a tuple of tensors, the last one `(outputs,)`.
            placement: the stages of each worker of the pipeline.
            program: function from a number of micro-batches to this worker's program.
            groups: this worker's groups.
            draw: key that random numbers depend on; the loop sets step and replica.
            precision: float32, float64 or bfloat16 (by autocast).
            device: device of the stages.
            tied: parameters that live in several stages.
            pieces: slices of the tensors that are not whole here (split over the tensor axis).
            partial: names of parameters of which each worker of the tensor group computes a part of the gradient.
            form: form of the model's inputs.
            one_sample: returns a batch of one sample, if a replica without samples must make a pass as well.

        Raises:
            PeerLostError: another worker did not come.
        """
        self.model = model
        self._task = task
        self._device = torch.device(device)
        self._draw = draw
        self._rank = groups.rank
        self._worker = groups.coordinate.pipeline
        self._workers = _worker_of_each_stage(placement)
        self._program = program
        self._plans: dict[int, tuple[Program, frozenset[int]]] = {}
        last = len(self._workers) - 1
        self.is_reporting = self._workers[last] == self._worker and groups.coordinate.tensor == 0
        self._runners = {
            index: StageRunner(
                index,
                StageForward(
                    task,
                    stage,
                    precision,
                    self._device,
                    form=form,
                    is_first=index == 0,
                    is_last=index == last,
                ),
                draw,
                groups.rank,
                meets_in_passes=one_sample is not None,
            )
            for index, stage in sorted(stages.items())
        }
        self._shares_parameters = _share_parameters(list(stages.values()))
        self._one_sample = one_sample
        self._tied = TiedGradients(tied, self._workers, groups, model)
        self.partial = partial
        self._tensor_group = groups.tensor
        self._tensor_bytes_before = groups.tensor.own_bytes_sent
        self.pieces: Mapping[str, TensorSlice] = _pieces(model, pieces or {}, self._tied)
        self._log = ActionLog(groups.rank)
        self._steps = 0
        channels = self._open_channels(groups)
        self._links = Links(self._workers, self._worker, channels, self._device, self._log, groups.waiting)

    def _open_channels(self, groups: Groups) -> dict[int, Channel]:
        """Open a channel to each worker that holds a neighbour of a stage held
        here, in the same order on every worker.
        """
        ranks = groups.layout.group(groups.rank, "pipeline")
        pairs = {tuple(sorted(pair)) for pair in zip(self._workers, self._workers[1:], strict=False)}
        mine = sorted(pair for pair in pairs if self._worker in pair and pair[0] != pair[1])
        peers = [pair[0] if pair[1] == self._worker else pair[1] for pair in mine]
        return {peer: groups.channel(ranks[peer], "pipeline") for peer in peers}

    # -- a step ------------------------------------------------------------------------------------------------------

    def backward(self, share: Share, exchange: Exchange, *, step: int) -> float:
        jobs = self._jobs(share, step)
        if not jobs:
            return 0.0
        program, last_passes = self._plan(len(jobs))
        losses = [0.0] * len(jobs)
        self._steps += 1
        self._log.begin_step(self._steps)
        with self._all_or_nothing():
            for position, action in enumerate(program):
                if action.kind is Kind.FORWARD:
                    self._forward(action, jobs, losses)
                else:
                    if action.kind in _ACCUMULATES:
                        exchange.begin_backward(last_micro_batch=position in last_passes)
                    self._backward(action, jobs)
            self._links.settle()
        self._log.end_step()
        if self._steps == 1:
            refuse_own_parameters(self._task, self.model)
        loss_sum = 0.0
        for job, loss in zip(jobs, losses, strict=True):
            loss_sum += loss * job.weight
        return loss_sum if self.is_reporting else 0.0

    def refuse_losses(self, step: int) -> None:
        return  # each was read when it was computed

    def _jobs(self, share: Share, step: int) -> list[Job]:
        jobs = [
            Job(micro_batch.batch, micro_batch, micro_batch.weight / share.batch_weight, step, number)
            for number, micro_batch in enumerate(share.micro_batches)
        ]
        if self._one_sample is not None:
            missing = range(len(jobs), share.num_micro_batches)
            jobs += [Job(self._one_sample(), None, 0.0, step, number) for number in missing]
        return jobs

    def _plan(self, num_micro_batches: int) -> tuple[Program, frozenset[int]]:
        """Return the program for that many micro-batches, and the positions where
        parameters get their last gradients.
        """
        if num_micro_batches not in self._plans:
            program = self._program(num_micro_batches)
            last: dict[int, int] = {}
            for position, action in enumerate(program):
                if action.kind in _ACCUMULATES:
                    # The gradient of a parameter in two stages of this worker is complete only when both are done.
                    last[0 if self._shares_parameters else action.stage] = position
            self._plans[num_micro_batches] = (program, frozenset(last.values()))
        return self._plans[num_micro_batches]

    def _forward(self, action: Action, jobs: Sequence[Job], losses: list[float]) -> None:
        stage, number = action.stage, action.micro_batch
        given = self._given(stage, number)
        begin_s = now_s()
        sent, losses[number] = self._runners[stage].forward(number, given, jobs[number])
        self._done(action, begin_s, stage + 1, sent)

    def _backward(self, action: Action, jobs: Sequence[Job]) -> None:
        stage, kind, number = action
        runner, job = self._runners[stage], jobs[number]
        if kind is not Kind.BACKWARD_WEIGHT and runner.expects_gradients(number):
            runner.take_gradients(number, self._links.receive(Kind.BACKWARD, stage, number).tensors)
        begin_s = now_s()
        gives = kind is not Kind.BACKWARD_WEIGHT and runner.gives_gradients(number)
        if kind is Kind.BACKWARD_WEIGHT:
            runner.backward_weight(number, job)
            gradients: Sequence[Tensor | None] = ()
        else:
            compute = runner.backward if kind is Kind.BACKWARD else runner.backward_input
            gradients = compute(number, job)
        self._done(action, begin_s, stage - 1, Values(tuple(gradients), ()) if gives else None)

    def _given(self, stage: int, number: int) -> Values | None:
        return None if stage == 0 else self._links.receive(Kind.FORWARD, stage, number)

    def _done(self, action: Action, begin_s: float, target: int, sent: Values | None) -> None:
        """Send the results of an action, and log it."""
        if sent is not None and 0 <= target < len(self._workers):
            kind = Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD
            self._links.send(kind, target, action.micro_batch, sent)
        self._log.add(action, begin_s, now_s())

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Close the network if a pass through the pipeline fails: its messages are
        in flight, and the others must notice.
        """
        try:
            yield
        except BaseException:
            self.close()
            raise

    # -- beside the steps --------------------------------------------------------------------------------------------

    def combine(self, updates: Sequence[OptimizedTensor], gradients: Sequence[Tensor | None]) -> None:
        """Sum the gradients of `partial` and tied parameters, in place.

        `gradients` must be a list: a None is replaced if another worker has a gradient.
        """
        assert isinstance(gradients, MutableSequence)
        indices = [index for index, update in enumerate(updates) if update.name in self.partial]
        if indices and self._tensor_group.size > 1:
            add_up(self._tensor_group, [update.tensor for update in updates], gradients, indices)
        self._tied.combine(updates, gradients)

    def evaluate(self, share: Share, *, loss_only: bool = False) -> dict[str, Any]:
        sums: dict[str, Any] = {}
        if not share.micro_batches:
            return sums
        program, _ = self._plan(len(share.micro_batches))
        with self._all_or_nothing():
            for stage, kind, number in program:
                if kind is not Kind.FORWARD:
                    continue
                micro_batch = share.micro_batches[number]
                given = self._given(stage, number)
                sent, metrics = self._runners[stage].evaluate(given, micro_batch, loss_only=loss_only)
                if not self._runners[stage].is_last:
                    self._links.send(Kind.FORWARD, stage + 1, number, sent)
                add(sums, metrics)
        return sums if self.is_reporting else {}

    def usage(self) -> Usage:
        """Return this worker's usage. The end of a step on all workers is known one step later: `busy_s` and `span_s`
        are those of the steps before the last one.
        """
        busy_s, span_s = self._log.take()
        sent = self._links.take_bytes_sent()
        by_link = {f"stage {source} -> stage {target}": count for (source, target), count in sent.items()}
        if self._tensor_group.size > 1:
            before, self._tensor_bytes_before = self._tensor_bytes_before, self._tensor_group.own_bytes_sent
            by_link["tensor"] = self._tensor_bytes_before - before
        return Usage(
            busy_s=busy_s,
            span_s=span_s,
            bytes_by_link=by_link,
            timeline=self._log.timeline(),
        )

    def close(self) -> None:
        self._links.close()
        for runner in self._runners.values():
            runner.forget()


def _worker_of_each_stage(placement: Sequence[Sequence[int]]) -> list[int]:
    workers = {stage: worker for worker, stages in enumerate(placement) for stage in stages}
    return [workers[stage] for stage in range(len(workers))]


def _share_parameters(stages: Sequence[nn.Module]) -> bool:
    """Return True if a parameter is in several of these stages."""
    held = [{id(parameter) for parameter in stage.parameters()} for stage in stages]
    return sum(len(ids) for ids in held) > len(set().union(*held))


def _pieces(model: nn.Module, given: Mapping[str, TensorSlice], tied: TiedGradients) -> dict[str, TensorSlice]:
    """Return each tensor's position in the plain model. A tensor that several
    workers hold counts on the first of them.
    """
    pieces = {}
    for name, tensor in {**model.state_dict(), **transient(model)}.items():
        piece = given.get(name) or TensorSlice.whole(name, tensor.shape)
        pieces[name] = replace(piece, name=tied.plain_name(name)).counted(tied.is_counted(name))
    return pieces
