"""The bytes that a split would send are those that workers send, and the parameters those that they hold."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, ring_bytes
from orchestray.trainers.parallel.tensor.apply import split_model
from orchestray.trainers.planning.analyse import analyse
from orchestray.trainers.planning.subject import Subject
from orchestray.trainers.planning.tensor_traffic import traffic_of_plans
from support.threads import run_replicas

MODELS = {
    "auto": (lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6)), (5, 8)),
    "channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()),
        (2, 3, 8, 8),
    ),
    "spatial": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, padding=1)),
            *(nn.Flatten(), nn.Linear(4 * 16, 4)),
        ),
        (2, 3, 8, 8),
    ),
    "one_weird_trick": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64)),
        (4, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("degree", [2, 3])
def test_the_bytes_of_each_plan_are_those_that_the_first_of_real_workers_sends(kind: str, degree: int) -> None:
    make, shape = MODELS[kind]
    if kind == "one_weird_trick" and degree == 3:
        shape = (6, *shape[1:])
    subject = Subject("model", make().to("meta").train(), torch.zeros(shape, device="meta"), shape[0])
    (traffic,) = (each for each in traffic_of_plans(subject, degree) if each.kind == kind)
    model, x = make().train(), torch.randn(shape)

    def worker(group: Collective) -> tuple[int, int]:
        own = copy.deepcopy(model)
        split = split_model(own, traffic.plan, lambda: group, group.rank, degree)
        before = group.bytes_sent
        own(x).sum().backward()
        for name, parameter in own.named_parameters():
            if name in split.partial:
                assert parameter.grad is not None
                group.all_reduce(parameter.grad.contiguous())
        return group.bytes_sent - before, sum(each.numel() for each in own.parameters())

    assert run_replicas(degree, worker)[0] == (traffic.num_bytes, traffic.parameters)
    assert traffic.num_bytes > 0


def bytes_of_schemes(model: nn.Module, x: Tensor, plan: Mapping[str, str], group: Collective) -> tuple[int, int]:
    """Return the bytes of a worker that has part of the samples, and of one that has part of the features."""
    whole, own = copy.deepcopy(model), copy.deepcopy(model)
    whole(x.chunk(group.size)[group.rank]).sum().backward()
    for parameter in whole.parameters():
        assert parameter.grad is not None
        group.all_reduce(parameter.grad)
    by_samples = group.bytes_sent
    split_model(own, plan, lambda: group, group.rank, group.size)
    own(x.clone().requires_grad_()).sum().backward()
    return by_samples, group.bytes_sent - by_samples


def test_activation_to_weight_ratio_decides_what_to_divide_in_each_layer_as_the_bytes_of_real_workers_do() -> None:
    schemes = {}
    for samples, inputs, outputs in itertools.product((2, 16, 64), (4, 24), (8, 40)):
        model, x = nn.Sequential(nn.Linear(inputs, outputs)), torch.randn(samples, inputs)
        meta = copy.deepcopy(model).to("meta").train()
        shapes = torch.zeros(x.shape, device="meta", requires_grad=True)
        (traffic,) = (each for each in traffic_of_plans(Subject("model", meta, shapes, samples)) if each.kind == "auto")
        by_samples, by_features = run_replicas(2, partial(bytes_of_schemes, model, x, traffic.plan))[0]
        assert traffic.gradient_bytes == {"0": by_samples}
        assert traffic.schemes == {"0": "samples" if by_samples <= by_features else "features"}
        schemes[samples * (inputs + outputs) / (inputs * outputs)] = traffic.schemes["0"]
    assert schemes[max(schemes)] == "samples"
    assert schemes[min(schemes)] == "features"


def test_each_layer_of_an_analysis_has_the_bytes_of_the_plan_that_is_found() -> None:
    make, shape = MODELS["auto"]
    subject = Subject("model", make().to("meta").train(), torch.zeros(shape, device="meta"), shape[0])
    analysis = analyse(subject)
    (auto,) = (each for each in analysis.traffic if each.kind == "auto")
    assert {layer.name: layer.tensor_bytes for layer in analysis.layers if layer.tensor_bytes} == auto.layer_bytes
    assert sum(layer.tensor_bytes for layer in analysis.layers) == auto.num_bytes
    assert auto.plan == {"0": "output", "2": "input"}


def test_a_layer_of_a_spatial_split_sends_its_halo_forward_and_backward_and_its_part_of_the_gradient() -> None:
    make, shape = MODELS["spatial"]
    subject = Subject("model", make().to("meta").train(), torch.zeros(shape, device="meta"), shape[0])
    analysis = analyse(subject)
    (spatial,) = (each for each in analysis.traffic if each.kind == "spatial")
    (last,) = (layer for layer in analysis.layers if layer.name == "3")
    gradients = sum(ring_bytes(each, 2) for each in make()[3].parameters())
    assert last.halo_bytes == 2 * (2 * 8 * 4 * 4)  # a row of two samples, eight channels and four columns, each way
    gathered = 2 * 4 * 2 * 4 * 4  # its rows of the outputs, where the split ends
    assert spatial.layer_bytes["3"] == last.halo_bytes + gradients + gathered
    assert "" not in spatial.layer_bytes


def test_a_model_that_no_plan_fits_has_no_traffic_and_is_left_whole() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    subject = Subject("model", Scale().to("meta"), torch.zeros(2, 3, device="meta"), 2)
    assert traffic_of_plans(subject) == ()
    make, shape = MODELS["auto"]
    whole = make().to("meta")
    traffic_of_plans(Subject("model", whole, torch.zeros(shape, device="meta"), shape[0]))
    assert [each.shape for each in whole.parameters()] == [each.shape for each in make().parameters()]
