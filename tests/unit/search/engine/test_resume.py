"""A search that was killed, stopped or given more is what it would have been: states, scores, records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.search.checkpoints.state_files import StateAt, StateFiles
from orchestray.search.checkpoints.states import BestCheckpoint
from orchestray.search.engine.session import MemoryJournal
from orchestray.search.methods.base import Exploit, Method, Pause
from orchestray.search.registry.methods import make_method
from orchestray.search.results.schema import OUT_OF_TIME
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.trainers.config.load import load_train_config
from support.search_loop import Loop, base, begin
from support.tiny_task import TinyTask
from unit.search.engine.test_controller import Scripted

LR = "train.optimizer.lr"
SPACE = {LR: make_dimension("log_uniform", low=1e-3, high=3.0)}


def population(**arguments: Any) -> Method:
    common = {"population": 4, "trials": 8, "steps_per_trial": 12, "interval_steps": 3, "synchronous": True}
    return make_method("population_based_training", space=SPACE, seed=3, fraction=0.5, **{**common, **arguments})


def told(loop: Loop) -> dict[tuple[int, int], dict[str, float]]:
    """Return the metrics of every report of a search; where a step was reported twice, the last are taken."""
    return {(trial, step): metrics for trial, step, metrics in loop.records.reports}


@pytest.mark.parametrize("killed_after", [3, 8, 13])
def test_a_synchronous_population_that_was_killed_ends_as_if_it_had_not_been(loops: Any, killed_after: int) -> None:
    whole = loops(population(), "whole", parallel=2).run()
    assert any(parent is not None for _, parent, _, _ in whole.records.nodes)
    first = loops(population(), parallel=2)
    for _ in range(killed_after):
        first.step()
    first.close()
    second = loops(population(), parallel=3, journal=MemoryJournal(first.journal.entries()), records=first.records)
    second.run()
    assert told(second) == told(whole)
    assert set(second.records.nodes) == set(whole.records.nodes)
    for trial, line in whole.records.lines.items():
        assert {**second.records.lines[trial], "seconds": 0} == {**line, "seconds": 0}
    best, again = whole.conductor.best(), second.conductor.best()
    assert again == best
    states = [one.files.read(best.at) for one in (whole, second)]
    for name, tensor in states[0].tensors.items():
        assert torch.equal(states[1].tensors[name], tensor), name


def test_a_process_that_dies_changes_nothing_of_a_population(loops: Any) -> None:
    whole = loops(population(), "whole", parallel=2).run()
    loop = loops(population(), parallel=2)
    for number in range(9):
        loop.step()
        if number in (2, 6) and loop.orders:
            lost = next(iter(loop.orders))
            loop.renew(lost)
    loop.run()
    assert told(loop) == told(whole)


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_who_is_copied_while_it_copies_a_third_is_copied_as_it_was(loops: Any, parallel: int) -> None:
    """Let all wait at step 2; then 2 becomes 1, and 1 becomes 0, whichever goes on first."""
    script = {(trial, 2): Pause() for trial in range(3)}
    method = Scripted(dict(script))
    chain = [(2, Exploit(1, {LR: 0.2}, "as 1")), (1, Exploit(0, {LR: 0.4}, "as 0"))]
    method.released = lambda: _all_at_once(method, chain)  # type: ignore[method-assign]
    loop = loops(method, parallel=parallel)
    taken: dict[int, Any] = {}
    for host in loop.hosts:
        read = host._files.read

        def watched(at: StateAt, read: Any = read, host: Any = host) -> Any:
            taken.setdefault(host._trial, []).append(((at.trial, at.report), read(at)))
            return taken[host._trial][-1][1]

        host._files.read = watched
    loop.run()
    plain = loops(Scripted(dict(script) | {(1, 4): Pause(), (2, 4): Pause()}), "plain", parallel=3)
    while len(plain.records.reports) < 3:
        plain.step()
    (at, copied), *_ = [found for found in taken[2] if found[0][0] == 1]
    assert at == (1, 1)
    expected = plain.files.read(StateAt(1, 1))
    for name, tensor in expected.tensors.items():
        assert torch.equal(copied.tensors[name], tensor), name


def _all_at_once(method: Scripted, chain: list[tuple[int, Exploit]]) -> list[tuple[int, Any]]:
    if len(method.waiting) < 3:
        return []
    method.waiting.clear()
    from orchestray.search.methods.base import Continue

    return [*chain, (0, Continue())]


def test_the_best_run_has_the_hyper_parameters_of_its_best_report(loops: Any, tmp_path: Path) -> None:
    method = Scripted({(0, 2): Exploit(0, {LR: 1e-7}, "own"), (1, 2): Exploit(1, {LR: 1e-7}, "own")})
    loop = loops(method, parallel=3)
    worsen(loop)
    loop.run()
    kept = loop.conductor.best()
    assert kept.step == 2
    order = loop.conductor.order_for_best(kept)
    assert order.config.train.optimizer.lr == [0.01, 0.03, 0.1][kept.trial]
    line = loop.records.lines[kept.trial]
    assert line.get("best_config", line["config"]) == {LR: order.config.train.optimizer.lr}


def worsen(loop: Loop) -> None:
    """Have every later report be worse."""
    for host in loop.hosts:
        work = host.work

        def worse(order: Any, work: Any = work) -> Any:
            told = work(order)
            return replace(told, metrics={**told.metrics, "accuracy": 1.0 / (1 + told.step)})

        host.work = worse  # type: ignore[method-assign]


def test_trials_that_the_searchs_time_limit_stopped_go_on_with_more(loops: Any) -> None:
    grid = {"space": {LR: make_dimension("choice", values=[0.01, 0.1, 0.3])}, "steps_per_trial": 6}
    whole = loops(make_method("grid", **grid), "whole", parallel=2).run()
    first = loops(make_method("grid", **grid), parallel=2)
    first.step()
    first.conductor.suspend()
    stopped = [trial for trial, line in first.records.lines.items() if line.get("reason") == OUT_OF_TIME]
    assert stopped
    second = loops(
        make_method("grid", **grid),
        parallel=2,
        journal=MemoryJournal(first.journal.entries()),
        records=first.records,
    )
    assert not set(stopped) & set(second.records.lines)
    second.run()
    assert {t: (line["status"], line["objective"]) for t, line in second.records.lines.items()} == {
        t: (line["status"], line["objective"]) for t, line in whole.records.lines.items()
    }


def test_an_end_that_was_recorded_before_the_search_was_killed_is_recorded_again_as_it_comes_then(loops: Any) -> None:
    grid = {"space": {LR: make_dimension("choice", values=[0.01, 0.1])}, "steps_per_trial": 6}
    first = loops(make_method("grid", **grid))
    begun = begin(first.conductor)
    assert begun is not None
    first.conductor.receive(replace(first.hosts[0].work(begun), error="its machine had no memory left"))
    first.close()
    assert first.records.lines[0]["status"] == "failed"
    [*calls, last] = first.journal.entries()
    assert last["call"] == "tell"
    second = loops(make_method("grid", **grid), journal=MemoryJournal(calls), records=first.records).run()
    assert {trial: line["status"] for trial, line in second.records.lines.items()} == {0: "succeeded", 1: "succeeded"}


def test_a_search_given_more_trials_remembers_its_best(loops: Any) -> None:
    def grid(trials: int) -> Method:
        return make_method("random", space=SPACE, steps_per_trial=4, trials=trials, seed=1)

    first = loops(grid(3)).run()
    best = first.conductor.best()
    first.files.clear([best.at])
    second = loops(grid(4), journal=MemoryJournal(first.journal.entries()), records=first.records).run()
    scores = [line["objective"] for line in second.records.lines.values()]
    assert len(scores) == 4
    assert second.conductor.best().score == max(scores)


@pytest.mark.parametrize("num_damaged", [1, 3])
def test_where_the_state_of_the_best_is_damaged_it_is_trained_again_to_the_same(
    loops: Any, tmp_path: Path, num_damaged: int
) -> None:
    def random() -> Method:
        return make_method("random", space=SPACE, steps_per_trial=4, trials=5, seed=1)

    first = loops(random()).run()
    best = first.conductor.best()
    first.hosts[0].leave_run(first.conductor.order_for_best(best), str(tmp_path / "best"))
    ranked = sorted(first.records.lines.values(), key=lambda line: (-line["objective"], line["trial"]))
    assert ranked[0]["trial"] == best.trial
    for line in ranked[:num_damaged]:
        (report,) = first.files.reports()[line["trial"]]
        first.files.path(StateAt(line["trial"], report)).write_bytes(b"")
    again = loops(random(), journal=MemoryJournal(first.journal.entries()), records=first.records)
    assert best_of(again) == best
    assert best_of(again).is_lost
    told = again.hosts[0].leave_run(again.conductor.order_for_best(best_of(again)), str(tmp_path / "again"))
    assert told.error is None
    assert model_file(tmp_path / "again").read_bytes() == model_file(tmp_path / "best").read_bytes()


def test_a_state_that_is_found_damaged_when_it_is_read_is_trained_again_to_the_same(loops: Any, tmp_path: Path) -> None:
    loop = loops(make_method("random", space=SPACE, steps_per_trial=4, trials=2, seed=1)).run()
    order = loop.conductor.order_for_best(best_of(loop))
    loop.hosts[0].leave_run(order, str(tmp_path / "best"))
    loop.files.path(best_of(loop).at).write_bytes(b"")
    assert loop.hosts[0].leave_run(order, str(tmp_path / "again")).error is None
    assert model_file(tmp_path / "again").read_bytes() == model_file(tmp_path / "best").read_bytes()


def test_of_a_population_whose_best_state_is_damaged_the_next_best_is_the_best(loops: Any) -> None:
    first = loops(population(), parallel=2).run()
    best = best_of(first)
    first.files.path(best.at).write_bytes(b"")
    again = loops(population(), parallel=2, journal=MemoryJournal(first.journal.entries()), records=first.records)
    assert best_of(again).trial != best.trial
    assert again.files.is_whole(best_of(again).at)
    assert not best_of(again).is_lost


def best_of(loop: Any) -> BestCheckpoint:
    kept = loop.conductor.best()
    assert isinstance(kept, BestCheckpoint)
    return kept


def model_file(run: Path) -> Path:
    return run / "model" / "model.safetensors"


class Killed(BaseException):
    """Death of the process of a trial."""


class Mortal(TinyTask):
    """A task whose process dies once a state of its trial is in the folder; without a folder it lives."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self._folder = folder

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._folder and StateFiles(self._folder).on_the_way(0):
            raise Killed
        return super().loss(outputs, batch)


