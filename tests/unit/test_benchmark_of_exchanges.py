"""The benchmark of exchanges has every kind of them, and puts no rows of other machines beside new ones."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestray.platform.config.error_location import sections_of
from orchestray.trainers.config import sections
from orchestray.trainers.config.load import load_train_config

ROOT = Path(__file__).resolve().parents[2]
CASES = runpy.run_path(str(ROOT / "benchmarks" / "exchange" / "exchange_cases.py"))
STRATEGIES = {name: CASES["strategy"](name) for name in CASES["EXCHANGES"]}
OTHER_ALGORITHMS = {
    "staleness": "SSP",
    "push_every": "Downpour",
    "replicas": "copies of servers",
    "backup_workers": "backup workers",
    "groups": "leaf servers",
    "significance": "changes that cross between places",
    "transport": "HOGWILD",
    "mixing": "push-sum",
    "outer_optimizer": "DiLoCo",
    "trunk": "TreeNets",
}
"""Keys of an exchange that make another one of it."""


def config_of(strategy: dict[str, Any]) -> dict[str, Any]:
    train = {"batch_size": 64, "epochs": 20, "optimizer": {"type": "sgd", "lr": 0.1}}
    return {"name": "case", "task": {"type": "digits", "hidden": [128, 128]}, "train": train, "strategy": strategy}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_case_is_a_config_that_trains(name: str) -> None:
    assert load_train_config(config_of(STRATEGIES[name])).strategy.network.data > 1


def test_every_exchange_and_every_key_that_makes_another_of_it_has_a_case() -> None:
    told = [strategy.get("exchange", {"type": "allreduce"}) for strategy in STRATEGIES.values()]
    types = {kind.model_fields["type"].annotation.__args__[0] for kind in sections_of(sections.Exchange)}
    assert types == {exchange["type"] for exchange in told}
    assert set(OTHER_ALGORITHMS) <= {key for exchange in told for key in exchange}


@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_replicas_of_several_workers_under_servers_have_a_case_each(layout: str) -> None:
    (found,) = [name for name, strategy in STRATEGIES.items() if strategy["network"].get(layout)]
    assert STRATEGIES[found]["exchange"]["type"] == "parameter_server"
    assert CASES["num_workers"](found) == 4


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the benchmark as a process of its own finds it: the folder of benchmarks is on the path."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("exchange.exchanges")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("exchange", "harness"):
            del sys.modules[name]


def measured(module: ModuleType, place: Path, *wanted: str) -> Any:
    """Return the benchmark's report with `--keep`, of what is recorded at `place`; nothing is trained here."""
    parser = argparse.ArgumentParser()
    module.add_options(parser)
    arguments = parser.parse_args(["--keep", "--no-picture", *wanted])
    arguments.results_dir = place
    report = module.benchmark.Report("exchanges", "")
    module.measure(report, module.benchmark.Options(False, None, place, arguments))
    return report


def record(module: ModuleType, place: Path, **machine: Any) -> dict[str, Any]:
    """Return a result with every case, measured on this machine unless `machine` says otherwise."""
    run = {"accuracy": 0.95, "sent": 1_000, "dense": 2_000, "staleness": None, "workers": 2, "seconds": 1.0}
    names = [module._SINGLE, *module.EXCHANGES]
    result = {
        "began": "2001-02-03 04:05:06 UTC",
        "machine": {**module.recorded.machine.description(), **machine},
        "versions": {**module.recorded.machine.versions(), "commit": "abcdef0"},
        "settings": {**module._settings(5), "strategies": {name: module._strategy(name) for name in names}},
        "measurements": [
            {"name": f"{name}, accuracy at a rate of 0.3", "values": [90.0] * 5}
            for name in ("all-reduce", *module._AS_GOOD)
        ],
        "details": {name: [run] * 5 for name in names},
    }
    text = json.dumps(result)
    (place / "exchanges.json").write_text(text)
    copy: dict[str, Any] = json.loads(text)
    return copy


def test_what_is_recorded_is_kept_as_it_was_and_the_result_says_when_it_was_measured(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    before = record(benchmark, tmp_path)
    report = measured(benchmark, tmp_path)
    assert report.details == before["details"]
    assert set(report.settings["kept"].values()) == {"2001-02-03 04:05:06 UTC, commit abcdef0"}
    assert [goal["value"] for goal in report.goals] == [0.0] * len(benchmark._AS_GOOD)
    assert report.notes[0].startswith(f"{len(before['details'])} of the rows were measured before")


def test_a_row_that_was_kept_once_keeps_its_date_when_it_is_kept_again(benchmark: ModuleType, tmp_path: Path) -> None:
    result = record(benchmark, tmp_path)
    result["settings"]["kept"] = {"all-reduce": "2000-01-01 00:00:00 UTC, commit 1234567"}
    (tmp_path / "exchanges.json").write_text(json.dumps(result))
    kept = measured(benchmark, tmp_path).settings["kept"]
    assert kept["all-reduce"] == "2000-01-01 00:00:00 UTC, commit 1234567"
    assert kept["gossip, push-sum"] == "2001-02-03 04:05:06 UTC, commit abcdef0"


def test_rows_of_another_kind_of_machine_are_not_kept(benchmark: ModuleType, tmp_path: Path) -> None:
    record(benchmark, tmp_path, processor="another", cores=192)
    with pytest.raises(benchmark.benchmark.BenchmarkError, match=r"other machine.*cores 192 then.*measure all"):
        measured(benchmark, tmp_path)


def test_rows_of_another_number_of_seeds_are_not_kept(benchmark: ModuleType, tmp_path: Path) -> None:
    record(benchmark, tmp_path)
    with pytest.raises(benchmark.benchmark.BenchmarkError, match=r"other settings.*seeds 5 then, 1 now"):
        measured(benchmark, tmp_path, "--seeds", "1")


def test_what_is_not_recorded_has_changed_or_is_named_is_measured_anew(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = record(benchmark, tmp_path)
    del result["details"]["gossip, push-sum"]
    result["settings"]["strategies"]["servers, stale by 4"]["exchange"]["staleness"] = 3
    (tmp_path / "exchanges.json").write_text(json.dumps(result))
    trained = []

    def train(name: str, *_: Any) -> Any:
        trained.append(name)
        return result["details"]["all-reduce"][0]

    monkeypatch.setattr(benchmark, "_train", train)
    measured(benchmark, tmp_path)
    assert set(trained) == {"gossip, push-sum", "servers, stale by 4"}
    trained.clear()
    measured(benchmark, tmp_path, "--only", "ensemble of 2")
    assert trained == ["ensemble of 2"] * 5
