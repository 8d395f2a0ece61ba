"""Networks that are small by design, beside one of plain convolutions: size, products, time and accuracy.

Iandola et al., "SqueezeNet" (2016), Howard et al., "MobileNets" (2017), and a tensor train (Garipov et al. 2016), on
digits.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.run.tensor_file import pack
from orchestray.trainers.analysis.trace import Recorder
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import times_s
from orchestray.trainers.tasks.small_networks import CONVOLUTIONS, SmallDigits

_EPOCHS, _RATE = 5, 0.02
_IMAGES = 32
"""Images of the batch that is timed."""


def small_networks(rounds: int = 50) -> Exhibit:
    """Train each network, and measure it beside the plain one.

    Args:
        rounds: rounds of the timings.
    """
    images, labels = _images("validation")
    networks = {kind: _trained(kind) for kind in CONVOLUTIONS}
    rows: list[list[Any]] = []
    with torch.no_grad():
        taken = times_s({kind: partial(each, images[:_IMAGES]) for kind, each in networks.items()}, rounds)
        for kind, network in networks.items():
            right = float((network(images).argmax(1) == labels).double().mean())
            parameters = sum(each.numel() for each in network.parameters())
            size = len(pack(network.state_dict()))
            rows.append([kind, parameters, size, _products(network, images[:1]), median(taken[kind]) * 1e3, right])
    first = rows[0]
    rows = [[*row, first[2] / row[2], first[4] / row[4], 100 * (row[5] - first[5])] for row in rows]
    findings = [
        f"{row[0]}: {row[6]:.2g} times smaller, {row[7]:.2g} times as fast on this machine, {row[8]:+.1f} points."
        for row in rows[1:]
    ]
    columns = [
        *("convolutions", "parameters", "file, bytes", "products an image", f"{_IMAGES} images, ms", "accuracy"),
        *("plain / size", "plain / time", "points"),
    ]
    return Exhibit("small-networks", "Networks that are small by design, on digits", columns, rows, findings)


def _images(split: str) -> tuple[Tensor, Tensor]:
    task = SmallDigits()
    batch = task.to_batch(task.dataset(split))
    return batch["inputs"], batch["targets"]


def _trained(kind: str) -> nn.Module:
    torch.manual_seed(0)
    network, (images, labels) = SmallDigits(kind).build_model(), _images("training")
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE)
    batches = [each for _ in range(_EPOCHS) for each in torch.split(torch.randperm(len(images)), 64)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=len(batches))
    for chosen in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return network.eval()


def _products(network: nn.Module, image: Tensor) -> int:
    with torch.no_grad(), Recorder(has_layers=False) as recorder:
        network(image)
    wanted = {"convolution", "addmm"}
    return sum(each.cost.multiplications for each in recorder.graph.operations if each.name in wanted)