def mortal(folder: str = "") -> Any:
    def make(changes: Any, genome: Any, steps: int, trial: int) -> Any:
        train = base()["train"] | {"steps": steps, "validate_every_steps": 10}
        return load_train_config(base() | {"task": {"type": f"{__name__}:Mortal", "folder": folder}, "train": train})

    return make


def one_report() -> Method:
    return make_method("grid", space={LR: make_dimension("choice", values=[0.1])}, steps_per_trial=60)


def waiting_for_its_files(loop: Loop) -> Loop:
    """Have a trial go on when its state is on disk: it then dies after a few steps, however slow the disk is."""
    host = loop.hosts[0]
    save = host._save_on_the_way

    def saved(trial: int, report: int) -> None:
        save(trial, report)
        assert host._saving is not None
        host._saving.result()

    host._save_on_the_way = saved  # type: ignore[method-assign]
    return loop


def test_a_trial_that_is_saved_on_its_way_comes_to_what_it_would_have(loops: Any) -> None:
    answers = []
    for every_s in (0.0, 1e-4):
        loop = loops(one_report(), f"every-{every_s}", make=mortal(), save_every_s=every_s)
        order = begin(loop.conductor)
        answers.append((loop.hosts[0].work(order), loop.files.read(StateAt(0, 1))))
    (plain, state), (sliced, again) = answers
    assert len(plain.evaluations) == 6
    assert (sliced.step, sliced.metrics, sliced.evaluations) == (60, plain.metrics, plain.evaluations)
    assert {**again.position, "kept": None} == {**state.position, "kept": None}
    assert again.position["kept"]["evaluations"] == state.position["kept"]["evaluations"]
    for name, tensor in state.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name


