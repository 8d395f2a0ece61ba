"""Any search method as an ordinary Ray Tune searcher, for a user's own `tune.Tuner` and trainable."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from ray.tune.search.searcher import Searcher

from orchestray.platform.config.metric_names import mode_of_metric
from orchestray.platform.config.problems import translate
from orchestray.platform.errors import ConfigError
from orchestray.search.engine import tune_faults
from orchestray.search.engine.objective import Objective
from orchestray.search.engine.session import MemoryJournal, MethodSession, end_of
from orchestray.search.methods.base import Continue, Decision, Method, Pause, Proposal, Report
from orchestray.search.registry.methods import METHODS, make_method
from orchestray.search.spaces.dimensions import Dimension

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.base import ArchitectureSpace

INHERITS = "inherits"
"""Key of a trial's config that holds the path of the checkpoint it starts from."""


class MethodSearcher(Searcher):
    """A searcher that passes on a method's proposals; a `MethodScheduler` beside it carries out the decisions.

    Each trial's config has the keys of the space. It also has `genome` where architectures are searched. Where a trial
    starts from the weights of another, `inherits` is the path of the last checkpoint of that other trial.
    """

    def __init__(self, make: Callable[[], Method], *, metric: str, mode: str = "max", time: str) -> None:
        """
        Args:
            make: creates the method in its initial state; called again when Tune restores an experiment.
            metric: metric that the trials report.
            mode: `max` or `min`.
            time: reported key that counts as the method's steps.

        Raises:
            ConfigError: the method trains a program of its own.
        """
        super().__init__(metric=metric, mode=mode)
        tune_faults.mend()
        self.time = time
        self.objective = Objective(metric, mode)
        self.journal = MemoryJournal()
        self.session = MethodSession(make(), self.journal)
        if self.session.method.has_program:
            instead = "another method"
            packed = ""
            if self.name == "population_based_training":
                instead, packed = "packed=False", " with packed: true"
            raise ConfigError(
                f"{self.name}{packed} trains all its candidates by itself, as one program, so it cannot propose "
                f"configs to a trainable of yours: run it by `orchestray search`, or take {instead}"
            )
        self.numbers: dict[str, int] = {}
        """Maps the id of a Tune trial to its number."""
        self.checkpoints: dict[int, str] = {}
        """Maps an ended trial to the path of its last checkpoint, if a scheduler reported one."""
        self.followed: dict[int, int] = {}
        """Maps a trial to the number of exploits a scheduler has carried out; a save may fall between decision and
        exploit.
        """
        self.is_scheduled = False
        """True if a scheduler passes on the reports."""
        self.num_asked = 0
        """Number of times Tune has asked for a trial."""
        self.missing: set[int] = set()
        """Trials of a restored search that Tune has not added again: a kill may fall between its file and ours."""
        self._make = make

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the method, which is rebuilt from its journal: it may hold values that cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tune_faults.mend()  # Tune restores an experiment in another process
        vars(self).update(state)
        self.session = MethodSession(self._make(), self.journal)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Return False: the space is the searcher's own, so that Tune refuses another one in `param_space`.

        Raises:
            ConfigError: see `check_goal`; or it has no trials left to propose, after another Tuner.
        """
        self.check_goal(metric, mode)
        if self.session.is_done:
            raise ConfigError(
                f"the searcher has proposed all its {len(self.session.trials)} trials, to a Tuner before this one: "
                "make another one by tune_searcher"
            )
        return False

    def check_goal(self, metric: str | None, mode: str | None) -> None:
        """Check what a TuneConfig wants against what is searched for.

        Args:
            metric, mode: those of the TuneConfig; None: not given.

        Raises:
            ConfigError: they differ from the searcher's.
        """
        if metric not in (None, self.objective.metric) or mode not in (None, self.objective.mode):
            wanted = ", ".join(f"{name}={each!r}" for name, each in (("metric", metric), ("mode", mode)) if each)
            raise ConfigError(
                f"the TuneConfig has {wanted}, and the searcher metric={self.objective.metric!r}, "
                f"mode={self.objective.mode!r}: give tune_searcher the same"
            )

    @property
    def name(self) -> str:
        """Name of the method, as `tune_searcher` takes it; for an unregistered method, the name of its class."""
        method = type(self.session.method)
        return METHODS.name_of(method) or method.__name__

    def suggest(self, trial_id: str) -> Any:
        """Return the config of a trial; None if none is due now, `Searcher.FINISHED` at the end.

        Raises:
            ConfigError: the method has trials take over states of others, but a scheduler or a checkpoint for that is
                missing.
        """
        self.num_asked += 1
        if self.session.method.hands_on and not self.is_scheduled:
            raise ConfigError(
                f"{self.name} has trials take the states of others, which nobody does here; give the TuneConfig "
                "scheduler=tune_scheduler(searcher), too"
            )
        proposal = self._lost() or self.session.ask()
        if proposal is None:  # Tune remembers FINISHED, and would not ask again for trials that a kill makes it lose
            return Searcher.FINISHED if self.session.is_done and not self.session.live else None
        self.numbers[trial_id] = proposal.trial
        return self._config(proposal)

    def adopt(self, trial_id: str, config: Mapping[str, Any]) -> int | None:
        """Return the number of a trial that Tune has added.

        A kill may fall between the files of Tune and of this searcher. A trial that only Tune knows is then what the
        method proposes next; otherwise return None, and the trial is none of the method's.
        """
        if trial_id not in self.numbers:
            proposal = self.session.ask()
            if proposal is None:
                return None
            if any(config.get(key) != value for key, value in self._config(proposal).items()):  # param_space adds keys
                self.missing.add(proposal.trial)
                return None
            self.numbers[trial_id] = proposal.trial
        self.missing.discard(self.numbers[trial_id])
        return self.numbers[trial_id]

    def _config(self, proposal: Proposal) -> dict[str, Any]:
        genome = {} if proposal.genome is None else {"genome": proposal.genome}
        return {**proposal.changes, **genome, **self._inherited(proposal)}

    def _lost(self) -> Proposal | None:
        """Return a trial that Tune no longer knows, to be trained again; None if there is none.

        If trials take the states of others, it may count as failed instead: its state cannot be trained again.
        """
        while self.missing and self.is_scheduled:
            number = self.missing.pop()
            standing = self.session.trials[number]
            if not (self.session.method.hands_on and standing.num_reports):
                return standing.proposal
            if standing.ended is None:
                self.session.tell(number, "failed", error="Ray Tune was killed before it had stored the trial")
        return None

    def _inherited(self, proposal: Proposal) -> dict[str, str]:
        """Return the config entry with the checkpoint a trial starts from; empty if it starts from scratch."""
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
        """Report a result to the method if a report is due; otherwise return None.

        Raises:
            ConfigError: the result lacks the metric or the time, or the decision needs a scheduler that is missing.
        """
        number = self.numbers[trial_id]
        standing = self.session.trials[number]
        for name in (self.objective.metric, self.time):
            if name not in result:
                raise ConfigError(f"the trials report no {name!r}; they report {', '.join(sorted(result))}")
        step = int(result[self.time])
        if standing.ended is not None or step <= standing.step or step < self.session.next_report(number):
            return None
        decision = self._report(number, step, result)
        is_at_end = end_of(self.session, number) == ("succeeded", None)
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
        if number is None or self.session.trials[number].ended is not None:
            return
        if result is not None and not error and self.objective.metric in result:
            self._last(trial_id, result)
        status = "failed" if error else (end_of(self.session, number) or ("succeeded", None))[0]
        self.session.tell(number, status, error="the trial failed" if error else None)

    def _last(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Report the final result of a trial, even if no report was due.

        Tune's `Repeater` gives the mean of several trials, without a time: it is that of their ends.
        """
        number = self.numbers[trial_id]
        step = max(1, int(result.get(self.time, self.session.budget(number))))  # some count epochs from 0
        standing = self.session.trials[number]
        if step > standing.step and not isinstance(standing.decision, Pause):
            self._report(number, step, result)

    def _report(self, number: int, step: int, result: Mapping[str, Any]) -> Decision:
        """Report a result to the method; NaN and infinities count as the worst there is."""
        value = result[self.objective.metric]
        try:
            score = self.objective.score(float(value))
        except (TypeError, ValueError):
            raise ConfigError(
                f"the trials report {self.objective.metric!r} as {value!r}: it must be a number, NaN for one that has "
                "failed"
            ) from None
        score = score if math.isfinite(score) else -math.inf
        return self.session.report(Report(number, step, score, (score,)))

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
        self.session = MethodSession(self._make(), self.journal)
        self.numbers = {str(trial): int(number) for trial, number in saved["numbers"].items()}
        self.checkpoints = {int(trial): str(path) for trial, path in saved["checkpoints"]}
        self.followed = {int(trial): int(times) for trial, times in saved["followed"]}
        self.missing = set(self.numbers.values())


