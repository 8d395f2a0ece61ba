"""The fit of a search's experiment by a `tune.Tuner`."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback

from orchestray.search.engine import silence_loggers, tune_faults
from orchestray.search.engine.callbacks import blame
from orchestray.search.engine.experiment import Decisions, Ends, Proposals, Watcher

if TYPE_CHECKING:
    from ray.tune import Callback

    from orchestray.search.config.schema import Objective
    from orchestray.search.engine.experiment import Experiment
    from orchestray.search.engine.trainable import HostedTrial

_ENVIRONMENT: Mapping[str, str] = {
    "RAY_AIR_NEW_OUTPUT": "0",  # it prints tables even if it is to be silent
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # that of TensorBoard imports torch; we write such files
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the search stops by its own handler
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the search says which metric is missing
    "TUNE_MAX_PENDING_TRIALS_PG": "64",  # the search limits how many start at once
}
_lock = threading.Lock()
_before: list[dict[str, str | None]] = []
"""Values of the variables before each search under way; all but the first saw those of the first."""


def fit(
    experiment: Experiment,
    trainable: type[HostedTrial],
    *,
    name: str,
    directory: Path,
    objective: Objective,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Run the trials of a search until nothing is left to do, or it is to end.

    Args:
        experiment: the search.
        trainable: class of its trials.
        name: name of the search.
        directory: directory of the experiments of this search; a resumed one adds another.
        objective: objective by which Tune's tables and loggers rank trials.
        callbacks: callbacks of the user.

    Raises:
        OrchestrayError: the search cannot continue.
    """
    proposals = Proposals(experiment, objective.metric, str(objective.mode))

    def named(trial: Any) -> str:
        number = experiment.numbers[trial.trial_id]
        again = experiment.names[number]
        return f"{name}-{number}" + (f"-again-{again - 1}" if again > 1 else "")

    settings = tune.TuneConfig(
        search_alg=proposals,
        scheduler=Decisions(experiment),
        num_samples=-1,
        reuse_actors=True,
        trial_name_creator=named,
        trial_dirname_creator=named,
    )
    run = tune.RunConfig(
        name=_next_name(directory),
        storage_path=str(directory),
        stop=Ends(experiment),
        callbacks=[Watcher(experiment), CSVLoggerCallback(), JsonLoggerCallback(), *callbacks],
        verbose=0,
    )
    registered = f"{name}-{uuid.uuid4().hex[:8]}"
    with _lock:  # Tune's registry is not thread-safe
        tune_faults.mend()
        tune.register_trainable(registered, trainable)
    with silence_loggers.TUNE, _environment(), tune_faults.groups_of_experiment():
        try:
            tune.Tuner(registered, tune_config=settings, run_config=run).fit()
        except Exception as error:
            if failure := experiment.failure or blame(error, callbacks):
                raise failure from error
            raise
    if experiment.failure is not None:
        raise experiment.failure


def _next_name(directory: Path) -> str:
    """Return the name of the next experiment of a search: its attempts are numbered."""
    attempts = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
    return str(max(attempts, default=0) + 1)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set Tune's variables while any search of this process is under way."""
    with _lock:
        _before.append({key: os.environ.get(key) for key in _ENVIRONMENT})
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
    try:
        yield
    finally:
        with _lock:
            first = _before.pop(0)
            others = _before[:1]
            _before[:1] = [first] if others else []
            for key in (key for key, value in first.items() if value is None and not others):
                os.environ.pop(key, None)
