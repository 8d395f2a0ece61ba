"""A scheduler in a restored experiment, whose files a kill may have left at different states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial

from orchestray.search import tune_scheduler, tune_searcher
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.tune.searcher import MethodSearcher


class Asking:
    """The state of Tune's requests for trials, which it keeps in a file."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"counter": 2, "finished": True, "total_samples": 3}

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


def searcher() -> MethodSearcher:
    space = {"lr": make_dimension("choice", values=[0.05, 0.1, 0.2])}
    return tune_searcher("asha", space, metric="accuracy", trials=3, steps_per_trial=24, grace_steps=8)


def test_trials_that_only_a_newer_file_had_counted_are_asked_for_again(tmp_path: Path) -> None:
    before = searcher()
    before.is_scheduled = True
    config = before.suggest("first")
    before.save(str(tmp_path / "saved"))
    restored = searcher()
    scheduler = tune_scheduler(restored)
    restored.restore(str(tmp_path / "saved"))
    first: Any = SimpleNamespace(trial_id="first", config=config, status=Trial.PENDING)
    asking = Asking()
    scheduler.on_trial_add(SimpleNamespace(search_alg=asking, get_trials=lambda: [first]), first)
    assert asking.state == {"counter": 1, "finished": False, "total_samples": 3}
    assert restored.suggest("second") not in (None, "FINISHED")
