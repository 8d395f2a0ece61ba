"""Configs that train with few bits under schemes that cannot keep the result."""

from __future__ import annotations

import pytest

from orchestray.trainers.config.load import load_train_config
from support.configs import GOOD, problems_of, server


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["train.quantize={type: twn}", "strategy.network.tensor=2"],
            (
                "train.quantize: scales come from whole tensors of weights, and strategy.network.tensor gives each "
                "worker a part of them; use tensor: 1, with data, pipeline or strategy.exchange.shard"
            ),
        ),
        (
            ["train.quantize={type: dorefa}", "train.precision=bfloat16"],
            (
                "train.precision: bfloat16 would round the quantized numbers once more; use float32, or take "
                "train.quantize out"
            ),
        ),
        (
            ["train.quantize={type: twn}", "strategy.network.data=2", "strategy.exchange.factors=auto"],
            (
                "strategy.exchange.factors: factors make gradients of plain linear layers, and train.quantize changes "
                "what those compute; use factors: never, or take train.quantize out"
            ),
        ),
        (
            ["train.quantize={type: twn}", "train.weight_norm=true"],
            (
                "train.weight_norm: both this and train.quantize compute a layer's weight from another; take one of "
                "them out"
            ),
        ),
        (
            ["train.quantize={type: twn}", "train.optimizer=null", "train.solver={type: lbfgs}"],
            (
                "train.solver: solvers search along true derivatives, and those of quantized weights are "
                "straight-through estimates; use train.optimizer, or take train.quantize out"
            ),
        ),
        (
            ["train.quantize={type: bnn}", server("shards: 1")],
            (
                "train.quantize.type: bnn clips the weights after each update, which parameter servers do not; use "
                "allreduce, or another quantization"
            ),
        ),
        (
            ["train.quantize={type: bnn}", "strategy.network={pipeline: 2, schedule: pipedream}"],
            (
                "train.quantize.type: bnn clips the weights after each update, and pipedream's stages update at "
                "moments of their own; use another schedule, or another quantization"
            ),
        ),
        (
            [
                "train.quantize={type: flexpoint}",
                "strategy.network.data=2",
                "strategy.exchange={type: averaging, every: 2}",
            ],
            (
                "train.quantize.type: flexpoint predicts by the largest numbers of the whole batch, once a step, and "
                "with averaging no step has all of them; use allreduce, or another quantization"
            ),
        ),
        (
            ["train.quantize={type: flexpoint}", "strategy.network={pipeline: 2, schedule: pipedream}"],
            (
                "train.quantize.type: flexpoint predicts by the largest numbers of the whole batch, once a step, and "
                "pipedream begins a step before the last one ends; use another schedule, or another quantization"
            ),
        ),
    ],
)
def test_a_scheme_that_cannot_keep_the_result_is_refused(overrides: list[str], line: str) -> None:
    assert problems_of(GOOD, *overrides) == [f"config: {line}"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.quantize={type: tern}", "train.quantize.type"),
        ("train.quantize={type: dorefa, weight_bits: 0}", "train.quantize.weight_bits"),
        ("train.quantize={type: dorefa, gradient_bits: binary}", "train.quantize.gradient_bits"),
        ("train.quantize={type: flexpoint, window: 0}", "train.quantize.window"),
    ],
)
def test_a_wrong_value_is_named(override: str, said: str) -> None:
    assert any(said in line for line in problems_of(GOOD, override))


def test_a_quantization_is_a_part_of_the_task_that_is_saved() -> None:
    from orchestray.platform.task import TaskSource

    config = load_train_config(GOOD, ["train.quantize={type: twn}"])
    source = TaskSource.from_config(config.task, config.train.quantize)
    assert source.quantize == {"type": "twn", "threshold": 0.7, "ends": "quantized"}
    assert TaskSource.from_json(source.to_json()) == source
    assert TaskSource.from_json({"type": "digits", "arguments": {}}).quantize is None
