"""`orchestray exhibit`: results of the field that are computed here, each in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import typer

from orchestray.cli.options import Json
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.files import dump_json
from orchestray.platform.terminal.tables import show

app = typer.Typer()


@dataclass(frozen=True)
class Shown:
    """A table, and a sentence on what it shows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    sentence: str


@app.command(epilog="Example: orchestray exhibit sgd-rate")
def exhibit(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One of them; default: list all.", show_default=False)
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Compute a result of the field: a bound, a rate, a published table."""
    if name is not None and name not in EXHIBITS:
        raise ConfigError(f"There is no exhibit {name!r}: choose one of {', '.join(EXHIBITS)}.")
    if name is None:
        shown = Shown(["name", "what"], [[each, line] for each, (line, _) in EXHIBITS.items()], "")
    else:
        shown = EXHIBITS[name][1]()
    if as_json:
        print(
            dump_json(
                {"rows": [dict(zip(shown.columns, row, strict=True)) for row in shown.rows], "shows": shown.sentence}
            )
        )
        return
    _print(shown)


def _print(shown: Shown) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(shown.columns):
        is_text = bool(shown.rows) and isinstance(shown.rows[0][number], str)
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in shown.rows:
        table.add_row(
            *(
                cell if isinstance(cell, str) else f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"
                for cell in row
            )
        )
    show(table)
    if shown.sentence:
        print(f"\n{shown.sentence}")


def _descent_lemma() -> Shown:
    import numpy as np  # late, as all of these

    from orchestray.trainers.survey.convergence.descent_lemma import descend

    found = descend(np.geomspace(0.1, 4.0, 12), 0.1, num_steps=30)
    steps = zip(found.losses.tolist(), found.expected.tolist(), found.bounds.tolist(), strict=True)
    holds = "no mean is above its bound" if found.holds else "a mean is above its bound"
    return Shown(
        ["step", "loss", "mean after it", "bound"],
        [[number, *values] for number, values in enumerate(steps) if number % 3 == 0],
        f"Descent lemma: over 10,000 draws of each of {len(found.losses)} steps, {holds}.",
    )


def _sgd_rate() -> Shown:
    import numpy as np

    from orchestray.trainers.survey.convergence.logistic import drawn, log_log_slope
    from orchestray.trainers.survey.convergence.rates import doublings, train

    sizes = doublings(128, 16_384)
    found = train(drawn(400, 20, 4, np.random.default_rng(0)), 1, sizes.tolist(), 2.0)
    fit = log_log_slope(sizes, found.errors)
    rows = [[int(size), float(error)] for size, error in zip(sizes, found.errors.mean(axis=0), strict=True)]
    return Shown(
        ["steps", "loss above the least"],
        rows,
        f"Slope of the logarithms: {fit.slope:.3f} +- {fit.error:.3f}; a rate of 1/sqrt(T) is -0.5 or less.",
    )


def _asynchronous_rate() -> Shown:
    import numpy as np

    from orchestray.trainers.survey.convergence.logistic import drawn, log_log_slope
    from orchestray.trainers.survey.convergence.rates import staleness_bound, train

    problem, steps, workers = drawn(400, 20, 4, np.random.default_rng(0)), 1024, (1, 2, 4, 8)
    trained = {m: train(problem, m, [m * steps], 2.0, seed=m) for m in workers}
    alone = train(problem, 1, [m * steps for m in workers], 2.0).errors.mean(axis=0)
    fit = log_log_slope(np.asarray(workers), np.stack([trained[m].errors[:, -1] for m in workers], axis=1))
    rows = [
        [m, float(found.errors.mean()), float(one), found.most_stale, staleness_bound(m)]
        for (m, found), one in zip(trained.items(), alone, strict=True)
    ]
    return Shown(
        ["workers", "loss above the least", "one worker, as many updates", "staleness", "its bound"],
        rows,
        f"In the time of {steps:,} steps of one worker. Slope of the logarithms over the workers: {fit.slope:.3f} +- "
        f"{fit.error:.3f}; a rate of 1/sqrt(m T) is -0.5 or less.",
    )


def _load_balancing() -> Shown:
    import numpy as np

    from orchestray.trainers.survey.convergence.logistic import drawn
    from orchestray.trainers.survey.convergence.neighbours import in_step, without_waiting

    seconds, until_s = (2.0, 1.0, 1.0, 1.0), 2000.0
    problem = drawn(200, 10, 3, np.random.default_rng(0))
    rows = [
        [
            name,
            " ".join(map(str, found.steps)),
            sum(found.steps) / until_s,
            sum(found.messages) / sum(found.steps),
            found.error,
            found.disagreement,
        ]
        for name, train in (("in step", in_step), ("without waiting", without_waiting))
        for found in [train(problem, seconds, until_s, lr=0.05)]
    ]
    return Shown(
        ["neighbours on a ring", "steps of each", "steps/s", "models sent a step", "loss above the least", "apart"],
        rows,
        f"{len(seconds)} replicas for {until_s:,.0f} s of virtual time, of which the first takes twice as long for a "
        f"gradient: together they can do {sum(1 / each for each in seconds):g} steps/s (Lian et al. 2017 and 2018).",
    )


def _batch_sizes() -> Shown:
    import numpy as np

    from orchestray.trainers.survey.convergence.batch_sizes import steps_to_goal

    curvatures, rates = np.geomspace(0.01, 1.0, 30), np.geomspace(1e-4, 3.0, 80).tolist()
    found = [steps_to_goal(curvatures, 2**k, rates, goal=0.02) for k in range(15)]
    most = found[0].num_samples
    return Shown(
        ["batch", "best rate", "steps", "samples", "of perfect scaling"],
        [[one.batch_size, one.lr, one.num_steps, one.num_samples, f"{most / one.num_samples:.0%}"] for one in found],
        "Steps of SGD to 2 % of the first loss on a noisy quadratic, with the best of 80 rates for each batch: perfect "
        "scaling first, then a plateau.",
    )


def _hybrid() -> Shown:
    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.survey.cluster import hybrid

    machine, size = hybrid.calibrated(), hybrid.NUM_GPUS
    schemes = {
        "data parallel": (hybrid.data_parallel_s, hybrid.PURE_SPEEDUP),
        "model parallel": (hybrid.model_parallel_s, f"at most {hybrid.PURE_SPEEDUP}"),
        "hybrid": (hybrid.hybrid_s, hybrid.HYBRID_SPEEDUP),
    }
    bytes_alone = hybrid.Machine(machine.compute_s, AlphaBeta(0.0, 1.0))
    rows = []
    for name, (exchange_s, reported) in schemes.items():
        seconds, sent = exchange_s(machine, size), exchange_s(bytes_alone, size)
        rows.append([name, 1e-6 * sent, 1e3 * seconds, hybrid.speedup(machine, size, seconds), reported])
    gigabytes = 1e-9 / machine.link.beta_s_per_byte
    return Shown(
        ["scheme", "sent by a GPU, MB", "exchange, ms", "speed-up of 4 GPUs", "reported"],
        rows,
        f"Constants: {hybrid.SAMPLES} samples a GPU in {1e3 * machine.compute_s:.0f} ms, a latency of "
        f"{1e6 * hybrid.LATENCY_S:.0f} us, and {gigabytes:.3g} GB/s, which the first speed-up, the best "
        "reported of one scheme alone, calibrates. The others are predicted, not measured here.",
    )


def _host_staged() -> Shown:
    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.survey.cluster import copies

    bus, memory, network = AlphaBeta(10e-6, 1 / 12e9), AlphaBeta(1e-6, 1 / 10e9), AlphaBeta(30e-6, 1 / 12.5e9)
    paths = {
        "direct": copies.direct(network),
        "host-staged": copies.host_staged(bus, network),
        "object store": copies.through_object_store(bus, memory, network),
    }
    rows = [
        [
            name,
            " > ".join(hop.name for hop in hops),
            len(hops),
            *(1e3 * copies.path_s(hops, 1e8, chunks) for chunks in (1, 25)),
        ]
        for name, hops in paths.items()
    ]
    return Shown(
        ["path", "hops", "copies", "100 MB, ms", "in 25 chunks, ms"],
        rows,
        "Constants: a bus of 12 GB/s, memory of 10 GB/s, a network of 100 Gbit/s. Each hop is a copy; chunks overlap.",
    )


def _checkpoints() -> Shown:
    import numpy as np

    from orchestray.trainers.survey.cluster.failures import Failures, restarting, restarting_goodput, young_daly_s

    workers, failures = 1000, Failures(rate_per_s=1 / (365 * 86_400), checkpoint_s=30.0, restart_s=300.0)
    best_s = young_daly_s(workers, failures)
    rows = []
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        interval_s = factor * best_s
        found = restarting(np.full(100_000, interval_s), workers, failures, np.random.default_rng(0))
        expected = restarting_goodput(interval_s, workers, failures)
        rows.append([f"{factor:g}", interval_s / 60, f"{found.goodput:.2%}", f"{expected:.2%}"])
    return Shown(
        ["of Young and Daly's", "interval, minutes", "goodput, simulated", "closed form"],
        rows,
        "1,000 workers that each fail once a year, 30 s for a checkpoint and 300 s for a restart.",
    )


def _gpipe() -> Shown:
    from orchestray.trainers.survey.cluster.published import GPIPE_TRANSFORMER, gpipe_speedups

    found = gpipe_speedups()
    rows = [
        [size, found[size], reported, f"{found[size] / reported - 1:+.1%}"]
        for size, reported in GPIPE_TRANSFORMER.items()
    ]
    return Shown(
        ["accelerators", "predicted", "published", "error"],
        rows,
        "GPipe's Transformer, 32 micro-batches (Huang et al., 2019, table 2), calibrated at 2 accelerators.",
    )


def _bert() -> Shown:
    from orchestray.trainers.survey.cluster.published import BERT_SAMPLES_PER_S, bert_scaling

    rows = [
        [samples, size, scaling.predicted[size], scaling.measured[size], f"{scaling.errors[size]:+.1%}"]
        for samples in BERT_SAMPLES_PER_S
        for scaling in [bert_scaling(samples)]
        for size in scaling.measured
    ]
    return Shown(
        ["samples a GPU", "GPUs", "predicted, samples/s", "published", "error"],
        rows,
        "BERT-Base with DistributedDataParallel on nodes of 8 V100 (DLPerf of OneFlow, 2020). From the speeds of "
        "one GPU, and of 16 with 32 samples each.",
    )


def _spot_prices() -> Shown:
    from orchestray.trainers.survey.cluster.spot_prices import show_bills

    rows, saved, traces = show_bills()
    return Shown(
        ["cluster", "mean cost", "dearest", "mean hours", "resizes"],
        rows,
        f"{traces} traces of hourly prices below 1, a training of 100 machine hours due in 72, six minutes lost by "
        f"each resize. A cluster that grows while prices are low costs {saved:.0%} less than two machines; it "
        "knows the prices of the three days before.",
    )


def _paxos() -> Shown:
    from orchestray.trainers.survey.consensus.comparison import compare

    found = [compare(num_servers, schedules=50) for num_servers in (3, 5, 7)]
    measures = {
        "schedules": "schedules",
        "crashes": "crashes in them",
        "leaders": "leaders in them",
        "decisions": "decisions in them",
        "minority_down": "decisions, a minority down",
        "least_minority_down": "fewest of these in a schedule",
        "majority_down": "decisions, a majority down",
        "violations": "violations in all of these",
        "messages": "messages a decision, one leader",
        "served_again_s": "a lost server's shards served again, s",
    }
    return Shown(
        ["what", *(f"{each.num_servers} servers" for each in found)],
        [[words, *(getattr(each, name) for each in found)] for name, words in measures.items()],
        "Seeded schedules of virtual time, with crashes, partitions, and messages lost, doubled and overtaken. A "
        "violation is a slot with two values, or a shard with two servers at a time.",
    )


def _rumours() -> Shown:
    from orchestray.trainers.survey.dissemination import TRIALS, corrections

    rows = [
        [each.nodes, each.rounds, each.failures, f"{each.by_gossip:.1%}", each.whole, each.missed, each.most_steps]
        for each in corrections()
    ]
    return Shown(
        ["nodes", "rounds", "failures", "informed by gossip", "of all", "missed after correction", "its most steps"],
        rows,
        f"{TRIALS:,} trials each, with the rounds of push gossip that should reach all nodes, 1.639 log2 m. `of all`: "
        "trials in which gossip reached every node. The correction sends along a ring, to both sides (Hoefler et al. "
        "2017, algorithm 3).",
    )


def _all_reduces() -> Shown:
    from orchestray.trainers.survey.all_reduces import findings, measured

    found = measured()
    rows = [
        [
            *(each.algorithm, each.size, each.num_bytes, each.seconds * 1e3, each.of_latency_bound),
            *(each.of_bandwidth_bound, each.most_sent, each.of_no_redundancy_bytes),
        ]
        for each in found
    ]
    columns = ["all-reduce", "ranks P", "bytes n", "ms", "of L log2 P", "of n G", "busiest sends", "of 2 n (P - 1)/P"]
    return Shown(columns, rows, " ".join(findings(found)))


def _placement() -> Shown:
    from orchestray.trainers.survey.all_reduces import placements, rows_of_placements

    found = placements()
    fewer = sum(
        there.messages < here.messages and there.num_bytes < here.num_bytes
        for at_random, mapped in found.values()
        for here, there in zip(at_random, mapped, strict=True)
    )
    count = sum(len(mapped) for _, mapped in found.values())
    names = [f"{what}, {kind}" for what in ("messages", "bytes", "ms") for kind in ("random", "mapped")]
    return Shown(
        ["all-reduce", *names],
        rows_of_placements(found),
        "What goes between the nodes of 16 ranks, four on each of four nodes, in the mean of 20 clusters in virtual "
        f"time. Ranks mapped by their nodes send fewer messages and bytes over the slow links in {fewer} of {count} "
        "runs.",
    )


def _data_centres() -> Shown:
    from orchestray.trainers.survey.data_centres.comparison import compare

    return Shown(
        ["link", "rate", "rules", "seconds", "clocks", "kB", "ahead", "barrier, s", "clock, s"],
        compare(),
        "Three data centres, one with slower machines, train a sparse regression to 1% of its loss, in virtual time. "
        "Approximate Synchronous Parallel (Hsieh et al. 2017, Gaia) sends changes of 30% of a parameter over the root "
        "of the clocks. `ahead`: most clocks between two data centres, and the bound. Last two: seconds that workers "
        "waited.",
    )


def _gpt3() -> Shown:
    import torch

    from orchestray.serving.sharded.memory_plan import LayerSizes
    from orchestray.trainers.survey.networks.gpt3 import Gpt3

    sizes = LayerSizes.of(Gpt3(), lambda: torch.zeros(1))
    plans = {
        (name, memory_gb): sizes.plan(1e9 * memory_gb, dtype=getattr(torch, name))
        for name in ("float16", "float32")
        for memory_gb in (16, 80, 1000)
    }
    rows = [
        [name, memory_gb, plan.num_stages, sum(plan.stage_bytes) / 1e9, max(plan.stage_bytes) / 1e9]
        for (name, memory_gb), plan in plans.items()
    ]
    return Shown(
        ["numbers", "memory of a process, GB", "fewest processes", "weights, GB", "in the largest part, GB"],
        rows,
        f"{sizes.num_parameters:,} parameters (Brown et al. 2020), cut between layers: the fewest parts that fit, and "
        "among such cuts the most even one. An endpoint with `compute.network.memory_gb` cuts its model so.",
    )


def _int8() -> Shown:
    from orchestray.serving.models.small_devices import measure_small_net

    found = measure_small_net()
    whole, small = found
    return Shown(
        ["numbers", "bytes", "one sample, us", "accuracy"],
        [[each.numbers, each.num_bytes, 1e6 * each.latency_s, each.accuracy] for each in found],
        f"A classifier of digits takes {whole.num_bytes / small.num_bytes:.2f} times fewer bytes in 8-bit integers, "
        f"and {small.latency_s / whole.latency_s:.2g} times as long, on one thread of this CPU. It was not trained on "
        "the samples of the accuracy. An endpoint with `compute.quantize: int8` has its model so.",
    )


EXHIBITS: Mapping[str, tuple[str, Callable[[], Shown]]] = MappingProxyType(
    {
        "descent-lemma": ("how much a step of SGD lowers the loss, and its bound", _descent_lemma),
        "sgd-rate": ("averaged SGD comes within 1/sqrt(T) of the least loss", _sgd_rate),
        "asynchronous-rate": ("m workers that do not wait come within 1/sqrt(m T)", _asynchronous_rate),
        "load-balancing": ("replicas without a server, in step with their neighbours or not", _load_balancing),
        "batch-sizes": ("steps to a goal by the size of the batch, with a rate tuned for each", _batch_sizes),
        "hybrid": ("AlexNet on 4 GPUs: data or model parallelism alone, and the hybrid of both, predicted", _hybrid),
        "host-staged": ("a tensor from GPU to GPU through the memory of hosts", _host_staged),
        "checkpoints": ("how often to save: goodput around Young and Daly's interval", _checkpoints),
        "spot-prices": ("machines rented at a price that moves: a fixed number, and as many as pay off", _spot_prices),
        "paxos": ("servers that agree on who serves which shard, while some fail", _paxos),
        "rumours": ("the nodes that push gossip misses, until a correction on a ring reaches them", _rumours),
        "all-reduces": ("all-reduces in virtual time, beside the least time and bytes of any", _all_reduces),
        "placement": ("ranks placed by the nodes they lie on: what crosses the slow links", _placement),
        "data-centres": ("significant updates over slow links: selective barriers and mirror clocks", _data_centres),
        "gpt-3": ("the fewest processes that hold a model of 175 billion parameters", _gpt3),
        "int8": ("a small network in 8-bit integers, as a device with little memory has it", _int8),
        "gpipe": ("GPipe's speed-ups from one of them", _gpipe),
        "bert": ("data-parallel BERT on 1 to 32 GPUs from one row", _bert),
    }
)
"""Line and function of each exhibit, by name."""
