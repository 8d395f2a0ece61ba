"""The end of a search: whether the run of its best is written."""

from __future__ import annotations

import threading
from pathlib import Path

from orchestray.search.config.load import load_search_config
from orchestray.search.engine.run import _finish
from orchestray.search.results.writer import SearchRecords
from support.search_loop import base, begin, loop_of


def test_a_best_that_has_to_be_trained_again_is_left_to_the_next_attempt_where_the_search_is_stopped(
    tmp_path: Path,
) -> None:
    space = {"train.optimizer.lr": {"type": "choice", "values": [0.1]}}
    search = {"method": {"type": "grid"}, "objective": {"metric": "accuracy"}, "space": space}
    config = load_search_config({"name": "stopped", "base": base(), "search": search})
    stop = threading.Event()
    stop.set()
    with SearchRecords.create(tmp_path, "stopped") as records:
        loop_of(config, records).run().close()
        for file in records.paths.trial_states.iterdir():
            file.write_bytes(b"")
        again = loop_of(config, records)
        again.close()
        ends = [again.conductor, records, again.rules]
        assert _finish(*ends, stop, is_stopped=False).status == "interrupted"
        assert not records.paths.best.exists()
        assert _finish(*ends, None, is_stopped=False).status == "succeeded"
        assert (records.paths.best / "model").is_dir()


def test_a_time_limit_that_passes_before_any_report_is_a_failure_that_says_what_to_change(tmp_path: Path) -> None:
    space = {"train.optimizer.lr": {"type": "choice", "values": [0.1, 0.2]}}
    search = {"method": {"type": "grid"}, "objective": {"metric": "accuracy"}, "space": space}
    config = load_search_config({"name": "short", "base": base(), "search": search})
    with SearchRecords.create(tmp_path, "short") as records:
        loop = loop_of(config, records)
        loop.close()
        assert begin(loop.conductor) is not None
        loop.conductor.suspend()
        ended = _finish(loop.conductor, records, loop.rules, None, is_stopped=False)
        assert ended.status == "failed"
        for advice in ("search.budget.time_limit_s", "search.budget.steps_per_trial", "asha"):
            assert advice in (ended.error or "")
        assert _finish(loop.conductor, records, loop.rules, None, is_stopped=True).status == "interrupted"
    with SearchRecords.create(tmp_path, "enough") as records:
        loop = loop_of(config, records)
        while not records.lines:
            assert loop.step()
        loop.conductor.suspend()
        ended = _finish(loop.conductor, records, loop.rules, None, is_stopped=False)
        loop.close()
        assert (ended.status, ended.best) == ("succeeded", 0)
        assert (records.paths.best / "model").is_dir()
