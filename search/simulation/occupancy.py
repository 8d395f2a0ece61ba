"""The workers of a search as its config has it, and how much of their time they are busy, in virtual time.

Nothing is trained: a trial takes a drawn time, and scores by a fixed random function of its values. What is simulated
is the method itself: when it has a trial for a worker that is free, and when it waits for others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.config.schema import SearchConfig
from orchestray.search.methods.base import Proposal, rng_of
from orchestray.search.registry.check import method_of
from orchestray.search.simulation.virtual_time import Simulated, simulate

_FOR_TIMES = 0x71


@dataclass(frozen=True)
class Occupancy:
    """The part of their time in which the workers of a simulated search were busy."""

    method: str
    workers: int
    trials: int
    """Number of trials that began."""
    ended: int
    """Number of trials that had ended when the search did."""
    hours: float
    """Length of the search, in virtual time."""
    utilisation: float
    """Part of the workers' time in which they trained, from 0 to 1."""
    utilisation_until_last: float
    """The same until the last trial began: after that there is nothing left for a worker that is free."""
    trials_per_hour: float
    """Trials ended in an hour of virtual time."""
    method_ms: float
    """Milliseconds of this machine that the method took for each trial, to propose it and to learn from it."""

    def to_json(self) -> dict[str, Any]:
        """Return the values as plain data."""
        return asdict(self)


def occupancy_of(config: SearchConfig, *, trial_s: float = 3600.0, spread: float = 0.3) -> tuple[Occupancy, Simulated]:
    """Simulate a search with `search.parallel` workers, up to the budget of trials and of time.

    Args:
        config: config of the search; its seed is that of the simulation.
        trial_s: mean time of a whole trial, in seconds.
        spread: standard deviation of the logarithm of that time; 0: all trials take the same time.

    Raises:
        ConfigError: the method cannot search these spaces, or its trials are programs of its own.
    """
    method = method_of(config)
    if method.has_program:
        raise ConfigError(
            f"search.method.type: {config.search.method.type} runs a program of its own in its trials, which cannot be "
            "simulated; choose a method whose trials are trainings"
        )
    search, steps = config.search, config.steps_per_trial

    def seconds_per_step(proposal: Proposal) -> float:
        drawn = rng_of(search.seed, _FOR_TIMES, proposal.trial).lognormal(-(spread**2) / 2, spread)
        return float(trial_s * drawn / steps)

    began_s = time.perf_counter()
    found = simulate(
        method,
        lambda proposal, step: made_up_score(proposal, search.seed) * (1 - np.exp(-3 * step / steps)),
        workers=search.parallel,
        seconds_per_step=seconds_per_step,
        time_limit_s=search.budget.time_limit_s,
    )
    took_s = time.perf_counter() - began_s
    trials = found.trials.values()
    last_s = max((trial.began_s for trial in trials), default=0.0)
    ends_s = [found.makespan_s if trial.ended_s is None else trial.ended_s for trial in trials]
    before_last_s = sum(min(end, last_s) - trial.began_s for trial, end in zip(trials, ends_s, strict=True))
    ended = sum(trial.ended_s is not None for trial in trials)
    hours = found.makespan_s / 3600
    occupancy = Occupancy(
        search.method.type,
        search.parallel,
        len(trials),
        ended,
        hours,
        found.busy_s / (search.parallel * found.makespan_s) if found.makespan_s else 0.0,
        before_last_s / (search.parallel * last_s) if last_s else 1.0,
        ended / hours if hours else 0.0,
        1e3 * took_s / max(1, len(trials)),
    )
    return occupancy, found


def made_up_score(proposal: Proposal, seed: int = 0) -> float:
    """Return a score from 0 to 1, to which each choice of a trial adds a fixed random value."""
    chosen = [*_entries("", proposal.changes), *_entries("", proposal.genome)]
    return float(np.mean([_value(f"{seed} {entry}") for entry in chosen])) if chosen else 0.0


def _entries(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entries(f"{path}.{key}", each)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _entries(f"{path}.{place}", each)
    elif value is not None:
        yield f"{path}={json.dumps(value)}"


def _value(text: str) -> float:
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest()) / 2**48
