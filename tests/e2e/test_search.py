"""`orchestray search` as a user types it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from orchestray.platform.cluster.cluster import Cluster
from orchestray.search.results.run import load_search
from orchestray.trainers.config.load import load_train_config
from support.cli import Running, beside, orchestray_here, read_lines
from support.serve_command import Endpoint
from support.slow_digits import slowly

CONFIG = """
name: small
base:
  task: {type: digits, hidden: [16]}
  train: {batch_size: 64, optimizer: {type: sgd, lr: 0.1}}
search:
  method: {type: random}
  objective: {metric: accuracy}
  space:
    train.optimizer.lr: {type: log_uniform, low: 0.01, high: 0.5}
    train.batch_size: {type: choice, values: [32, 64]}
  budget: {trials: 3, steps_per_trial: 23}
"""

FAILING = """
import pyarrow as pa
from torch import nn


class Mine:
    def build_model(self):
        return nn.Linear(1, 1)

    def dataset(self, split):
        return pa.table({"x": [1.0, 2.0]})

    def to_batch(self, columns):
        raise ValueError("this column is no number")

    def loss(self, outputs, batch):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return {"accuracy": outputs.mean()}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="module")
def searched(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedProcess[str]]:
    """Return the folder of the runs of a search, and what the command has printed."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "small.yaml").write_text(CONFIG)
    done = orchestray_here("search", folder / "small.yaml", "--runs-dir", folder / "runs", "--json")
    assert done.returncode == 0, done.stderr
    return folder / "runs", done


def test_a_search_ends_with_a_run_as_good_as_it_says_and_its_config_trains_it_again(
    searched: tuple[Path, CompletedProcess[str]], config: Path
) -> None:
    runs, done = searched
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["status"], result["trials"]) == ("succeeded", 3)
    assert "small: succeeded" in done.stderr
    found = load_search(runs / "small")
    assert found.result == result
    assert result["best"]["objective"] == max(found.trials().column("objective").to_pylist())
    best = found.best
    assert abs(measured(best) - result["best"]["objective"]) < 1e-6
    assert best.config.train.optimizer.lr == result["best"]["config"]["train.optimizer.lr"]
    assert load_train_config(best.path / "config.yaml") == best.config
    assert (found.path / "report.html").stat().st_size > 1e6

    again = orchestray_here("search", config, "--runs-dir", runs, "--quiet")
    assert again.returncode == 2
    assert "run name 'small' is in use" in again.stderr
    resumed = orchestray_here("search", config, "--runs-dir", runs, "--resume", "--quiet", "--json")
    assert json.loads(resumed.stdout) == result

    shown = orchestray_here("runs", "list", "--runs-dir", runs, "--json")
    assert json.loads(shown.stdout) == []


def test_what_a_search_leaves_is_served_and_answers_as_accurately_as_it_says(
    searched: tuple[Path, CompletedProcess[str]], tmp_path: Path
) -> None:
    runs, done = searched
    told = json.loads(done.stdout.splitlines()[-1])["best"]["objective"]
    task = load_search(runs / "small").best.load_task()
    batch = task.to_batch(task.dataset("validation"))  # type: ignore[arg-type]  # a table
    endpoint = Endpoint(runs / "small", cwd=tmp_path)
    answers = [endpoint.predict(image) for image in batch["inputs"].tolist()]
    assert endpoint.end(signal.SIGTERM)[0] == 0
    predicted = torch.tensor(answers).argmax(1)
    assert (predicted == batch["targets"]).float().mean().item() == pytest.approx(told, abs=1e-6)


def measured(run: object) -> float:
    """Return the accuracy of a run's saved model over the validation data."""
    from orchestray.trainers.saved.run import Run

    assert isinstance(run, Run)
    task = run.load_task()
    data = task.dataset("validation")
    batch = task.to_batch(data)  # type: ignore[arg-type]  # a table
    with torch.no_grad():
        outputs = run.load_model()(batch["inputs"])
    return float(task.metrics(outputs, batch)["accuracy"])


def test_wrong_input_is_refused_with_every_problem_and_nothing_is_made(config: Path, tmp_path: Path) -> None:
    wrong = ["search.parallel=0", "search.method.type=rondom"]
    done = orchestray_here("search", config, *wrong, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(f"{config}: search.method.type: must be one of ")
    assert done.stderr.splitlines()[1] == f"{config}: search.parallel: must be >= 1, got 0"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_search_whose_every_trial_fails_exits_1_with_the_first_error(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FAILING)
    base = f"base.task={{type: '{tmp_path / 'mine.py'}:Mine'}}"
    two = "search.budget.trials=2"
    done = orchestray_here("search", config, base, two, "--runs-dir", tmp_path / "runs", "--quiet")
    assert done.returncode == 1, done.stderr
    assert "this column is no number" in done.stderr
    assert "Traceback" not in done.stderr
    result = load_search(tmp_path / "runs" / "small").result
    assert (result["status"], result["best"]) == ("failed", None)
    assert "this column is no number" in result["error"]
    lines = read_lines(tmp_path / "runs" / "small" / "trials.jsonl")
    assert [line["status"] for line in lines] == ["failed"] * 2


def test_an_objective_that_no_trial_reports_is_refused_before_anything_is_written(config: Path, tmp_path: Path) -> None:
    override = "search.objective.metric=acuracy"
    done = orchestray_here("search", config, override, "--runs-dir", tmp_path / "runs", "--quiet")
    assert done.returncode == 2, done.stderr
    assert "the task has no metric 'acuracy'; did you mean 'accuracy'?" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_validate_takes_searches_beside_trainings_and_prints_their_schema(config: Path) -> None:
    train = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
    done = orchestray_here("validate", config, train)
    assert done.stdout.splitlines() == [
        f"{config}: ok (random over 2 keys of digits for accuracy (max), 3 trials of 23 steps)",
        f"{train}: ok (digits, 20 epochs of sgd in batches of 64, 2 workers)",
    ]
    assert set(json.loads(orchestray_here("validate", "--schema", "search").stdout)["required"]) == {"base", "search"}
    wrong = orchestray_here("validate", config, "search.architecture={space: chian}")
    assert wrong.returncode == 2
    assert f"{config}: search.architecture.space: there is no space 'chian' (did you mean 'chain'?)" in wrong.stderr


def test_an_interrupted_search_exits_130_and_goes_on_without_repeating_a_trial(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    runs, path = tmp_path / "runs", tmp_path / "runs" / "small"
    slowed, slow = slowly(tmp_path, quick=23)  # all of the first trial
    more = [f"base.{override}" for override in slowed]
    running = Running(["search", config, *more, "--runs-dir", runs], path, env=beside(cluster))
    running.until("a trial has ended", lambda: read_lines(path / "trials.jsonl"))
    running.signal(signal.SIGINT)
    status, _, stderr = running.finish()
    slow.unlink()
    assert status == 130, stderr
    assert "Traceback" not in stderr
    before = read_lines(path / "trials.jsonl")
    assert json.loads((path / "result.json").read_text())["status"] == "interrupted"
    assert (path / "report.html").is_file()

    done = orchestray_here("search", config, *more, "--runs-dir", runs, "--resume", "--quiet")
    assert done.returncode == 0, done.stderr
    lines = read_lines(path / "trials.jsonl")
    assert lines[: len(before)] == before
    assert sorted(line["trial"] for line in lines) == [0, 1, 2]
