"""A search in virtual time: a method, a function that says how a trial scores, and workers that are only counted."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestray.search.methods.base import Continue, Decision, Exploit, Finished, Method, Pause, Proposal, Report, Stop


@dataclass
class SimulatedTrial:
    """Outcome of a trial."""

    proposal: Proposal
    status: str = "running"
    step: int = 0
    score: float | None = None
    """The best it has reported."""
    reports: list[tuple[int, float]] = field(default_factory=list)
    began_s: float = 0.0
    """Virtual time at which the trial first had a worker."""
    ended_s: float | None = None
    """None: it has not ended."""


@dataclass(frozen=True)
class Call:
    """A call of a method."""

    name: str
    """`ask`, `report`, `tell` or `released`."""
    argument: Report | Finished | None
    answer: Any

    def made_to(self, method: Method) -> Any:
        """Make the call to a method, and return its answer."""
        if self.name == "ask":
            return method.ask()
        if self.name == "released":
            return list(method.released())
        return getattr(method, self.name)(self.argument)


@dataclass
class Simulated:
    """Outcome of a search."""

    trials: dict[int, SimulatedTrial] = field(default_factory=dict)
    makespan_s: float = 0.0
    busy_s: float = 0.0
    """Sum over all workers."""
    steps: int = 0
    """Sum over all trials."""
    calls: list[Call] = field(default_factory=list)
    """Journal of the method: its calls and answers, in order."""

    @property
    def best(self) -> SimulatedTrial:
        return max(
            (trial for trial in self.trials.values() if trial.score is not None),
            key=lambda trial: float("-inf") if trial.score is None else trial.score,
        )

    def best_so_far(self) -> list[float]:
        """Return the best score after each trial, in the order they were proposed."""
        best, curve = float("-inf"), []
        for trial in self.trials.values():
            best = max(best, trial.score if trial.score is not None else float("-inf"))
            curve.append(best)
        return curve


Evaluate = Callable[[Proposal, int], float]
"""The score of a trial that has been trained for this number of steps."""
Reports = Callable[[Proposal, int], Mapping[str, Any]]
"""Report of a trial's program to its method, after this number of steps."""


def simulate(
    method: Method,
    evaluate: Evaluate,
    *,
    workers: int = 1,
    seconds_per_step: Callable[[Proposal], float] = lambda _proposal: 1.0,
    steps_per_trial: int | None = None,
    on_become: Callable[[int, Exploit], None] | None = None,
    reports: Reports = lambda _proposal, _step: {},
    time_limit_s: float | None = None,
) -> Simulated:
    """Run a search to its end.

    Args:
        method: what is asked.
        evaluate: how a trial scores; an exception makes the trial fail.
        workers: trials at once.
        seconds_per_step: how long a step of a trial takes, in virtual time.
        steps_per_trial: default: the method's.
        on_become: called when a trial takes another's state.
        reports: what the program of a trial reports, where it has one of its own.
        time_limit_s: virtual time after which no trial continues: those under way do not end; None: there is none.
    """
    simulation = _Simulation(method, evaluate, workers, seconds_per_step, steps_per_trial, on_become, reports)
    return simulation.run(float("inf") if time_limit_s is None else time_limit_s)


class _Simulation:
    def __init__(
        self,
        method: Method,
        evaluate: Evaluate,
        workers: int,
        seconds_per_step: Callable[[Proposal], float],
        steps_per_trial: int | None,
        on_become: Callable[[int, Exploit], None] | None,
        reports: Reports,
    ) -> None:
        self.method, self.evaluate, self.workers, self.reports = method, evaluate, workers, reports
        self.seconds_per_step, self.on_become = seconds_per_step, on_become
        self.steps_per_trial = steps_per_trial or method.steps_per_trial
        self.result = Simulated()
        self.now_s = 0.0
        self.events: list[tuple[float, int, int, int]] = []
        """(time, order, trial, step it is at then)."""
        self.order = 0
        self.ready: list[int] = []
        """Trials that were held and may go on."""
        self.held: set[int] = set()
        self.free = workers

    def run(self, limit_s: float) -> Simulated:
        while True:
            self._fill()
            if not self.events:
                break
            at_s, _, trial, step = heapq.heappop(self.events)
            if at_s > limit_s:
                self.now_s = limit_s
                self.result.busy_s -= sum(ends_s - limit_s for ends_s, *_ in [*self.events, (at_s,)])
                break
            self.now_s = at_s
            self.free += 1
            self._at(trial, step)
            while decisions := self._call("released"):
                for waiting, decision in decisions:
                    self.held.remove(waiting)
                    self._act(waiting, decision)
        self.result.makespan_s = self.now_s
        return self.result

    def _fill(self) -> None:
        while self.free:
            if self.ready:
                self._start(self.ready.pop(0))
                continue
            proposal = None if self.method.is_done else self._call("ask")
            if proposal is None:
                return
            self.result.trials[proposal.trial] = SimulatedTrial(proposal, began_s=self.now_s)
            self._start(proposal.trial)

    def _budget(self, trial: int) -> int:
        steps = self.result.trials[trial].proposal.steps
        return self.steps_per_trial if steps is None else steps

    def _start(self, trial: int) -> None:
        known = self.result.trials[trial]
        step = min(max(self.method.next_report(trial, known.step), known.step), self._budget(trial))
        lasts_s = (step - known.step) * self.seconds_per_step(known.proposal)
        self.result.busy_s += lasts_s
        self.result.steps += step - known.step
        self.free -= 1
        self.order += 1
        heapq.heappush(self.events, (self.now_s + lasts_s, self.order, trial, step))

    def _at(self, trial: int, step: int) -> None:
        known = self.result.trials[trial]
        known.step = step
        try:
            score = self.evaluate(known.proposal, step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the trial has failed, and the search goes on
            self._end(trial, "failed", error=f"{type(error).__name__}: {error}")
            return
        known.reports.append((step, score))
        known.score = score if known.score is None else max(known.score, score)
        self._act(trial, self._call("report", Report(trial, step, score, told=self.reports(known.proposal, step))))

    def _act(self, trial: int, decision: Decision) -> None:
        known = self.result.trials[trial]
        match decision:
            case Stop():
                self._end(trial, "stopped")
                return
            case Pause():
                self.held.add(trial)
                return
            case Exploit():
                if self.on_become is not None:
                    self.on_become(trial, decision)
                known.step = self.result.trials[decision.source].step  # its position comes with its state
                known.proposal = replace(known.proposal, changes=decision.changes, parent=decision.source)
            case Continue():
                pass
        if known.step >= self._budget(trial):
            self._end(trial, "succeeded")
        else:
            self.ready.append(trial)

    def _end(self, trial: int, status: str, error: str | None = None) -> None:
        known = self.result.trials[trial]
        known.status, known.ended_s = status, self.now_s
        self._call("tell", Finished(trial, status, known.step, known.score, error=error))

    def _call(self, name: str, argument: Report | Finished | None = None) -> Any:
        call = Call(name, argument, None)
        answer = call.made_to(self.method)
        self.result.calls.append(replace(call, answer=answer))
        return answer
