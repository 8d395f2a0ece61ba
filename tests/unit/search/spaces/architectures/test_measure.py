"""Costs of a network, against what can be computed by hand; and weights that a child takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from orchestray.search.spaces.architectures.inherit import inherited
from orchestray.search.spaces.architectures.measure import measure
from orchestray.trainers.analysis.flops import Flops, flops


def test_parameters_and_flops_are_those_of_the_formula() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(8 * 16, 5))
    measures = measure(network, torch.zeros(1, 3, 4, 4), passes=3)
    assert measures.parameters == 3 * 8 * 9 + 128 * 5 + 5
    assert measures.flops == Flops(2 * (3 * 8 * 9 * 16) + 2 * (128 * 5))
    assert measures.latency_ms > 0


class NeedsValues(nn.Module):
    """A network that looks at its numbers, which the meta device lacks, and holds a tensor that is not a buffer."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.plain = network, torch.ones(1)

    def forward(self, *inputs: Any) -> Any:
        return self.network(*inputs) if float(inputs[0].sum() + self.plain) > 0 else None


SEQUENCE, WIDTH, HIDDEN = 10, 16, 8
OF_ATTENTION = 4 * 2 * SEQUENCE * WIDTH**2 + 2 * 2 * SEQUENCE**2 * WIDTH


@pytest.mark.parametrize("wrap", [lambda network: network, NeedsValues])
@pytest.mark.parametrize(
    ("network", "num_inputs", "by_hand"),
    [
        (nn.LSTM(WIDTH, HIDDEN, batch_first=True), 1, 2 * SEQUENCE * 4 * HIDDEN * (WIDTH + HIDDEN)),
        (nn.GRU(WIDTH, HIDDEN, batch_first=True), 1, 2 * SEQUENCE * 3 * HIDDEN * (WIDTH + HIDDEN)),
        (nn.MultiheadAttention(WIDTH, 4, batch_first=True), 3, OF_ATTENTION),
        (nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True), 1, OF_ATTENTION + 2 * 2 * SEQUENCE * WIDTH * 32),
    ],
    ids=["lstm", "gru", "attention", "transformer"],
)
def test_layers_with_fused_kernels_are_counted_as_by_hand(
    wrap: Callable[[nn.Module], nn.Module], network: nn.Module, num_inputs: int, by_hand: int
) -> None:
    inputs = torch.zeros(1, SEQUENCE, WIDTH)
    assert flops(wrap(network.eval()), *[inputs] * num_inputs) == Flops(by_hand)
    assert torch.backends.mkldnn.enabled
    assert torch.backends.mha.get_fastpath_enabled()


class Product(nn.Module):
    """A product of a matrix and a vector, which torch's counter has no formula for."""

    def forward(self, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return matrix @ vector


class Spectrum(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(inputs).abs()


def test_a_matrix_times_a_vector_counts_and_operations_without_formula_are_named() -> None:
    assert flops(Product(), torch.zeros(3, 5), torch.zeros(5)) == Flops(2 * 15)
    assert flops(Product(), torch.zeros(5), torch.zeros(5)) == Flops(2 * 5)
    of_spectrum = flops(Spectrum(), torch.zeros(1, 8))
    assert (of_spectrum.counted > 0, of_spectrum.uncounted) == (True, ())
    assert flops(nn.Bilinear(3, 4, 5), torch.zeros(1, 3), torch.zeros(1, 4)).uncounted == ("_trilinear",)
    assert flops(Product(), torch.eye(3).to_sparse(), torch.eye(3)).uncounted


def test_networks_of_usual_parts_have_the_operations_that_torch_s_own_counter_finds() -> None:
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardswish(), nn.PReLU()),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveMaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32, 12), nn.GLU()),
    ).eval()
    x = torch.zeros(1, 3, 17, 19)
    with FlopCounterMode(display=False) as counter:
        network(x)
    assert flops(network, x) == Flops(int(counter.get_total_flops()))


def test_named_and_whole_inputs_are_measured() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.rest = nn.Embedding(7, 4), nn.Linear(2, 4)

        def forward(self, words: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return self.words(words) + self.rest(more)

    inputs = {"words": torch.tensor([3]), "more": torch.zeros(1, 2, dtype=torch.float64)}
    assert measure(Two(), inputs, passes=1).flops == Flops(2 * 2 * 4)


def test_measuring_leaves_the_network_and_the_threads_as_they_were() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)).train()
    network[2].eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.set_num_threads(2)
    try:
        measure(network, torch.zeros(1, 1, 8, 8), passes=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert [module.training for module in network] == [True, True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_tensor_with_two_names_counts_once_and_a_frozen_one_not_at_all() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    network[1].weight = network[0].weight
    network[2].weight.requires_grad_(requires_grad=False)
    assert measure(network, torch.zeros(1, 4), passes=1).parameters == 16 + 4 + 4


def test_a_child_takes_the_tensors_of_its_parents_names_and_shapes() -> None:
    parent = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5), "d": torch.ones(2, dtype=torch.int64)}
    child = {"a": torch.zeros(2, 3), "b": torch.zeros(6), "e": torch.zeros(5), "d": torch.zeros(2)}
    taken = inherited(parent, child)
    assert taken.keys() == {"a"}
    assert torch.equal(taken["a"], parent["a"])
    taken["a"].zero_()
    assert bool(parent["a"].all()), "they are copies"


@pytest.mark.parametrize(("before", "after"), [((2, 3), (4, 3)), ((4, 3), (2, 5)), ((2, 3, 3, 3), (4, 2, 5, 5))])
def test_of_a_widened_layer_a_child_takes_what_both_have(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    taken = inherited({"w": torch.ones(before)}, {"w": torch.zeros(after)}, overlap=True)["w"]
    both = tuple(slice(0, min(pair)) for pair in zip(before, after, strict=True))
    assert taken.shape == after
    assert bool((taken[both] == 1).all())
    assert taken.sum() == taken[both].numel()
