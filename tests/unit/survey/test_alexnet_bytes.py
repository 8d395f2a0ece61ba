"""Group C: what AlexNet sends a step by each scheme, counted where the layers send it, at AlexNet's true sizes.

Tensors have shapes and no memory (torch's device `meta`), so the real plans run on the real network in no time. Speed
is not measured: the survey's 2.2 and 6.25 times are those of GPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Operation, ring_bytes
from orchestray.platform.comm.pending import Pending
from orchestray.platform.comm.solo import SoloCollective
from orchestray.trainers.parallel.tensor.plans import channels_plan, one_weird_trick_plan
from support.split_training import split_by

SAMPLES = 128  # Krizhevsky et al. 2012, section 5
FLOAT_BYTES = 4


class CountingGroup(SoloCollective):
    """Rank 0 of a group without its other members; it counts what it would send."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def start_all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> Pending:
        self.own_bytes_sent += ring_bytes(tensor, self.size)
        return super().start_all_reduce(tensor, operation)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.own_bytes_sent += (self.size - 1) * tensor.nbytes
        return tensor.new_empty((self.size, *tensor.shape))

    def start_exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> Pending:
        self.own_bytes_sent += sum(tensor.nbytes for tensor in send.values())
        return super().start_all_reduce(torch.empty(0))

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        self.own_bytes_sent += (self.size - 1) * part.nbytes
        return super().start_all_reduce(part)

    def start_all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        self.own_bytes_sent += (self.size - 1) * part.nbytes
        return super().start_all_reduce(part)


class AlexNet(nn.Module):
    """AlexNet of one tower, as Krizhevsky 2014 (section 4) has it: 61 million weights, 94% of them fully connected."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def network() -> nn.Module:
    with torch.device("meta"):
        return AlexNet()


def sent_bytes(plan: Mapping[str, str], size: int) -> int:
    """Return the bytes that a worker sends in a step.

    These are activations, their gradients, and the gradients of weights that several workers share.
    """
    group, model = CountingGroup(size), copy.deepcopy(network())
    split = split_by(model, plan, group)
    outputs = model(torch.empty(SAMPLES, 3, 224, 224, device="meta"))
    assert outputs.shape == (SAMPLES, 1000)
    outputs.sum().backward()
    shared = sum(parameter.nbytes for name, parameter in model.named_parameters() if name in split.partial)
    return group.bytes_sent + gradient_bytes(shared, size)


def gradient_bytes(num_bytes: int, size: int) -> int:
    return 2 * (size - 1) * num_bytes // size


def schemes(size: int) -> dict[str, int]:
    """Return the bytes by scheme."""
    weights = sum(parameter.nbytes for parameter in network().parameters())
    return {
        "data": gradient_bytes(weights, size),
        "model": sent_bytes(channels_plan(network(), size=size), size),
        "hybrid": sent_bytes(one_weird_trick_plan(network(), size=size), size),
    }


def test_the_network_has_the_61_million_weights_of_alexnet() -> None:
    num_weights = sum(parameter.numel() for parameter in network().parameters())
    assert num_weights == pytest.approx(61e6, rel=0.01)
    num_connected = sum(parameter.numel() for name, parameter in network().named_parameters() if "classifier" in name)
    assert num_connected > 0.94 * num_weights


def test_alexnet_pure_schemes_on_four_workers_send_several_times_the_bytes_of_the_hybrid() -> None:
    sent = schemes(4)
    assert sent["data"] == 2 * 3 * 61_100_840 * FLOAT_BYTES // 4
    assert min(sent["data"], sent["model"]) > 5 * sent["hybrid"]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_weird_trick_sends_less_than_both_pure_schemes_at_alexnet_s_shapes(size: int) -> None:
    sent = schemes(size)
    assert sent["hybrid"] < min(sent["data"], sent["model"])
