"""Messages to a user about faults that cannot happen, and about a missing teacher: exact texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.config.yaml_text import read
from orchestray.trainers.config.faults import KINDS
from orchestray.trainers.config.load import dump_yaml, load_train_config
from support.configs import GOOD, problems_of

_ONE_KIND = "must name exactly one of kill, slow, delay, drop, byzantine, such as kill: worker/0"


@pytest.mark.parametrize(
    ("faults", "line"),
    [
        ("3", ": must be a list, got 3"),
        ("{kill: worker/0}", ': must be a list, got {"kill": "worker/0"}'),
        ("[3]", ".0: must be a mapping of keys to values, got 3"),
        ("[{}]", f".0: {_ONE_KIND}; got none of them"),
        ("[{at_step: 2}]", f".0: {_ONE_KIND}; got none of them"),
        ("[{kill: worker/0}, {kill: worker/0, slow: worker/1}]", f".1: {_ONE_KIND}; got kill and slow"),
        ("[{kil: worker/0}]", ".0.kil: is no known key; did you mean 'kill'?"),
        ("[{kill: worker}]", ".0.kill: must be \"<role>/<rank>\", such as worker/0, got 'worker'"),
        ("[{kill: worker/one}]", ".0.kill: must be \"<role>/<rank>\", such as worker/0, got 'worker/one'"),
        ("[{slow: 0}]", '.0.slow: must be "<role>/<rank>", such as worker/0, got 0'),
        (
            "[{slow: wrker/0}]",
            ".0.slow: must name a worker, parameter_server or leaf_server, got 'wrker/0'; did you mean 'worker'?",
        ),
        ("[{drop: driver/0}]", ".0.drop: must name a worker, parameter_server or leaf_server, got 'driver/0'"),
        ("[{kill: worker/0, at_step: 0}]", ".0.at_step: must be >= 1, got 0"),
        (
            "[{byzantine: worker/0, attack: sign_flp}]",
            (".0.attack: must be one of sign_flip, gaussian, same_value, got 'sign_flp'; did you mean 'sign_flip'?"),
        ),
        # of this run
        ("[{kill: worker/2}]", ".0.kill: this run has no worker/2; it has worker/0 to worker/1"),
        (
            "[{kill: parameter_server/0}]",
            ".0.kill: this run has no parameter_server/0; it has worker/0 to worker/1",
        ),
        ("[{kill: worker/0}, {kill: worker/1, at_step: 4}]", None),
        # amounts
        (
            "[{drop: worker/0, factor: 0.5}]",
            ".0.drop: loses messages between workers and servers, and this run has none; use delay",
        ),
        (
            "[{drop: worker/0}]",
            ".0.factor: is how likely a message is lost, with drop: above 0 and below 1, such as 0.1; got 10",
        ),
        (
            "[{slow: worker/0, factor: 0.5}]",
            ".0.factor: is how many times as slowly it computes, with slow: 1 or more, got 0.5",
        ),
        (
            "[{kill: worker/0, factor: 2}]",
            ".0.factor: has a meaning with slow, delay or drop only, not with kill; take it out",
        ),
        (
            "[{slow: worker/0, attack: gaussian}]",
            ".0.attack: has a meaning with byzantine only, not with slow; take it out",
        ),
        ("[{delay: worker/0, scale: 3}]", ".0.scale: has a meaning with byzantine only, not with delay; take it out"),
    ],
)
def test_a_fault_that_cannot_happen_gives_one_line(faults: str, line: str | None) -> None:
    line = line or ".1.at_step: the run is over by then: it has 3 steps (train.steps), got 4"
    overrides = ["allow_faults=true", "strategy.network.data=2", f"faults={faults}"]
    if "drop: worker/0}" in faults:
        overrides.append("strategy.exchange.type=parameter_server")
    assert problems_of(GOOD, *overrides) == [f"config: faults{line}"]


@pytest.mark.parametrize(
    ("strategy", "fault", "sentence"),
    [
        (
            "strategy.exchange.shard=gradients",
            "byzantine",
            "spoils whole gradients, which shard: gradients does not keep; use shard: none",
        ),
        (
            "strategy.exchange.factors=auto",
            "byzantine",
            "spoils gradients, and factors are sent in their place; use factors: never",
        ),
        (
            "strategy.exchange={type: parameter_server, factors: auto}",
            "byzantine",
            "spoils gradients, and factors are sent in their place; use factors: never",
        ),
        (
            "strategy.network={data: 2, pipeline: 2, schedule: pipedream}",
            "slow",
            "pipedream has several steps under way at once, so nothing can happen at one; use another schedule",
        ),
    ],
)
def test_a_fault_that_an_exchange_would_not_feel_is_refused(strategy: str, fault: str, sentence: str) -> None:
    overrides = ["allow_faults=true", "strategy.network.data=2", strategy, f"faults=[{{{fault}: worker/0}}]"]
    assert problems_of(GOOD, *overrides) == [f"config: faults.0.{fault}: {sentence}"]


def test_servers_are_there_in_a_run_that_has_them() -> None:
    server = "strategy.exchange={type: parameter_server, shards: 3, replicas: 2, groups: 2}"
    run = ["allow_faults=true", "strategy.network.data=2", server]
    faults = "faults=[{kill: parameter_server/5}, {slow: leaf_server/1}, {kill: worker/1}]"
    assert len(load_train_config(GOOD, [*run, faults]).faults) == 3
    there = (
        "it has worker/0 to worker/1 and parameter_server/0 to parameter_server/5 and leaf_server/0 to leaf_server/1"
    )
    assert problems_of(GOOD, *run, "faults=[{kill: parameter_server/6}, {kill: leaf_server/2}]") == [
        f"config: faults.0.kill: this run has no parameter_server/6; {there}",
        f"config: faults.1.kill: this run has no leaf_server/2; {there}",
    ]
    assert problems_of(GOOD, *run, "faults=[{byzantine: leaf_server/0}]") == [
        (
            "config: faults.0.byzantine: it is workers that send gradients, got leaf_server/0; "
            "this run has worker/0 to worker/1"
        )
    ]


def test_the_workers_of_a_split_network_can_all_be_named() -> None:
    network = "strategy.network={data: 2, tensor: 2, pipeline: 2}"
    config = load_train_config(GOOD, ["allow_faults=true", network, "faults=[{kill: worker/7}]"])
    assert config.faults[0].target == ("worker", 7)


def test_faults_have_to_be_allowed() -> None:
    assert problems_of(GOOD, "faults=[{kill: worker/0}]") == [
        ("config: faults: break the run on purpose, which has to be allowed: set allow_faults: true, or take them out")
    ]
    assert load_train_config(GOOD, ["faults=[]"]).faults == ()
    assert load_train_config(GOOD, ["allow_faults=true"]).faults == ()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_comes_back_from_a_dump(kind: str) -> None:
    factor = ", factor: 0.5" if kind == "drop" else ""
    server = "strategy.exchange.type=parameter_server"
    fault = f"faults=[{{{kind}: worker/0, at_step: 2{factor}}}]"
    config = load_train_config(GOOD, ["allow_faults=true", server, fault])
    assert (config.faults[0].kind, config.faults[0].target) == (kind, ("worker", 0))
    assert load_train_config(read(dump_yaml(config))) == config


def test_a_teacher_must_be_a_run_that_has_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "big").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert problems_of(GOOD, "distill.teacher=runs/none") == [
        (
            f"config: distill.teacher: there is no run directory {tmp_path}/runs/none; give that of a run that has "
            "finished"
        )
    ]
    assert problems_of(GOOD, "distill.teacher=runs/big") == [
        (
            f"config: distill.teacher: {tmp_path}/runs/big holds no trained model (model/model.json); "
            "give the directory of a run that has finished"
        )
    ]
    assert problems_of(GOOD, "distill.temperature=3") == ["config: distill.teacher: is required, and missing"]
    assert problems_of(GOOD, "distill=runs/big") == [
        "config: distill: must be a mapping of keys to values, got 'runs/big'"
    ]
    assert problems_of(GOOD, "distill.teacher=") == ["config: distill.teacher: must be text, got null"]
    (tmp_path / "runs" / "big" / "model").mkdir()
    (tmp_path / "runs" / "big" / "model" / "model.json").write_text("{}")
    config = load_train_config(GOOD, ["distill.teacher=runs/big"])
    assert config.distill is not None
    assert config.distill.teacher == str(tmp_path / "runs" / "big")


def test_a_teacher_in_a_file_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "runs" / "big" / "model").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "model" / "model.json").write_text("{}")
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "small.yaml"
    file.write_text(
        "name: a\ntask: {type: digits}\ntrain: {batch_size: 8, steps: 3, optimizer: {type: sgd, lr: 1}}\n"
        "distill: {teacher: ../runs/big, temperature: 4.0}\n"
    )
    config = load_train_config(file)
    assert config.distill is not None
    assert config.distill.teacher == str(tmp_path / "runs" / "big")


def test_the_config_of_a_run_that_is_over_is_read_although_its_teacher_has_gone(tmp_path: Path) -> None:
    config = load_train_config(GOOD, [f"distill.teacher={tmp_path}/gone"], look_at_task=False)
    assert config.distill is not None
