"""A check that a model cut over workers has the loss that it has as a whole.

The outputs of a cut model are those of the whole one. A loss may use more than these: an attribute that the forward
pass sets, or what a hook has kept. A worker has this of its own stages and slices alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from orchestray.platform.comm import objects
from orchestray.platform.data.nested import copied
from orchestray.platform.data.stream import Share
from orchestray.platform.errors import ConfigError
from orchestray.platform.task import asked_by
from orchestray.trainers.core import modes
from orchestray.trainers.core.buffers import untouched
from orchestray.trainers.core.own_gradients import WithoutGradients, refuse_made
from orchestray.trainers.core.rng import generators_put_back

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import MicroBatch
    from orchestray.platform.task import Batch
    from orchestray.trainers.core.forward import Forward
    from orchestray.trainers.core.network import Network

_SHORT = (torch.bfloat16, torch.float16)
_TOLERANCE, _TOLERANCE_SHORT = 1e-4, 5e-2
"""Difference of two ways to sum the same loss; the second one where products are rounded, as by default on GPUs."""


def loss_of_whole(forward: Forward, micro_batch: MicroBatch, other: Batch) -> float | None:
    """Return the loss of a model in evaluation mode that is not cut yet; None if there is nothing to compare.

    That is so for a loss that is random, depends on the calls before, gathers outputs, or fails: training reports that.

    Args:
        forward: calls the model.
        micro_batch: some samples.
        other: other samples, whose pass is the last: what it leaves must not be taken for that of `micro_batch`.

    Raises:
        TrainingError: the forward pass makes a parameter.
    """
    if not micro_batch.weight or "gather" in asked_by(forward.task):
        return None
    judge, built = WithoutGradients(forward.model), dict(forward.model.named_parameters())

    def loss(batch: Batch) -> float:
        part = replace(micro_batch, batch=copied(batch))
        return float(judge.metrics(forward, part, step=1, loss_only=True)["loss"])

    try:
        alike = untouched(forward.model, forward.task)
        with generators_put_back(), alike, modes.evaluating(forward.model), torch.no_grad():
            loss(micro_batch.batch)  # which may meet what passes without a loss have left
            found = [loss(micro_batch.batch) for _ in range(2)]
            loss(other)
    except Exception:  # noqa: BLE001 - the user's code
        return None
    refuse_made(forward.model, built)
    return found[0] if found[0] == found[1] and math.isfinite(found[0]) else None


def refuse_another_loss(
    whole: float | None, network: Network, micro_batch: MicroBatch, group: Collective, *, precision: str
) -> None:
    """Refuse a model that has another loss now that it is cut. All workers of the copy call this.

    Args:
        whole: result of `loss_of_whole`.
        network: this worker's part of the model.
        micro_batch: the same samples.
        group: workers of the copy.
        precision: `train.precision`.

    Raises:
        ConfigError: the loss differs.
    """
    if not all(objects.gather_json(group, whole is not None)):
        return
    size = micro_batch.num_samples
    share = Share(0, size, (replace(micro_batch, batch=copied(micro_batch.batch)),), 1)
    with untouched(network.model), modes.evaluating(network.model), torch.no_grad():  # it draws no random numbers
        found = network.evaluate(share, loss_only=True).get("loss")
    parameters = [*network.model.parameters()]
    is_exact = precision != "bfloat16" and torch.get_float32_matmul_precision() == "highest"
    is_exact &= all(each.dtype not in _SHORT and each.device.type == "cpu" for each in parameters)
    tolerance = _TOLERANCE if is_exact else _TOLERANCE_SHORT
    same = found is None or whole is None or math.isclose(found, whole, rel_tol=tolerance, abs_tol=tolerance)
    for cut, at_once in filter(None, objects.gather_json(group, None if same else (found, whole))):
        weight = micro_batch.weight
        raise ConfigError(
            f"The loss of {size} samples is {at_once / weight:.8g}, and {cut / weight:.8g} with the model cut over "
            "workers. The task's loss uses more than the model's outputs: an attribute that the forward pass sets, or "
            "what a hook keeps. A worker has this of its own part of the model alone. Have the model return what the "
            "loss needs, or set strategy.network.pipeline and tensor to 1."
        )
