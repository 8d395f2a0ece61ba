"""One file and one line add a method of search: it is in the schema, checked, made and searched with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.layers import ROOT
from support.patience import PATIENCE_S

TOY = """
from typing import Literal

from orchestray.platform.config.base import Positive
from orchestray.search.methods.hyper.proposer import Proposer
from orchestray.search.methods.params import MethodSection


class ToyParams(MethodSection):
    '''Each range in equal steps from its lower end.'''

    searches = "space"
    counts = ("stride",)

    type: Literal["toy"]
    '''The method `toy`.'''
    stride: Positive = 4
    '''Steps from one end of a range to the other.'''


class Toy(Proposer):
    def __init__(self, *, stride=4, **arguments):
        super().__init__(**arguments)
        self.stride = stride

    def ask(self):
        if self.is_done:
            return None
        unit = self.num_asked / self.stride
        return self.propose({key: dimension.from_unit(unit) for key, dimension in self.space.items()})
"""
SEARCH = """
import json
from orchestray.search.registry.methods import METHODS

METHODS.add("toy", "toy:ToyParams", "toy:Toy")

from orchestray.search.simulation.virtual_time import simulate
from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config, search_schema
from orchestray.search.registry.check import method_of
from support.search_configs import GOOD

space = {"train.optimizer.momentum": {"type": "uniform", "low": 0.0, "high": 1.0}}


def problem_of(method, **search):
    try:
        return method_of(load(method, **search))
    except ConfigError as error:
        return str(error)


def load(method, **search):
    return load_search_config({**GOOD, "search": {**GOOD["search"], "space": space, "method": method, **search}})


def scores(method):
    search = simulate(method, lambda proposal, step: proposal.changes["train.optimizer.momentum"], workers=2)
    return [trial.score for trial in search.trials.values()]


print(json.dumps({
    "in_schema": list(search_schema()["$defs"]["ToyParams"]["properties"]),
    "scores": scores(method_of(load({"type": "toy", "stride": 3}))),
    "scores_inside": scores(method_of(load({"type": "median_stopping", "proposals": {"type": "toy"}}))),
    "wrong": problem_of({"type": "toy", "stride": 0}),
    "too_many": problem_of({"type": "toy", "stride": 5}),
    "not_for_networks": problem_of({"type": "toy"}, architecture={"space": "chain"}),
}))
"""


def test_one_file_and_one_line_add_a_method_that_is_checked_in_the_schema_and_searches(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    path = os.pathsep.join(map(str, [tmp_path, ROOT / "tests", ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", SEARCH],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "in_schema": ["type", "stride"],
        "scores": [0.0, 1 / 3, 2 / 3, 1.0],
        "scores_inside": [0.0, 0.25, 0.5, 0.75],
        "wrong": "config: search.method.stride: must be >= 1, got 0",
        "too_many": "config: search.method.stride: must be at most the budget's trials (4), got 5; "
        "raise search.budget.trials",
        "not_for_networks": "config: search.architecture: is not for toy, which searches hyper-parameters; use random "
        "or bayesian, or an evolution",
    }
