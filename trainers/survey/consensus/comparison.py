"""Clusters of several sizes under drawn faults, with a minority of the servers down, and with a majority down."""

from __future__ import annotations

from dataclasses import dataclass

from orchestray.trainers.survey.consensus.messages import Accept, Accepted, Chosen
from orchestray.trainers.survey.consensus.roles import majority
from orchestray.trainers.survey.consensus.trial import Faults, Trial, drawn

_SCHEDULE_S = 3.0
_PHASE_S = 2.0
_STEP_S = 0.05
_LONGEST_S = 10.0
_LOSSY = Faults(loss=0.1, twice=0.1, slow=0.1)


@dataclass(frozen=True)
class Found:
    """Sums over all schedules of a cluster of one size.

    Args:
        num_servers: number of servers.
        schedules: schedules of drawn faults.
        crashes: crashes in them.
        leaders: ballots in them that a leader had.
        decisions: slots in them that got a value.
        minority_down: decisions in as many schedules with a lossy network and as many servers down as may be.
        least_minority_down: the fewest of these in a schedule.
        majority_down: decisions in these schedules after one more server was lost.
        violations: broken rules in all of these.
        messages: messages a decision under one leader, without heartbeats and faults.
        served_again_s: mean virtual time, after a server is lost, until the others serve its shards.
    """

    num_servers: int
    schedules: int
    crashes: int
    leaders: int
    decisions: int
    minority_down: int
    least_minority_down: int
    majority_down: int
    violations: int
    messages: float
    served_again_s: float


def compare(num_servers: int, schedules: int) -> Found:
    """Run schedules of faults with seeds from 0 on, and return what came of them."""
    trials = [drawn(num_servers, seed) for seed in range(schedules)]
    for trial in trials:
        trial.run(_SCHEDULE_S)
    down = [lose_most(num_servers, seed) for seed in range(schedules)]
    lost = [served_again(num_servers, seed) for seed in range(schedules)]
    calm = Trial(num_servers, 0)
    calm.run(_LONGEST_S)
    sent = sum(calm.num_messages[kind] for kind in (Accept, Accepted, Chosen))
    violations = [trial.watcher.violations for trial in trials] + [each.violations for each in down]
    return Found(
        num_servers=num_servers,
        schedules=schedules,
        crashes=sum(trial.num_crashes for trial in trials),
        leaders=sum(len(trial.elected) for trial in trials),
        decisions=sum(len(trial.watcher.decisions) for trial in trials),
        minority_down=sum(each.minority_down for each in down),
        least_minority_down=min(each.minority_down for each in down),
        majority_down=sum(each.majority_down for each in down),
        violations=sum(map(len, violations)),
        messages=sent / len(calm.watcher.decisions),
        served_again_s=sum(lost) / len(lost),
    )


@dataclass(frozen=True)
class Down:
    """Decisions with a minority of the servers down, and after one more was lost, with the rules broken in both."""

    minority_down: int
    majority_down: int
    violations: tuple[str, ...]


def lose_most(num_servers: int, seed: int) -> Down:
    """Lose the largest minority of the servers, and later one more, on a network that loses and doubles messages."""
    trial = Trial(num_servers, seed, _LOSSY)
    trial.run(_PHASE_S)
    for number in range(num_servers - majority(num_servers)):
        trial.crash(number)
    lost_s = trial.clock.now_s
    trial.run(2 * _PHASE_S)
    minority_down = trial.decided_since(lost_s)
    trial.crash(num_servers - majority(num_servers))
    lost_s = trial.clock.now_s
    trial.run(2 * _PHASE_S)
    return Down(minority_down, trial.decided_since(lost_s), tuple(trial.watcher.violations))


def served_again(num_servers: int, seed: int, num_shards: int = 3) -> float:
    """Lose the server of shard 0, and return the virtual seconds until all shards are served by others.

    Raises:
        RuntimeError: they are not within ten seconds.
    """
    trial = Trial(num_servers, seed, num_shards=num_shards)
    trial.run(_PHASE_S)
    (lost,) = trial.serving(0)
    trial.crash(lost)
    lost_s = trial.clock.now_s
    while trial.clock.now_s < lost_s + _LONGEST_S:
        trial.run(_STEP_S)
        if all(trial.serving(shard) for shard in range(num_shards)):
            return trial.clock.now_s - lost_s
    raise RuntimeError(f"a shard is not served {_LONGEST_S:g} s after server {lost} was lost")