def test_a_trial_that_reports_at_its_end_alone_goes_on_from_its_way_when_its_process_dies(
    loops: Any, tmp_path: Path
) -> None:
    whole = loops(one_report(), "whole", make=mortal()).run()
    first = waiting_for_its_files(loops(one_report(), make=mortal(str(tmp_path / "states")), save_every_s=1e-4))
    order = begin(first.conductor)
    assert order.until == 60
    with pytest.raises(Killed):
        first.hosts[0].work(order)
    first.close()
    second = loops(one_report(), make=mortal(), journal=MemoryJournal(first.journal.entries()), records=first.records)
    order = begin(second.conductor)
    assert order.source is not None
    position = second.files.read(order.source).position
    used_s = position["kept"]["used_s"]
    assert position["step"] > 0
    told = second.hosts[0].work(order)
    second.conductor.receive(told)
    assert told.seconds > used_s > 0, "the way counts, though no report told of it"
    assert second.records.reports == whole.records.reports
    assert len(told.evaluations) == 6
    assert second.records.lines[0]["objective"] == whole.records.lines[0]["objective"]


class Marked(TinyTask):
    """A task whose process dies at a new step, once a state of the way there is in the folder."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self._folder = folder

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._folder and StateFiles(self._folder).on_the_way(0) == StateAt(0, 2, is_on_the_way=True):
            raise Killed
        return super().loss(outputs, batch)


def test_a_member_of_a_population_goes_on_from_its_way_to_its_next_report(loops: Any, tmp_path: Path) -> None:
    def make(folder: str) -> Any:
        task = {"type": f"{__name__}:Marked", "folder": folder}

        def config(changes: Any, genome: Any, steps: int, trial: int) -> Any:
            return load_train_config(base() | {"task": task, "train": base()["train"] | {"steps": steps}})

        return config

    def one() -> Method:
        return population(population=2, trials=2, steps_per_trial=60, interval_steps=20, synchronous=False)

    whole = loops(one(), "whole", make=make("")).run()
    first = waiting_for_its_files(loops(one(), make=make(str(tmp_path / "states")), save_every_s=1e-4))
    with pytest.raises(Killed):
        first.run()
    first.close()
    second = loops(one(), make=make(""), journal=MemoryJournal(first.journal.entries()), records=first.records)
    order = begin(second.conductor)
    assert (order.trial, order.report) == (0, 2)
    assert order.source == StateAt(0, 2, is_on_the_way=True)
    assert 20 < second.files.read(order.source).position["step"] < 40
    second.conductor.lost(order.trial)
    second.run()
    assert told(second) == told(whole)


def test_a_trial_that_waited_goes_on_from_its_last_report_in_whatever_process_and_after_a_kill(loops: Any) -> None:
    def halving() -> Method:
        return make_method("asha", space=SPACE, seed=1, steps_per_trial=9, trials=9, eta=3, grace_steps=1)

    first = loops(halving(), parallel=2, save_every_s=600.0)
    while not any(task.report > 1 for task in first.begun):
        first.step()
    journal = MemoryJournal(first.journal.entries())
    second = loops(halving(), parallel=2, save_every_s=600.0, journal=journal, records=first.records).run()
    for task in (*first.begun, *second.begun):
        assert task.source == (StateAt(task.trial, task.report - 1) if task.report > 1 else None)
    assert sum(task.report > 1 for task in second.begun) > 2


def test_what_a_trial_has_worked_counts_after_a_resume_towards_its_limit_and_its_line(loops: Any) -> None:
    first = loops(Scripted({}))
    answer = first.hosts[0].work(begin(first.conductor))
    first.conductor.receive(replace(answer, seconds=900.0))
    first.close()
    journal = MemoryJournal(first.journal.entries())
    second = loops(Scripted({}), journal=journal, records=first.records, time_limit_s=1000.0)
    order = begin(second.conductor)
    assert (order.trial, order.used_s) == (0, 900.0)
    second.orders[0] = order
    second.run()
    assert 900 < second.records.lines[0]["seconds"] < 1000
    assert second.records.lines[1]["seconds"] < 900
