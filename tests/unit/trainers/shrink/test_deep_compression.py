"""Pruning by size, and values that weights share: against counts, scikit-learn's k-means, and half precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import nn

from orchestray.platform.errors import CheckpointError
from orchestray.trainers.shrink.deep_compression import (
    again_shared,
    again_sparse,
    clustered,
    in_half,
    pruned,
    weights_of,
    with_shared_values,
)


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_pruning_takes_exactly_the_part_and_of_each_tensor_the_smallest() -> None:
    given = {"a": normal(40, 50), "b": normal(30, 10, seed=1, spread=0.01), "bias": torch.full((9,), 1e-9)}
    found = pruned(given, ["a", "b"], 0.9)
    kept = {name: found[name] != 0 for name in ("a", "b")}
    assert sum(int(each.sum()) for each in kept.values()) == 230
    for name, is_kept in kept.items():
        assert float(given[name][~is_kept].abs().max()) <= float(given[name][is_kept].abs().min())
        assert torch.equal(found[name][is_kept], given[name][is_kept])
    assert int(kept["b"].sum()) / 300 > int(kept["a"].sum()) / 2000 > 0.05  # although they are a hundred times as small
    assert torch.equal(found["bias"], given["bias"])
    assert all(torch.equal(pruned(given, ["a"], 0.0)[name], each) for name, each in given.items())


@pytest.mark.parametrize("num_clusters", [2, 8, 32])
def test_clusters_are_those_of_k_means_that_begins_with_equal_distances(num_clusters: int) -> None:
    values = torch.rand(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    begin = np.linspace(float(values.min()), float(values.max()), num_clusters).reshape(-1, 1)
    fitted = KMeans(num_clusters, init=begin, n_init=1, max_iter=300, tol=0).fit(values.numpy().reshape(-1, 1))
    wanted = torch.from_numpy(fitted.cluster_centers_[fitted.labels_].reshape(-1))
    assert float((clustered(values, num_clusters) - wanted).abs().max()) < 1e-12


def test_between_tensors_a_weight_counts_over_all_that_are_as_large() -> None:
    given = {"a": torch.tensor([[3.0, -1.0, 2.0]]), "b": torch.tensor([[20.0, 10.0]])}
    scores = {(0, 0): 9 / 9, (0, 1): 1 / 14, (0, 2): 4 / 13, (1, 0): 1.0, (1, 1): 100 / 500}
    for count, gone in enumerate(sorted(scores, key=lambda place: scores[place])[:3], 1):
        found = list(pruned(given, ["a", "b"], count / 5).values())
        assert float(found[gone[0]].reshape(-1)[gone[1]]) == 0
        assert sum(int((each == 0).sum()) for each in found) == count


def test_few_values_stay_as_they_are() -> None:
    values = torch.tensor([0.1, 0.7, 0.1, -3.0])
    assert torch.equal(clustered(values, 4), values)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_shared_values_are_few_in_half_precision_and_zeros_stay(bits: int) -> None:
    given = {"a": normal(60, 50), "bias": normal(60)}
    given = pruned(given, ["a"], 0.5)
    found = with_shared_values(given, ["a"], bits)
    assert len(torch.unique(found["a"][found["a"] != 0])) <= 2**bits
    assert bool((found["a"][given["a"] == 0] == 0).all())
    assert torch.equal(found["a"].half().float(), found["a"])
    assert torch.equal(found["bias"], given["bias"])
    error = float((found["a"] - given["a"]).square().mean())
    coarser = with_shared_values(given, ["a"], bits - 1 or 1)["a"]
    assert error <= float((coarser - given["a"]).square().mean())


def test_what_rounding_moved_while_training_is_put_back() -> None:
    before = with_shared_values(pruned({"a": normal(20, 30)}, ["a"], 0.5), ["a"], 3)
    moved = {"a": before["a"] * 1.1 + 1e-6 * normal(20, 30, seed=1)}
    sparse = again_sparse(moved, before, ["a"])["a"]
    assert torch.equal(sparse != 0, before["a"] != 0)
    shared = again_shared(moved, before, ["a"])["a"]
    values = torch.unique(before["a"])
    for value in values:
        assert len(torch.unique(shared[before["a"] == value])) == 1
    assert torch.allclose(torch.unique(shared), 1.1 * values, atol=1e-3)


def test_tensors_of_numbers_too_small_for_half_precision_stay() -> None:
    tiny = normal(30, 40, spread=1e-8)
    assert torch.equal(in_half(tiny), tiny)
    shared = with_shared_values({"a": tiny}, ["a"], 4)["a"]
    assert float((shared - tiny).abs().max()) < float(tiny.abs().max()) / 6
    assert in_half(torch.zeros(0, 3)).shape == (0, 3)


def test_weights_that_are_not_finite_are_refused() -> None:
    layer = nn.Linear(3, 2)
    for number in (float("nan"), float("inf")):
        tensors = {"weight": torch.tensor([[1.0, number, 2.0]] * 2), "bias": torch.zeros(2)}
        with pytest.raises(CheckpointError, match="the weights of weight are not finite"):
            weights_of(layer, tensors)


def test_numbers_too_large_for_half_precision_stay() -> None:
    small, large = torch.tensor([0.1, 1e-9]), torch.tensor([0.1, 1e6])
    assert torch.equal(in_half(small), small.half().float())
    assert torch.equal(in_half(large), large)
    assert torch.equal(in_half(torch.arange(3)), torch.arange(3))


def test_a_model_without_weights_is_refused() -> None:
    model = nn.BatchNorm1d(4)
    with pytest.raises(CheckpointError, match="no weights of two dimensions"):
        weights_of(model, dict(model.state_dict()))
