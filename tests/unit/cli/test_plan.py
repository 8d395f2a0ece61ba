"""`orchestray plan` without a profile says what to do, and shows plans, reasons and errors with one."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestray.cli.plan import _deciding, app, command_of
from orchestray.cli.train import app as train_app
from orchestray.platform.errors import ConfigError
from orchestray.platform.terminal.format import number
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.profile import MachineProfile
from orchestray.trainers.planning import record as records
from orchestray.trainers.planning.plan import note_run
from unit.trainers.planning.test_planner import CONFIG as PLANNED
from unit.trainers.planning.test_planner import Known, machine, planner

CONFIG = """
task: {type: digits, hidden: [16, 16, 16]}
train: {batch_size: 32, steps: 100, optimizer: {type: sgd, lr: 0.1}}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of this module: what one test measures another finds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def profile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> MachineProfile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    # A busy machine measures again each time.
    monkeypatch.setattr("orchestray.trainers.planning.measuring._DISTURBED", 2.0)
    made = machine(processor=kept.processor(), cores=kept.cores(), versions=kept.versions(), memory_bytes=10**11)
    kept.save(made, kept.default_file())
    return made


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "small.yaml"
    file.write_text(CONFIG, encoding="utf-8")
    return str(file)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_a_profile_the_error_says_how_to_get_one(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no profile of this machine .* run `orchestray calibrate`"):
        run(config)


@pytest.mark.parametrize("mode", [(), ("--this",)], ids=["plans", "this"])
def test_a_mistake_in_the_config_is_said_before_the_profile_is_missed(
    mode: tuple[str, ...], config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"train\.epoch: is no known key"):
        run(config, "train.epoch=3", *mode)
    with pytest.raises(ConfigError, match="there is no such file"):
        run(str(tmp_path / "missing.yaml"), *mode)


@pytest.mark.usefixtures("profile")
def test_the_plans_of_one_worker_are_shown_with_the_command_that_runs_the_best(config: str) -> None:
    shown = run(config, "--workers", "1", "--mtbf-hours", "2")
    assert "one process" in shown
    assert "as it stands" in shown
    assert "Fastest with the result of one process: one process" in shown
    assert "With failures: goodput" in shown
    assert "checkpoint.every_steps=" in shown
    assert f"orchestray train {config} 'strategy.network={{}}'" in shown
    plans = json.loads(run(config, "--workers", "1", "--mtbf-hours", "2", "--json"))
    assert all(0 < plan["goodput"]["share"] < 1 for plan in plans)
    assert {"step_s", "interval_s", "memory_bytes", "bytes", "staleness", "price", "config"} <= plans[0].keys()


def test_the_command_of_a_plan_can_be_pasted_into_a_shell_where_a_layer_has_a_number_for_a_name(config: str) -> None:
    overrides = ["strategy.network={data: 1, pipeline: 2, split: ['3']}", "train.recompute=none"]
    *_, name, network, recompute = shlex.split(command_of(config, overrides))
    assert [network, recompute] == overrides
    assert load_train_config(name, [network, recompute]).strategy.network.split == ["3"]


def _in_all(compared: str) -> list[str]:
    return next(line.split() for line in compared.splitlines() if line.startswith("in all"))


def test_the_part_that_speaks_most_for_the_faster_plan_decides_whichever_is_named_first() -> None:
    plans = planner(Known(exchanged=100_000_000)).plans(PLANNED, 2)
    one, two = plans.find("one process"), plans.find("2 replicas")
    saved_us = 1e6 * (two.parts.exchange_s / two.samples - one.parts.exchange_s / one.samples)
    sentence = _deciding(one, two)
    assert sentence.startswith(
        f"Exchange decides: one process takes {number(saved_us, 3)} us a sample less for it than "
    )
    assert _deciding(two, one) == sentence
    assert _deciding(one, one) == "Nothing decides between one process and one process: no part of a step differs."


@pytest.mark.usefixtures("profile")
def test_a_plan_is_explained_by_its_parts_and_compared_with_another(config: str) -> None:
    explained = run(config, "--workers", "1", "--explain", "one process")
    assert "forward and backward" in explained
    assert "memory: parameters" in explained
    compared = run(config, "--workers", "1", "--why", "one process", "one process, recompute sqrt")
    assert "difference" in compared
    # Where computing parts again seemed faster, it is planned with the parts of the plan that does not.
    differs = not compared.rstrip().endswith("no part of a step differs.")
    assert ("decides: " in compared) is differs is (_in_all(compared)[-1] != "+0")
    both = json.loads(run(config, "--workers", "1", "--why", "one process, recompute sqrt", "one process", "--json"))
    assert [plan["name"] for plan in both] == ["one process, recompute sqrt", "one process"]
    assert json.loads(run(config, "--this", "--json"))[0]["name"] == "as it stands"


@pytest.mark.usefixtures("profile")
def test_a_price_an_hour_shows_what_each_run_costs_and_which_costs_least(config: str) -> None:
    assert "Cheapest" not in run(config, "--workers", "1")
    shown = run(config, "--workers", "1", "--price-per-hour", "36")
    assert shown.splitlines()[0].split()[-1] == "price"
    plans = json.loads(run(config, "--workers", "1", "--price-per-hour", "36", "--json"))
    for plan in plans:
        assert plan["price"] == pytest.approx((plan["start_s"] + 100 * plan["step_s"]) / 100)  # a cent a second
    cheapest = min((plan for plan in plans if plan["keeps_result"]), key=lambda plan: plan["price"])
    assert f"Cheapest with the result of one process: {cheapest['name']}, {cheapest['price']:.3g} for the run." in shown
    assert "price of the run" in run(config, "--this", "--price-per-hour", "36")
    with pytest.raises(ConfigError, match=r"--price-per-hour must be 0 or more, got -1"):
        run(config, "--price-per-hour", "-1")


@pytest.mark.usefixtures("profile")
def test_batches_that_grow_are_planned_with_a_note_and_their_runs_are_not_put_beside_predictions(config: str) -> None:
    grows = "train.batch_schedule={type: steps, every_steps: 10, max_batch_size: 64}"
    for options in (["--this"], ["--workers", "1"], ["--workers", "1", "--explain", "1"]):
        assert run(config, grows, *options).count("atches grow from 32 samples to 64 at most") == 1
    lines = [{"samples_per_s": 1.0, "time_s": float(step)} for step in range(50)]
    for overrides in ([grows], []):
        run(config, *overrides, "--this")
        noted = note_run(load_train_config(config, overrides), lines)
        assert (noted is None) is (overrides == [grows])
    records.record_file().unlink()


def test_the_history_shows_the_errors_of_each_family(profile: MachineProfile) -> None:
    assert "No run was predicted here yet" in run("--history")
    for ratio in (1.0, 1.1, 1.2):
        records.append(records.Entry("zero", "run", 1.0, ratio, "", profile.name))
    rows = json.loads(run("--history", "--json"))
    assert [(row["family"], row["runs"]) for row in rows] == [("zero", 3), ("all", 3)]
    assert rows[0]["median"] == pytest.approx(1 - 1 / 1.1)
    latest = [line.split() for line in run("--history").splitlines()[-3:]]
    assert [(line[:2], line[3]) for line in latest] == [(["run", "zero"], took) for took in ("1,000", "1,100", "1,200")]
    assert latest[0][2] == "1,000"
    for _, _, predicted, took, error in latest:
        wanted = float(predicted.replace(",", "")) / float(took.replace(",", "")) - 1
        assert float(error.strip("%")) / 100 == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--plan", "best"], "--plan takes auto, got best"),
        (["--plan", "auto", "--resume"], "take --resume and --replay out"),
    ],
)
def test_training_by_a_plan_takes_the_best_one_of_a_new_run_only(config: str, arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(train_app, [config, *arguments], catch_exceptions=False)


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--this", "--explain", "1"], "--this and --explain do not go together"),
        (["--this", "--workers", "4"], "--this and --workers do not go together"),
        (["--this", "--try", "2"], "--try and --this do not go together"),
        (["--history", "--try", "2"], "--try and --history do not go together"),
        (["--explain", "1", "--try", "2"], "--try and --explain do not go together"),
        (["--try", "2", "--nodes", "4"], "--try and --nodes do not go together"),
        (["--why", "1", "2", "--all"], "--why and --all do not go together"),
        (["--mtbf-hours", "0"], "--mtbf-hours must be above 0, got 0"),
        (["--budget", "-1"], "--budget must be above 0, got -1"),
        (["--try", "0"], "--try must be 1 or more, got 0"),
    ],
)
def test_an_option_that_would_not_count_is_refused(config: str, options: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run(config, *options)


def test_a_profile_of_another_machine_needs_the_same_torch_and_gives_its_disk_and_price(
    config: str, profile: MachineProfile, tmp_path: Path
) -> None:
    slow_disk = replace(profile, processor="another", disk_bytes_per_s=1.0, price_per_worker_hour=3.0)
    for name, made in (("there", slow_disk), ("old", replace(slow_disk, versions={"torch": "0.1"}))):
        kept.save(made, tmp_path / f"{name}.json")
    with pytest.raises(ConfigError, match=r"old\.json was measured with torch 0\.1, and this is "):
        run(config, "--this", "--machine", str(tmp_path / "old.json"))
    options = ["--mtbf-hours", "2", "--machine", str(tmp_path / "there.json")]
    (plan,) = json.loads(run(config, "--this", "--json", *options))
    assert plan["goodput"]["checkpoint_s"] > 1000  # by the disk of that machine
    assert plan["price"] > 0
    assert "price" in run(config, "--workers", "1", *options)
