"""Group C: networks made to be divided over workers, each by the check the survey names for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.parallel.tensor.branches import Branches
from orchestray.trainers.tasks.digits_networks import (
    DeepBelief,
    DeepBeliefDigits,
    DeepStacking,
    LocallyConnectedDigits,
    MeshDigits,
    RestrictedBoltzmann,
    RestrictedBoltzmannDigits,
    TiledDigits,
    TreeNetDigits,
)
from support.layouts import held_elements, layout_settings, train_laid_out
from support.split_training import Run, check_same
from support.training import furthest, train

TWO = {"tensor": 2, "microbatches": 1}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


LAYOUTS = {
    "hidden1": [64 * 4 + 4 + 8 * 4 + 8 + 8 * 10 + 10] * 4,
    "hidden2": [64 * 8 + 8 + 8 * 4 + 4 + 4 * 10 + 10] * 4,
    "pixels": [32 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10] * 4,
    "classes": [64 * 8 + 8 + 8 * 8 + 8 + 8 * 5 + 5] * 4,
}
"""Numbers that each of 2 x 2 workers holds of two hidden layers of 8, by the dimension that is split along tensor."""


@pytest.mark.parametrize("split", LAYOUTS)
def test_mesh_tensorflow_layouts_of_the_batch_and_any_other_dimension_over_2_x_2_are_the_single_process(
    split: str,
) -> None:
    def task() -> Any:
        return MeshDigits({"batch": "data", split: "tensor"}, hidden=[8, 8])

    settings = layout_settings({"data": 2, "tensor": 2, "microbatches": 1})
    one = train_laid_out(task, layout_settings({"microbatches": 1}))
    found = train_laid_out(task, settings)
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12
    assert held_elements(task, settings)[1] == LAYOUTS[split]


@pytest.mark.parametrize("task", [LocallyConnectedDigits, TiledDigits, partial(TiledDigits, tile=2)])
def test_locally_connected_and_tiled_digits_on_two_workers_are_the_single_process(task: Any) -> None:
    one = train_laid_out(lambda: task(4), layout_settings({"microbatches": 1}))
    two = train_laid_out(lambda: task(4), layout_settings(TWO))
    assert two.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(two.weights, one.weights) <= 1e-12


# -- TreeNets ----------------------------------------------------------------------------------------------------------


def images() -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(12, 64, generator=generator, dtype=torch.float64)
    return inputs, {"targets": torch.randint(0, 10, (12,), generator=generator)}


@pytest.mark.parametrize("junction", [0, 1, 2, 3])
def test_treenets_trunk_gradient_is_the_sum_of_the_branches(junction: int) -> None:
    task = TreeNetDigits([16, 16, 16], junction=junction, members=3)
    model, (inputs, batch) = task.build_model().double(), images()
    block = model[-1]
    assert isinstance(block, Branches)
    task.loss(model(inputs), batch).backward()
    trunk = list(model[:-1].parameters())
    assert len(trunk) == 2 * junction
    whole = [p.grad for p in trunk]
    by_branch = [torch.zeros_like(p) for p in trunk]
    for member in range(3):
        model.zero_grad()
        shared = model[:-1](inputs)
        outputs = [branch(shared if k == member else shared.detach()) for k, branch in enumerate(block.branches)]
        task.loss(torch.cat(outputs, 1), batch).backward()
        for total, parameter in zip(by_branch, trunk, strict=True):
            if parameter.grad is not None:
                total += parameter.grad
    torch.testing.assert_close(by_branch, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("junction", [0, 1, 2])
def test_treenets_with_a_worker_a_branch_are_the_local_network_at_any_junction(junction: int) -> None:
    def task() -> TreeNetDigits:
        return TreeNetDigits([16, 16], junction=junction, members=3)

    settings = layout_settings({"tensor": 3, "plan": "branches", "microbatches": 1}, steps=2)
    one = train_laid_out(task, layout_settings({"microbatches": 1}, steps=2))
    found = train_laid_out(task, settings)
    assert furthest(found.weights, one.weights) <= 1e-12
    # Each worker has the trunk and a member; the deeper the junction, the less of the whole is apart.
    _, held = held_elements(task, settings)
    trunk = sum([64 * 16 + 16, 16 * 16 + 16][:junction])
    member = sum([64 * 16 + 16, 16 * 16 + 16, 16 * 10 + 10][junction:])
    assert held == [trunk + member] * 3


def test_treenets_ensemble_aware_loss_is_that_of_the_mean_of_probabilities() -> None:
    task = TreeNetDigits([8], members=3, ensemble_weight=1.0)
    model, (inputs, batch) = task.build_model().double(), images()
    logits = model(inputs)
    mean = torch.softmax(logits, 2).mean(1)
    expected = -mean[torch.arange(12), batch["targets"]].log().mean()
    torch.testing.assert_close(task.loss(logits, batch), expected, rtol=1e-12, atol=1e-12)


# -- deep stacking -----------------------------------------------------------------------------------------------------


def count_products(counted: dict[int, list[int]], model: nn.Module, group: Collective) -> None:
    """Note for each worker how many products each of its forward passes takes."""
    forward, own = model.forward, counted.setdefault(group.rank, [])

    def counting(x: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            y: Tensor = forward(x)
        own.append(counter.get_total_flops() // 2)
        return y

    model.forward = counting  # type: ignore[method-assign]


def test_deep_stacking_networks_compute_the_raw_part_of_every_layer_at_once() -> None:
    num_inputs, width, depth = 20, 4, 3
    model, x = DeepStacking(num_inputs, width, depth, 5).double(), torch.randn(6, num_inputs, dtype=torch.float64)
    # Layer by layer, each a fully connected one of the raw data and all results before it.
    seen = x
    with FlopCounterMode(display=False) as counter:
        for layer in range(depth):
            rows = slice(width * layer, width * (layer + 1))
            weight = model.raw.weight[rows]
            if layer:
                weight = torch.cat([weight, model.previous[layer - 1].weight], 1)
            y = model.upper[layer](torch.sigmoid(nn.functional.linear(seen, weight, model.raw.bias[rows])))
            seen = torch.cat([seen, y], 1)
    sequential = counter.get_total_flops() // 2
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
    # A worker a layer: the raw parts are computed side by side, what is left one after another is small.
    counted: dict[int, list[int]] = {}
    _, workers = check_same(
        model, {"raw": "output_gathered"}, depth, Run(x, num_steps=1, before=partial(count_products, counted))
    )
    for rank, worker in enumerate(workers):
        assert worker.state["raw.weight"].shape == (width, num_inputs)
        # What a worker computes it computes one after another: of the raw parts that is one, not all.
        (on_path,) = counted[rank]
        assert on_path == sequential - (depth - 1) * len(x) * width * num_inputs


# -- restricted Boltzmann machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sampled", [False, True])
def test_data_parallel_rbm_has_the_gradient_of_cd_1(is_sampled: bool) -> None:
    model = RestrictedBoltzmann(6, 4, is_sampled=is_sampled).double()
    nn.init.normal_(model.weight)
    data = torch.rand(5, 6, dtype=torch.float64)
    state = torch.get_rng_state()
    model(data)[:, 0].mean().backward()

    def hidden(visible: Tensor) -> Tensor:
        return torch.sigmoid(visible @ model.weight.T + model.hidden)

    with torch.no_grad():
        torch.set_rng_state(state)
        states = torch.bernoulli(hidden(data)) if is_sampled else hidden(data)  # zeros and ones, or probabilities
        rebuilt = torch.sigmoid(states @ model.weight + model.visible)
        expected = -(hidden(data).T @ data - hidden(rebuilt).T @ rebuilt) / 5
        torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.visible.grad, -(data - rebuilt).mean(0), rtol=1e-12, atol=1e-14)


def test_data_parallel_rbm_of_three_replicas_is_the_single_process_and_its_reconstructions_get_better() -> None:
    options: dict[str, Any] = {"batch_size": 48, "optimizer": {"type": "sgd", "lr": 0.1}}
    fields = RestrictedBoltzmannDigits(16, is_sampled=False)  # nothing is drawn, so replicas can be compared
    (one,) = train(fields, steps=10, **options)
    for run in train(fields, 3, steps=10, **options):
        assert furthest(run.after, one.after) <= 1e-12
    sampled = RestrictedBoltzmannDigits(16)
    first, later = (train(sampled, 2, steps=steps, **options)[0].outcome.final["validation"] for steps in (1, 30))
    assert first is not None
    assert later is not None
    assert later["reconstruction_error"] < 0.6 * first["reconstruction_error"]


def test_data_parallel_dbn_trains_layer_by_layer_on_what_the_frozen_layers_below_make() -> None:
    options: dict[str, Any] = {"batch_size": 48, "optimizer": {"type": "sgd", "lr": 0.1}, "steps": 10}
    (first,) = train(DeepBeliefDigits([16], is_sampled=False), **options)

    def stacked() -> DeepBeliefDigits:
        task = DeepBeliefDigits([16, 8], is_sampled=False)
        build = task.build_model

        def begun() -> nn.Module:
            model = build()
            model.load_state_dict(first.after, strict=False)  # as train.init_from does
            return model

        task.build_model = begun  # type: ignore[method-assign]
        return task

    (one,) = train(stacked(), **options)
    assert all(torch.equal(one.after[name], value.float().double()) for name, value in first.after.items())
    assert furthest(one.before, one.after) > 1e-3
    for run in train(stacked(), 3, **options):
        assert furthest(run.after, one.after) <= 1e-12
    # The last machine alone, on the probabilities of the one below, is trained in the same way.
    model = stacked().build_model().double()
    assert isinstance(model, DeepBelief)
    below, last = model.layers
    data = torch.rand(5, 64, dtype=torch.float64)
    model(data)[:, 0].mean().backward()
    found = last.weight.grad
    last.weight.grad = None
    last(below.hidden_probabilities(data))[:, 0].mean().backward()
    assert torch.equal(found, last.weight.grad)
    assert below.weight.grad is None
