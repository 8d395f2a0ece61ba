"""Settings that a solver cannot run with are refused by a sentence that says what to do."""

from __future__ import annotations

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.resume import resume_differences
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.config.settings import ReplicaSettings


def load(*overrides: str) -> TrainConfig:
    train = {"batch_size": 1500, "steps": 3, "solver": {"type": "lbfgs"}}
    return load_train_config({"name": "a", "task": {"type": "digits"}, "train": train}, overrides)


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.optimizer={type: sgd, lr: 0.1}", "train.solver: give either optimizer or solver, not both"),
        ("train.solver=null", "train.optimizer: is required, and missing: give optimizer, or solver"),
        ("train.solver.type=lbfg", "train.solver.type: must be one of"),
        ("train.solver.history=0", "train.solver.history: must be >= 1, got 0"),
        ("train.solver.terms=3", "train.solver.terms: is no key of lbfgs; neumann has it"),
        ("train.solver={type: svrg}", "train.solver.lr: is required, and missing"),
        ("strategy.network.tensor=2", "strategy.network.tensor: a solver holds all weights as one vector"),
        ("strategy.network.pipeline=2", "strategy.network.pipeline: a solver holds all weights as one vector"),
        ("strategy.exchange={type: parameter_server}", "strategy.exchange.type: a solver sums the loss"),
        ("strategy.exchange.shard=optimizer", "strategy.exchange.shard: a solver holds all weights as one vector"),
        ("strategy.exchange.algorithm=ring", "strategy.exchange.algorithm: a solver sums the loss"),
        ("strategy.exchange.factors=auto", "strategy.exchange.factors: a solver sums the loss"),
        ("strategy.compression={type: float16}", "strategy.compression.type: a solver sums the loss"),
        ("strategy.aggregation={type: median, byzantine: 0}", "strategy.aggregation.type: a solver sums the loss"),
        ("train.recompute=sqrt", "train.recompute: a solver takes derivatives of derivatives"),
        ("train.average={type: ema}", "train.average: a solver's steps are not noisy"),
        ("train.drop_last=true", "train.drop_last: leaves out other samples in each epoch, and lbfgs compares"),
        ("train.grad_clip=1.0", "train.grad_clip: a solver chooses the length of its step itself; take it out"),
        ("train.noise_scale={}", "train.noise_scale: the noise scale is measured in the backward pass"),
        (
            "train.lr_scaling={rule: linear, base_batch_size: 8}",
            "train.lr_scaling: a solver chooses the length of its step",
        ),
        ("train.solver={type: admm, weight_decay: 0.1}", "train.solver.weight_decay: admm solves for the weights by"),
        ("train.precision=bfloat16", "train.precision: the roundings of bfloat16 are larger"),
    ],
)
def test_what_does_not_fit_a_solver_is_one_line(override: str, line: str) -> None:
    text = problems("strategy.network.data=2", override)
    assert line in text
    assert len(text.splitlines()) == 1


def test_short_batches_are_left_out_where_no_gradients_of_other_steps_are_compared() -> None:
    assert "train.drop_last: leaves out other samples" in problems(
        "train.solver={type: svrg, lr: 1}", "train.drop_last=true"
    )
    load("train.solver={type: hessian_free}", "train.drop_last=true")


def test_byzantine_workers_have_no_gradient_to_corrupt() -> None:
    fault = "faults=[{byzantine: worker/0, attack: sign_flip}]"
    assert "faults.0: corrupts the gradient" in problems("allow_faults=true", "strategy.network.data=3", fault)


def test_a_run_without_optimizer_and_solver_is_told_with_its_other_mistakes() -> None:
    text = problems("train.solver=null", "train.epochs=2")
    assert "train.optimizer: is required, and missing" in text
    assert "train.steps: give either epochs or steps" in text


def test_settings_have_the_solver_and_its_rate() -> None:
    settings = ReplicaSettings.from_config(load("train.solver.lr=0.5"), storage="", model_directory="")
    assert settings.optimizer == {}
    assert settings.solver == {"type": "lbfgs", "lr": 0.5, "weight_decay": 0.0, "history": 10}
    assert settings.lr == 0.5


def test_a_run_does_not_resume_with_another_solver() -> None:
    assert resume_differences(load(), load("train.solver.history=3")) == ["train.solver.history (was 10, now 3)"]
    changed = resume_differences(load(), load("train.solver={type: bfgs}"))
    assert changed == ["train.solver.type (was 'lbfgs', now 'bfgs')"]
