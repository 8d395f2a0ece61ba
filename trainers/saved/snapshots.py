"""One model from several checkpoints of a run: the mean of their weights, or an ensemble of them.

Mean: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); Izmailov et al., "Averaging
Weights Leads to Wider Optima and Better Generalization" (2018), algorithm 1. Ensemble: Huang et al., "Snapshot
Ensembles: Train 1, Get M for Free" (2017), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.platform.data.source import open_split
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import CheckpointError
from orchestray.trainers.core.frozen_layers import freeze_layers
from orchestray.trainers.core.inputs import call, inputs_of
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.core.modes import begin_training
from orchestray.trainers.core.own_gradients import WithoutGradients
from orchestray.trainers.core.weight_norm import folded
from orchestray.trainers.core.weights import in_precision
from orchestray.trainers.ensemble.ensemble import Average, Ensemble
from orchestray.trainers.saved.checkpoint_model import load_model
from orchestray.trainers.saved.trained_model import fill

if TYPE_CHECKING:
    from orchestray.trainers.saved.run import Run


def average_snapshots(run: Run, last: int) -> nn.Module:
    """Return the model with the mean weights of the last checkpoints, in evaluation mode, on the CPU.

    The running statistics of batch normalisation are measured again for the mean weights, by one pass over the training
    data (Izmailov et al., section 3.2). If the run trained an ensemble, each member is averaged.

    Args:
        run: a run that keeps `last` checkpoints or more (`checkpoint.keep`); finished or not.
        last: number of checkpoints, at least 1.

    Raises:
        CheckpointError: there are fewer, they are damaged, or they do not fit the task's model or each other.
    """
    states, members = _read(run, last)
    task = run.load_task()
    mean = replace(states[-1], tensors=mean_tensors([state.tensors for state in states]))
    model = _built(mean, members, run)
    if _measured(model):
        train = run.config.train
        source = open_split(task, "train", num_endless=(train.steps or 0) * train.batch_size or None)
        stream = SampleStream(source, task.to_batch, batch_size=train.batch_size, shuffle=False)
        with stream.epoch(0) as shares:
            measure_statistics(model, (inputs_of(part.batch) for share in shares for part in share.micro_batches))
    return model.eval()


def snapshot_ensemble(run: Run, last: int, average: Average = "probabilities") -> Ensemble:
    """Return an ensemble of the last checkpoints, the newest last, in evaluation mode, on the CPU.

    Args:
        run: same as in `average_snapshots`; if it trained an ensemble, every member of every checkpoint is included.
        last: number of checkpoints, at least 1.
        average: same as in `Ensemble`.

    Raises:
        CheckpointError: same as in `average_snapshots`.
    """
    states, members = _read(run, last)
    models = [_built(each, members, run) for each in states]
    flat = [part for model in models for part in (model.members if isinstance(model, Ensemble) else [model])]
    return Ensemble(flat, average).eval()


def mean_tensors(snapshots: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of named tensors, summed in double precision; those of whole numbers come from the last snapshot.

    Raises:
        CheckpointError: they have different names or shapes.
    """
    shapes = [{name: tensor.shape for name, tensor in snapshot.items()} for snapshot in snapshots]
    if any(other != shapes[0] for other in shapes):
        raise CheckpointError("The checkpoints hold different models: no mean of their weights can be taken.")
    mean = {}
    for name, last in snapshots[-1].items():
        if not (last.is_floating_point() or last.is_complex()):
            mean[name] = last.clone()
            continue
        total = torch.zeros(last.shape, dtype=torch.complex128 if last.is_complex() else torch.float64)
        for snapshot in snapshots:
            total += snapshot[name]
        mean[name] = (total / len(snapshots)).to(last.dtype)
    return mean


def measure_statistics(model: nn.Module, batches: Iterable[Any]) -> None:
    """Set the running statistics of batch normalisation to their mean over the batches.

    Modules in evaluation mode keep theirs, and batches of fewer than two samples are skipped. The model is in
    evaluation mode afterwards; nothing else changes.
    """
    modules = _measured(model)
    momenta = [module.momentum for module in modules]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    model.eval()  # no dropout
    without_gradients = WithoutGradients(model)
    for module in modules:
        module.reset_running_stats()
        module.momentum = None  # a cumulative mean
        module.train()
    try:
        for inputs in batches:
            own = map_tensors(lambda tensor: tensor.to(in_precision(tensor.dtype, dtype)), inputs)
            if all(len(tensor) > 1 for tensor in tensors_in(own)):
                without_gradients(lambda given: call(model, given), own)
    finally:
        for module, momentum in zip(modules, momenta, strict=True):
            module.momentum = momentum
        model.eval()


def _measured(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m.training]


def _read(run: Run, last: int) -> tuple[list[ModelState], int]:
    """Return the models of the last checkpoints, the newest last, and the number of members of each.

    A number of 0 means no ensemble.

    Raises:
        CheckpointError: there are too few, or their numbers of members differ.
    """
    if last < 1:
        raise ValueError(f"last must be 1 or more, got {last}")
    found = run.checkpoints()
    if len(found) < last:
        kept = f"{len(found)} checkpoint{'' if len(found) == 1 else 's'}"
        raise CheckpointError(
            f"The run {run.name} has {kept}, and the last {last} are asked for. Train with checkpoint.keep={last} or "
            "more, or ask for fewer."
        )
    states = [load_model(each, is_averaged=False) for each in found[-last:]]
    if run.config.train.weight_norm:
        states = [folded(state) for state in states]  # the mean is that of the weights, not of lengths and directions
    members = {int(each.state.get("members", 0)) for each in found[-last:]}
    if len(members) > 1:
        counts = " and ".join(str(count) for count in sorted(members))
        raise CheckpointError(
            f"The last {last} checkpoints of the run {run.name} hold {counts} members; ask for fewer."
        )
    return states, members.pop()


def _built(state: ModelState, num_members: int, run: Run) -> nn.Module:
    model = fill(run.build_model(num_members), state, run.config.train.precision)
    if not num_members and run.config.train.freeze:
        freeze_layers(model, run.config.train.freeze)  # their running statistics are not measured again
    return begin_training(model)
