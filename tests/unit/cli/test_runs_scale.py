"""`orchestray runs scale` as a user types it, where no run is under way; and what it prints."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestray.cli import runs_scale
from orchestray.platform.errors import ConfigError, OrchestrayError, RunNameError
from orchestray.platform.run.directory import RunDirectory
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.driver.runlog.scale_requests import ScaleRequests
from support.cli import orchestray_here as orchestray
from support.patience import PATIENCE_S

CONFIG: dict[str, Any] = {
    "name": "digits",
    "task": {"type": "digits"},
    "train": {"batch_size": 16, "epochs": 2, "optimizer": {"type": "sgd", "lr": 0.1}},
    "strategy": {"network": {"data": 2}},
}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with RunDirectory.create(tmp_path, "digits") as directory:
        directory.write_config(dump_yaml(load_train_config(CONFIG)))
        yield directory


def refused(run: RunDirectory, **more: Any) -> OrchestrayError:
    with pytest.raises(OrchestrayError) as caught:
        runs_scale.scale_command("digits", **{"data": 3, "runs_dir": run.path.parent, "timeout_s": 0.0, **more})
    return caught.value


def test_the_help_has_a_worked_example() -> None:
    done = orchestray("runs", "scale", "--help")
    assert done.returncode == 0
    assert "orchestray runs scale digits --data 4" in done.stdout


def test_an_unknown_name_is_a_sentence_and_status_2(tmp_path: Path) -> None:
    done = orchestray("runs", "scale", "nothing", "--data", "2", "--runs-dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("there is no run in")


def test_a_run_that_is_over_says_how_to_go_on_with_it(run: RunDirectory) -> None:
    run.close()
    error = refused(run)
    assert error.exit_status == 1
    assert "Run 'digits' is not under way: no process writes it any more." in str(error)
    assert f"orchestray train {run.path}/config.yaml strategy.network.data=3 --resume" in str(error)
    run.write_result({"status": "succeeded"})
    assert "it has succeeded" in str(refused(run))


@pytest.mark.parametrize(("data", "text"), [(0, "--data must be 1 or more, got 0"), (2, "has data: 2 already")])
def test_a_number_that_makes_no_sense_is_refused_with_status_2(run: RunDirectory, data: int, text: str) -> None:
    error = refused(run, data=data)
    assert isinstance(error, ConfigError)
    assert text in str(error)
    assert not (run.path / ".requests").exists()


def test_a_run_without_a_directory_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNameError):
        runs_scale.scale_command("digits", data=2, runs_dir=tmp_path)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_change_is_told_in_one_line(run: RunDirectory, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    desk, asked = ScaleRequests(run), threading.Event()

    def answer() -> None:
        while desk.look() is None:
            asked.wait(0.01)
        desk.done(120)

    driver = threading.Thread(target=answer)
    driver.start()
    runs_scale.scale_command("digits", data=4, runs_dir=run.path.parent, timeout_s=PATIENCE_S, as_json=as_json)
    driver.join()
    told = capsys.readouterr().out
    if as_json:
        answered = {"before": 2, "after": 4, "workers_before": 2, "workers_after": 4, "step": 120}
        assert json.loads(told) == {"name": "digits", **answered}
    else:
        assert told == "digits: 2 -> 4 workers at step 120\n"


def test_copies_of_a_network_that_is_laid_out_over_workers_are_told_too() -> None:
    answer = {"before": 1, "after": 2, "workers_before": 4, "workers_after": 8, "step": 7}
    assert runs_scale._sentence("big", answer) == "big: 4 -> 8 workers at step 7 (data: 1 -> 2)"
