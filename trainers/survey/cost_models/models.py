"""Times of training by four models of the literature (survey, section 2.6)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from orchestray.trainers.machine.profile import MachineProfile
from orchestray.trainers.machine.transfers import ring_s
from orchestray.trainers.survey.cost_models.counted import Counted


def paleo_s(
    step: Counted,
    profile: MachineProfile,
    *,
    percent_of_peak: float = 1.0,
    threads: int = 1,
    ranks: int = 1,
    dtype: str = "float32",
) -> float:
    """Return the seconds of a step by its operation counts alone (Qi, Sparks, Talwalkar: Paleo, ICLR 2017).

    The operations take as long as at a part of the machine's peak; gradients go round a ring of messages that take
    alpha + n beta each. Every operation counts alike, whatever kernel it runs in.

    Args:
        step: what one worker computes.
        profile: machine.
        percent_of_peak: Paleo's PPP, the part of the fastest product's speed that networks reach; 1: all of it.
        threads: threads of a worker.
        ranks: number of workers with a part of the data each.
        dtype: type of the products.
    """
    compute_s = step.work / (percent_of_peak * profile.flops_per_s(threads, dtype))
    return compute_s + ring_s("all_reduce", ranks, step.parameter_bytes, profile.collectives.curves["exchange"][2].fit)


def fitted_percent_of_peak(steps: Sequence[tuple[Counted, float]], profile: MachineProfile, threads: int = 1) -> float:
    """Return Paleo's PPP: the median over measured steps of what they reach of the peak.

    Args:
        steps: counted steps, each with its measured seconds; not those that are to be predicted.
        profile: machine.
        threads: threads they ran with.
    """
    return median(step.work / time_s / profile.flops_per_s(threads) for step, time_s in steps)


def gemm_lookup_s(step: Counted, profile: MachineProfile, *, threads: int = 1, dtype: str = "float32") -> float:
    """Return the seconds of a step as those of its products, looked up in a table of measured ones (survey, [193]).

    Convolutions are products of unrolled images. Operations that are not products take no time here.
    """
    return sum(
        each.count * profile.gemm_s(each.m, each.n, each.k, threads=threads, dtype=dtype) for each in step.products
    )


def cpu_distributed_s(compute_s: float, parameter_bytes: int, profile: MachineProfile, ranks: int = 2) -> float:
    """Return the seconds of a step of data parallelism on CPUs: compute + T_allreduce (survey, [255]).

    Args:
        compute_s: seconds in which one worker alone computes its part of the mini-batch.
        parameter_bytes: bytes of the gradients.
        profile: machine that all workers share.
        ranks: number of workers, of one thread each.
    """
    return compute_s * profile.slowdown(ranks) + profile.seconds("all_reduce", ranks, parameter_bytes)


def side_by_side_s(step: Counted, profile: MachineProfile) -> dict[str, float]:
    """Return the seconds of a step by each model that needs no measured step, with one thread a worker.

    Args:
        step: the counted step of one worker.
        profile: machine.
    """
    table_s = gemm_lookup_s(step, profile)
    return {
        "Paleo": paleo_s(step, profile),
        "table of products": table_s,
        "two workers with a batch each": cpu_distributed_s(table_s, step.parameter_bytes, profile),
    }


def epoch_s(steps_s: Sequence[float], num_steps: int) -> float:
    """Return the seconds of a whole epoch from those of its first steps (survey, [244]).

    The first step is counted once, as it prepares; the median of the others stands for all that follow.

    Args:
        steps_s: seconds of the first steps, two or more.
        num_steps: steps of the epoch.

    Raises:
        ValueError: there are fewer than two steps.
    """
    if len(steps_s) < 2:
        raise ValueError(f"two steps or more are needed, got {len(steps_s)}")
    return steps_s[0] + (num_steps - 1) * median(steps_s[1:])
