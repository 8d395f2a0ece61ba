"""K-FAC in layouts that divide the model: its steps are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.tasks import resolve
from support.layouts import LaidOut, layout_settings, train_and_keep, train_laid_out
from support.training import digits, furthest, same_bits, train

TOLERANCE = 1e-10
FEW = {"validation_fraction": 0.02}
KFAC = {"type": "kfac", "lr": 0.05, "damping": 0.03, "inverse_every_steps": 2, "kl_clip": 1e-4}
"""Steps that are all cut to the largest length."""
TASKS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: digits(hidden=[14, 12, 10], **FEW),
    "cnn": lambda: digits(model="cnn", hidden=[4, 6], **FEW),
}


def trained(
    network: dict[str, Any] | None = None,
    exchange: dict[str, Any] | None = None,
    *,
    task: Callable[[], Any] = TASKS["mlp"],
    rest: dict[str, Any] | None = None,
    steps: int = 3,
    **train: Any,
) -> LaidOut:
    settings = layout_settings(network, exchange, **{"optimizer": KFAC, "steps": steps, **train})
    return train_laid_out(task, settings, **(rest or {}))


@cache
def alone(task: Callable[[], Any]) -> LaidOut:
    """Return what one process comes to with the defaults of `trained`."""
    return trained(task=task)


@pytest.mark.parametrize(
    "schedule", ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v"]
)
@pytest.mark.parametrize("model", TASKS)
def test_the_stages_of_a_pipeline_make_the_steps_of_one_process(model: str, schedule: str) -> None:
    found = trained({"pipeline": 2, "schedule": schedule}, task=TASKS[model])
    assert same_bits(found.weights, alone(TASKS[model]).weights)
    assert found.losses == alone(TASKS[model]).losses


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("kfac", {"inverse_fraction": 0.0, "weight_decay": 0.01}),
        ("kfac", {"kl_clip": None}),
        ("natural_gradient", {"every_steps": 2}),
    ],
)
def test_replicas_of_each_stage_share_its_inversions(kind: str, keys: dict[str, Any]) -> None:
    optimizer = (KFAC if kind == "kfac" else {"type": kind, "lr": 0.05}) | keys
    one = trained(optimizer=optimizer)
    found = trained({"data": 2, "pipeline": 2}, optimizer=optimizer)
    assert furthest(found.weights, one.weights) <= TOLERANCE


@pytest.mark.parametrize(
    ("network", "exchange"),
    [({"data": 2, "pipeline": 2}, {}), ({"data": 2}, {"shard": "parameters"}), ({"tensor": 2}, {})],
)
def test_parameters_in_groups_move_as_in_one_process(network: dict[str, int], exchange: dict[str, str]) -> None:
    groups = [{"match": "*.bias", "lr": 0.1, "weight_decay": 0.0}, {"match": "4.*", "lr": 0.01}]
    optimizer = KFAC | {"weight_decay": 0.01, "groups": groups}
    one, found = trained(optimizer=optimizer), trained(network, exchange, optimizer=optimizer)
    assert furthest(found.weights, one.weights) <= TOLERANCE


def test_a_pipeline_in_float32_stays_with_one_process() -> None:
    one, found = trained(steps=6, precision="float32"), trained({"pipeline": 2}, steps=6, precision="float32")
    for name, weights in one.weights.items():
        assert (found.weights[name] - weights).norm() <= 1e-6 * weights.norm()


def blocks() -> Any:
    return resolve("python_source")(context=8, width=16, depth=2, heads=2, num_files=3)


@cache
def kept(network: str) -> LaidOut:
    """Return a run in a layout, as JSON, that computes nothing again."""
    return trained(json.loads(network), task=blocks, steps=2, recompute="none")


@pytest.mark.parametrize("recompute", ["blocks", "sqrt"])
@pytest.mark.parametrize("network", [{}, {"pipeline": 2, "schedule": "zero_bubble"}, {"tensor": 2}])
def test_what_is_computed_again_is_measured_once(network: dict[str, Any], recompute: str) -> None:
    found = trained(network, task=blocks, steps=2, recompute=recompute)
    assert same_bits(found.weights, kept(json.dumps(network)).weights)


SHARDED: list[tuple[dict[str, int], dict[str, str]]] = [
    ({"data": 3}, {"shard": "optimizer"}),
    ({"data": 2}, {"shard": "gradients"}),
    ({"data": 2}, {"shard": "parameters"}),
    ({"data": 2, "pipeline": 2}, {"shard": "optimizer"}),
]
CUT = ({"tensor": 2, "data": 2}, {"shard": "optimizer"})
BRANCHES = ({"tensor": 3, "data": 2, "plan": "branches"}, {"shard": "optimizer"})
LAYOUTS = [({"pipeline": 2}, {}), ({"data": 2, "pipeline": 2}, {}), *SHARDED, ({"tensor": 2}, {}), CUT]


@pytest.mark.parametrize(
    ("model", "network", "exchange"), [*(("mlp", *layout) for layout in SHARDED), ("cnn", *SHARDED[2])]
)
def test_replicas_that_share_the_state_make_the_steps_of_one_process(
    model: str, network: dict[str, int], exchange: dict[str, str]
) -> None:
    found = trained(network, exchange, task=TASKS[model])
    assert furthest(found.weights, alone(TASKS[model]).weights) <= TOLERANCE
    assert found.losses == pytest.approx(alone(TASKS[model]).losses, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize(("network", "exchange"), [({}, {"shard": "gradients"}), ({"tensor": 2}, {})])
@pytest.mark.parametrize("keys", [{"inverse_fraction": 0.0}, {"statistics_workers": 1}])
def test_who_measures_and_inverts_changes_no_step_of_replicas_that_share_the_state_or_split_layers(
    keys: dict[str, Any], network: dict[str, int], exchange: dict[str, str]
) -> None:
    optimizer = KFAC | keys
    plain, found = (
        trained({"data": 2}, optimizer=optimizer),
        trained({"data": 2} | network, exchange, optimizer=optimizer),
    )
    assert furthest(found.weights, plain.weights) <= TOLERANCE


def test_one_replica_alone_has_the_factors_of_a_layer() -> None:
    replicas = train(TASKS["mlp"](), 2, exchange={"shard": "optimizer"}, optimizer=KFAC)
    names = [
        {key.removesuffix(".inputs") for key in replica.optimizer[-1] if key.endswith(".inputs")}
        for replica in replicas
    ]
    assert not names[0] & names[1]
    assert all(names)
    assert names[0] | names[1] == {name for name in replicas[0].after if name.endswith(".weight")}


@pytest.mark.parametrize(("network", "exchange"), LAYOUTS)
def test_a_run_resumes_exactly_between_two_inversions(
    network: dict[str, int], exchange: dict[str, str], tmp_path: Path
) -> None:
    optimizer = KFAC | {"inverse_every_steps": 4}
    settings = layout_settings(network, exchange, optimizer=optimizer, steps=5)
    whole, load = train_and_keep(TASKS["mlp"], settings, tmp_path, 3)
    resumed = train_laid_out(TASKS["mlp"], settings, load=load)
    assert len(resumed.losses) == 2
    assert same_bits(resumed.weights, whole.weights)


def inception() -> Any:
    return digits(model="inception", hidden=[8], **FEW)


@pytest.mark.parametrize(
    ("task", "layouts"),
    [
        (TASKS["mlp"], [LAYOUTS[0], CUT, SHARDED[0], ({}, {}), SHARDED[-1], LAYOUTS[-2]]),
        (inception, [BRANCHES, ({}, {}), ({"tensor": 2, "plan": "branches"}, {})]),
    ],
)
def test_a_run_goes_on_in_other_layouts(
    task: Callable[[], Any], layouts: list[tuple[dict[str, Any], dict[str, str]]], tmp_path: Path
) -> None:
    optimizer = KFAC | {"inverse_every_steps": 4}
    for steps, (network, exchange) in enumerate(layouts, start=1):
        found, _ = latest_good(tmp_path)
        rest: dict[str, Any] = {"checkpoints": lambda: CheckpointWriter(tmp_path, keep=1)}
        if found is not None:
            rest["load"] = lambda found=found: Loaded(found)
        last = trained(network, exchange, task=task, optimizer=optimizer, steps=steps, rest=rest)
    one = trained(task=task, optimizer=optimizer, steps=len(layouts))
    assert furthest(last.weights, one.weights) <= TOLERANCE


class Sources:
    """A language model of layers that a test chooses."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._task = resolve("python_source")(context=8, width=8, depth=1, heads=2, num_files=3)
        self.build_model = build

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def tied() -> nn.Module:
    """Return a model whose head is its embedding, and whose first stage has no layer with a curvature."""
    embedding, head = nn.Embedding(256, 8), nn.Linear(8, 256, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.LayerNorm(8), nn.Linear(8, 8), head)


