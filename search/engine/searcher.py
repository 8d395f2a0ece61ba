"""Any method of search as an ordinary Ray Tune searcher, for a user's own `tune.Tuner` and trainable."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.tune.search.searcher import Searcher

from orchestray.platform.errors import ConfigError
from orchestray.search.engine.director import Director, MemoryJournal, end_of
from orchestray.search.engine.objective import Objective
from orchestray.search.methods.base import Continue, Decision, Method, Proposal, Report, Wait
from orchestray.search.methods.registry import METHODS, make_method

if TYPE_CHECKING:
    from orchestray.search.spaces.base import ArchitectureSpace
    from orchestray.search.spaces.dimensions import Dimension

INHERITS = "inherits"
"""Key of a trial's config: the path of the checkpoint it starts from."""


class MethodSearcher(Searcher):
    """Proposes what a method proposes; with a `MethodScheduler` beside it, the method's decisions are followed, too.

    Each trial's config has the keys of the space (and `genome`, where architectures are searched; and `inherits`, where
    a trial is to start from the weights of another: the path of the checkpoint that the other left at its end).
    """

    def __init__(self, make: Callable[[], Method], *, metric: str, mode: str = "max", time: str) -> None:
        """
        Args:
            make: makes the method as it begins; called again when Tune restores an experiment.
            metric: that trials report.
            mode: `max` or `min`.
            time: what trials report that counts as a method's steps.

        Raises:
            ConfigError: the method trains a program of its own.
        """
        super().__init__(metric=metric, mode=mode)
        self.time = time
        self.objective = Objective(metric, mode)
        self.journal = MemoryJournal()
        self.director = Director(make(), self.journal)
        if self.director.method.has_program:
            instead = "another method"
            packed = ""
            if self.name == "population_based_training":
                instead, packed = "packed=False", " with packed: true"
            raise ConfigError(
                f"{self.name}{packed} trains all its candidates by itself, as one program, so it cannot propose "
                f"configs to a trainable of yours: run it by `orchestray search`, or take {instead}"
            )
        self.numbers: dict[str, int] = {}
        """Of each of Tune's trials its number."""
        self.checkpoints: dict[int, str] = {}
        """Of each trial that has ended the path of its last checkpoint, as far as a scheduler was told of one."""
        self.followed: dict[int, int] = {}
        """How often a scheduler has had each trial become another, or change: a decision may be saved before that."""
        self.is_scheduled = False
        """Whether a scheduler hears the reports."""
        self.num_asked = 0
        """How often Tune has asked for a trial."""
        self._make = make

    def __getstate__(self) -> dict[str, Any]:
        """A method is made again by its journal: it may hold what cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "director"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.director = Director(self._make(), self.journal)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Refuses another metric than its own."""
        return (metric in (None, self._metric)) and (mode in (None, self._mode))

    @property
    def name(self) -> str:
        """Of the method, as `tune_searcher` takes it; of one that is not among those, its class's."""
        class_name = type(self.director.method).__name__
        return next((name for name, made in METHODS.items() if made.endswith(f":{class_name}")), class_name)

    def suggest(self, trial_id: str) -> Any:
        """The config of a trial; None if there is none now, `Searcher.FINISHED` if there will be none.

        Raises:
            ConfigError: the method hands the states of trials on, and there is no scheduler to do it, or no checkpoint.
        """
        self.num_asked += 1
        if self.director.method.hands_on and not self.is_scheduled:
            raise ConfigError(
                f"{self.name} has trials take the states of others, which nobody does here; give the TuneConfig "
                "scheduler=tune_scheduler(searcher), too"
            )
        proposal = self.director.ask()
        if proposal is None:
            return Searcher.FINISHED if self.director.is_done else None
        self.numbers[trial_id] = proposal.trial
        genome = {} if proposal.genome is None else {"genome": proposal.genome}
        return {**proposal.changes, **genome, **self._inherited(proposal)}

    def _inherited(self, proposal: Proposal) -> dict[str, str]:
        """The key by which a trial finds the weights it is to start from; none where it starts afresh."""
        if not proposal.inherits or proposal.parent is None:
            return {}
        if proposal.parent not in self.checkpoints:
            raise ConfigError(
                f"Trial {proposal.trial} is to start from the weights of trial {proposal.parent}, which has left no "
                "checkpoint: have the trainable report one at its end (save_checkpoint of a class, tune.report(..., "
                "checkpoint=...) of a function), or begin all trials afresh: tune_searcher(..., inherit_weights=False)"
            )
        return {INHERITS: self.checkpoints[proposal.parent]}

    def hear(self, trial_id: str, result: Mapping[str, Any]) -> Decision | None:
        """Report to the method what is due to it; None where nothing is.

        Raises:
            ConfigError: the result lacks the metric or the time, or the method decides what nobody carries out.
        """
        number = self.numbers[trial_id]
        standing = self.director.trials[number]
        for name in (self.objective.metric, self.time):
            if name not in result:
                raise ConfigError(f"the trials report no {name!r}; they report {', '.join(sorted(result))}")
        step = int(result[self.time])
        if standing.ended is not None or step <= standing.step or step < self.director.next_report(number):
            return None
        score = self.objective.score(float(result[self.objective.metric]))
        decision = self.director.report(Report(number, step, score, (score,)))
        is_at_end = end_of(self.director, number) == ("succeeded", None)
        if not (self.is_scheduled or is_at_end or isinstance(decision, Continue)):
            raise ConfigError(
                f"{self.name} stops or holds trials on their way, which nobody does here; give the TuneConfig "
                "scheduler=tune_scheduler(searcher), too"
            )
        return decision

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if not self.is_scheduled:
            self.hear(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        number = self.numbers.get(trial_id)
        if number is None or self.director.trials[number].ended is not None:
            return
        if result is not None and not error and self.objective.metric in result and self.time in result:
            self._last(trial_id, result)
        status = "failed" if error else (end_of(self.director, number) or ("succeeded", None))[0]
        self.director.tell(number, status, error="the trial failed" if error else None)

    def _last(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """What a trial has reached at its end is told, even where no report was due."""
        number = self.numbers[trial_id]
        step = int(result[self.time])
        standing = self.director.trials[number]
        if step > standing.step and not isinstance(standing.decision, Wait):
            score = self.objective.score(float(result[self.objective.metric]))
            self.director.report(Report(number, step, score, (score,)))

    def save(self, checkpoint_path: str) -> None:
        saved = {
            "journal": self.journal.entries(),
            "numbers": self.numbers,
            "checkpoints": list(self.checkpoints.items()),  # the keys of a JSON object would be strings
            "followed": list(self.followed.items()),
        }
        Path(checkpoint_path).write_text(json.dumps(saved, default=float), encoding="utf-8")

    def restore(self, checkpoint_path: str) -> None:
        saved = json.loads(Path(checkpoint_path).read_text(encoding="utf-8"))
        self.journal = MemoryJournal(saved["journal"])
        self.director = Director(self._make(), self.journal)
        self.numbers = {str(trial): int(number) for trial, number in saved["numbers"].items()}
        self.checkpoints = {int(trial): str(path) for trial, path in saved["checkpoints"]}
        self.followed = {int(trial): int(times) for trial, times in saved["followed"]}


class MakeMethod:
    """Makes a method by its name; can be pickled, as Tune pickles its searchers."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name, self._arguments = name, dict(arguments)

    def __call__(self) -> Method:
        return make_method(self._name, **self._arguments)


def tune_searcher(
    type: str,  # noqa: A002 - the config's own word
    space: Mapping[str, Dimension],
    *,
    metric: str,
    mode: str = "max",
    architecture: ArchitectureSpace | None = None,
    trials: int | None = None,
    steps_per_trial: int = 1,
    time: str = "training_iteration",
    seed: int = 0,
    **parameters: Any,
) -> MethodSearcher:
    """A method of search as a Ray Tune searcher.

    For example, where `train` is a function that calls `tune.report({"accuracy": ...})`:

        searcher = tune_searcher("bayesian", {"lr": make_dimension("log_uniform", low=1e-4, high=1)}, metric="accuracy",
                                 trials=20)
        tune.Tuner(train, tune_config=tune.TuneConfig(search_alg=searcher, num_samples=20)).fit()

    For methods that stop, hold or change trials add `scheduler=tune_scheduler(searcher)`. Where they hold trials until
    others have come as far, leave out `max_concurrent_trials`, by which Tune counts those that are held, too.

    Args:
        type: a name as in `search.method.type`.
        space: dimension of each key of the trials' config.
        metric: that the trials report.
        mode: `max` or `min`.
        architecture: the space of networks; its genome is the config's `genome`.
        trials: how many there may be; say the same as `num_samples`, or there -1: as many as the method proposes, one
            in place of a failed member of a population, too.
        steps_per_trial: at how much of `time` a trial is at its end.
        time: what trials report that counts as steps.
        seed: of everything that is drawn.
        parameters: the method's own.

    Raises:
        ConfigError: there is no such method, it cannot search this space, or it trains a program of its own (`enas`,
            `darts`, `smash`, a population with `packed`): that is for `orchestray search`.
    """
    arguments = {
        "space": space,
        "architecture": architecture,
        "seed": seed,
        "trials": trials,
        "steps_per_trial": steps_per_trial,
        **parameters,
    }
    return MethodSearcher(MakeMethod(type, arguments), metric=metric, mode=mode, time=time)