class MakeMethod:
    """A picklable factory of a method: Tune pickles its searchers."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name, self._arguments = name, dict(arguments)

    def __call__(self) -> Method:
        return make_method(self._name, **self._arguments)


def _check_parameters(type: str, parameters: Mapping[str, Any]) -> None:  # noqa: A002
    """Check the parameters of a method as a config does.

    Raises:
        ConfigError: the method does not exist, or does not take them.
    """
    from orchestray.search.config.methods import section_of  # imported late, since it loads all sections

    if not isinstance(type, str):
        raise ConfigError(f"tune_searcher: type: must be the name of a method, got {type!r}")
    section = section_of(type)
    given = {"type": type, **parameters}
    if isinstance(given.get("proposals"), Mapping):
        given["proposals"] = {"type": "random", **given["proposals"]}
    try:
        section.model_validate(given)
    except ValidationError as error:
        raise ConfigError([problem.line("tune_searcher") for problem in translate(error, section)]) from None


def tune_searcher(
    type: str,  # noqa: A002 - the config's own word
    space: Mapping[str, Dimension],
    *,
    metric: str,
    mode: str | None = None,
    architecture: ArchitectureSpace | None = None,
    trials: int | None = None,
    steps_per_trial: int = 1,
    time: str = "training_iteration",
    seed: int = 0,
    **parameters: Any,
) -> MethodSearcher:
    """Return a search method as a Ray Tune searcher.

    For example, where `train` is a function that calls `tune.report({"accuracy": ...})`:

        searcher = tune_searcher("bayesian", {"lr": make_dimension("log_uniform", low=1e-4, high=1)}, metric="accuracy",
                                 trials=20)
        tune.Tuner(train, tune_config=tune.TuneConfig(search_alg=searcher, num_samples=20)).fit()

    For methods that stop, pause or change trials, add `scheduler=tune_scheduler(searcher)`. Where they pause trials
    until others have come as far, leave out `max_concurrent_trials`: Tune counts paused trials, too.

    Args:
        type: a name as in `search.method.type`.
        space: maps each key of the trials' config to its dimension.
        metric: metric that the trials report.
        mode: `max` or `min`; None: by the name of the metric, and `max` where that does not say it.
        architecture: the space of networks; its genome is the config's `genome`.
        trials: maximum number of trials. Set `num_samples` to the same, or to -1: then it is as many as the method
            proposes, including one for each failed member of a population.
        steps_per_trial: value of `time` at which a trial ends.
        time: reported key that counts as steps.
        seed: seed of all random draws.
        parameters: parameters of the method itself.

    Raises:
        ConfigError: the method does not exist, has other parameters, cannot search this space, or trains a program of
            its own (`enas`, `darts`, `smash`, a population with `packed`): that is for `orchestray search`.
    """
    mode = mode or mode_of_metric(metric) or "max"
    if mode not in ("max", "min"):
        raise ConfigError(f"tune_searcher: mode: must be max or min, got {mode!r}")
    for key, dimension in space.items():
        if not isinstance(dimension, Dimension):
            raise ConfigError(
                f"tune_searcher: space.{key}: must be a dimension, as make_dimension makes it, got {dimension!r}; what "
                "is the same for all trials belongs into param_space"
            )
    _check_parameters(type, parameters)
    arguments = {
        "space": space,
        "architecture": architecture,
        "seed": seed,
        "trials": trials,
        "steps_per_trial": steps_per_trial,
        **parameters,
    }
    return MethodSearcher(MakeMethod(type, arguments), metric=metric, mode=mode, time=time)