def test_a_weight_that_two_modules_share_moves_by_sgd_on_both_sides_of_a_cut() -> None:
    one, found = (trained(network, task=lambda: Sources(tied)) for network in ({}, {"pipeline": 2, "split": ["2"]}))
    assert furthest(found.weights, one.weights) <= TOLERANCE


class Twice(nn.Module):
    """A model that calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.layer(torch.tanh(self.layer(self.embedding(tokens))))))
        return output


def test_a_layer_that_two_stages_call_is_refused_and_one_that_a_stage_calls_twice_is_not() -> None:
    one = trained(task=lambda: Sources(Twice))
    found = trained({"pipeline": 2, "split": ["head"]}, task=lambda: Sources(Twice))
    assert furthest(found.weights, one.weights) <= TOLERANCE
    with pytest.raises(ConfigError, match=r"several use 'layer\.weight'; cut the pipeline elsewhere"):
        trained({"pipeline": 2, "split": ["layer@2"]}, task=lambda: Sources(Twice))


# -- layers that are split ---------------------------------------------------------------------------------------------


def transformer() -> Any:
    return resolve("python_source")(context=7, width=12, depth=2, heads=3, num_files=3)


class Planned:
    """A task whose layers are split as a test says."""

    def __init__(self, task: Callable[[], Any], plan: dict[str, str]) -> None:
        self._task, self._plan = task(), plan

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return self._plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def by_samples() -> Any:
    return Planned(TASKS["cnn"], {"0:4": "batch", "9": "output_gathered"})


SPLIT: list[tuple[Callable[[], Any], dict[str, Any], dict[str, str]]] = [
    (TASKS["mlp"], {"tensor": 2}, {}),
    (TASKS["mlp"], {"tensor": 3}, {}),
    (TASKS["mlp"], {"tensor": 2, "data": 2}, {}),
    (TASKS["mlp"], {"tensor": 2, "pipeline": 2}, {}),
    (TASKS["mlp"], {"tensor": 2, "data": 2}, {"shard": "gradients"}),
    (TASKS["mlp"], {"tensor": 2, "data": 2}, {"shard": "parameters"}),
    (TASKS["cnn"], {"tensor": 2}, {}),
    (TASKS["cnn"], {"tensor": 3, "plan": "channels"}, {}),
    (TASKS["cnn"], {"tensor": 2, "plan": "spatial"}, {}),
    (TASKS["cnn"], {"tensor": 4, "plan": "one_weird_trick"}, {}),
    (by_samples, {"tensor": 2, "data": 2}, {"shard": "gradients"}),
    (inception, {"tensor": 2, "plan": "branches"}, {}),
    (inception, *BRANCHES),
    (transformer, {"tensor": 2}, {}),
    (transformer, {"tensor": 3, "pipeline": 2, "schedule": "zero_bubble"}, {}),
]


@pytest.mark.parametrize(("task", "network", "exchange"), SPLIT)
def test_workers_that_split_layers_make_the_steps_of_one_process(
    task: Callable[[], Any], network: dict[str, Any], exchange: dict[str, str]
) -> None:
    one, found = alone(task), trained(network, exchange, task=task)
    assert furthest(found.weights, one.weights) <= TOLERANCE
    assert found.losses == pytest.approx(one.losses, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (TASKS["mlp"], {"0": "output_gathered", "2": "input_scattered", "4": "output", "6": "input"}),
        (TASKS["cnn"], {"0": "channels", "1": "channels", "4": "channels_gathered", "9": "output_gathered"}),
        (TASKS["cnn"], {"0": "channels_gathered", "4": "channels_in"}),
        (TASKS["cnn"], {"0:4": "batch"}),
        (TASKS["cnn"], {"0:4": "width"}),
        (TASKS["mlp"], {"0:1": "batch", "2": "batch", "4:6": "batch"}),
        (
            transformer,
            {
                "1": "heads+sequence",
                "2": "heads+sequence",
                "1.feed_forward_input": "output",
                "1.feed_forward_output": "input",
            },
        ),
    ],
)
def test_a_layer_is_measured_whole_whichever_part_a_worker_has(task: Callable[[], Any], plan: dict[str, str]) -> None:
    """Split by features of inputs or outputs, with either side gathered; by time around and without a split.

    Or split by samples and images, whose parts are cut and gathered by the layer itself or beside it.
    """
    found = trained({"tensor": 3}, task=lambda: Planned(task, plan))
    assert furthest(found.weights, alone(task).weights) <= TOLERANCE


def test_replicas_that_average_measure_the_layers_they_split() -> None:
    optimizer = {"type": "natural_gradient", "lr": 0.05, "every_steps": 2}
    exchange = {"type": "averaging", "every": 2}
    one, found = (trained({"data": 2} | more, exchange, optimizer=optimizer) for more in ({}, {"tensor": 2}))
    assert furthest(found.weights, one.weights) <= TOLERANCE
