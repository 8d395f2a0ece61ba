"""Messages to a user whose compression or aggregation cannot be: exact texts, one mistake one line."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from orchestray.platform.config.error_location import sections_of, tag_of
from orchestray.platform.config.yaml_text import read
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.sections import Aggregation, Compression, Exchange
from support.configs import GOOD, problems_of

_DATA = "strategy.network.data={}"
_PIPEDREAM = "strategy.network={data: 4, pipeline: 2, schedule: pipedream}"
_NO_RESIDUE = "float16, bfloat16, qsgd or terngrad without error_feedback"


def compression(keys: str) -> str:
    return f"strategy.compression={{type: {keys}}}"


def aggregation(keys: str) -> str:
    return f"strategy.aggregation={{type: {keys}}}"


def exchange(keys: str) -> str:
    return f"strategy.exchange={{type: {keys}}}"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            compression("qsdg"),
            (
                "compression.type: must be one of none, float16, bfloat16, qsgd, terngrad, onebit, topk, threshold, "
                "adaptive_threshold, dgc, powersgd, got 'qsdg'; did you mean 'qsgd'?"
            ),
        ),
        (
            "strategy.compression=zip",
            (
                "compression: must be a mapping with a type (none, float16, bfloat16, qsgd, terngrad, onebit, topk, "
                "threshold, adaptive_threshold, dgc, powersgd), got 'zip'"
            ),
        ),
        (
            "strategy.compression.ratio=0.1",
            "compression.ratio: is no key of none; topk, adaptive_threshold, dgc have it",
        ),
        (compression("qsgd, bits: 9"), "compression.bits: must be <= 8, got 9"),
        (compression("qsgd, bits: 1"), "compression.bits: must be >= 2, got 1"),
        (compression("topk, ratio: 0.0"), "compression.ratio: must be > 0, got 0.0"),
        (compression("topk, ratio: 1.1"), "compression.ratio: must be <= 1, got 1.1"),
        (compression("topk, rank: 2"), "compression.rank: is no key of topk; powersgd has it"),
        (compression("threshold"), "compression.threshold: is required, and missing"),
        (compression("float16, rounding: up"), "compression.rounding: must be one of nearest, stochastic, got 'up'"),
        (
            aggregation("krump"),
            (
                "aggregation.type: must be one of mean, krum, multi_krum, median, trimmed_mean, got 'krump'; "
                "did you mean 'krum'?"
            ),
        ),
        (
            "strategy.aggregation=krum",
            ("aggregation: must be a mapping with a type (mean, krum, multi_krum, median, trimmed_mean), got 'krum'"),
        ),
        (
            "strategy.aggregation.byzantine=1",
            "aggregation.byzantine: is no key of mean; krum, multi_krum, median, trimmed_mean have it",
        ),
    ],
)
def test_a_key_that_is_wrong_by_itself_gives_one_line(override: str, line: str) -> None:
    assert problems_of(GOOD, _DATA.format(8), override) == [f"config: strategy.{line}"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [compression("qsgd")],
            "is for what replicas send each other, and with data: 1 there is one; raise strategy.network.data",
        ),
        (
            [_DATA.format(2), compression("qsgd"), exchange("independent")],
            "members of an ensemble send nothing that could be compressed; use compression none",
        ),
        (
            [
                _DATA.format(2),
                compression("qsgd"),
                exchange("parameter_server, consistency: asynchronous, transport: shared_memory"),
            ],
            "in shared memory nothing is sent that could be compressed; use none, or transport: channel",
        ),
        (
            [_DATA.format(3), compression("onebit"), exchange("parameter_server, backup_workers: 1")],
            (
                "the answer of a copy that comes second is dropped, and with it what onebit had kept for it; use "
                "backup_workers: 0, or float16, bfloat16, qsgd or terngrad without error_feedback"
            ),
        ),
        (
            [_DATA.format(2), compression("topk"), exchange("allreduce, shard: optimizer")],
            "topk needs whole gradients, which shard: optimizer spreads; use shard: none, or none here",
        ),
        (
            [_DATA.format(2), compression("onebit"), exchange("allreduce, algorithm: ring")],
            (
                "ring adds up on the way, and messages of onebit do not add up; use algorithm: native or auto, "
                "or none here"
            ),
        ),
        (
            [_DATA.format(2), compression("topk"), exchange("allreduce, algorithm: ring")],
            "ring sums all values, and topk sends a few; use algorithm: native, auto or butterfly, or none here",
        ),
        (
            [_DATA.format(2), compression("onebit"), exchange("allreduce, factors: auto")],
            "factors are sent as they are, not as onebit; use factors: never, or none here",
        ),
        (
            [_DATA.format(2), compression("onebit"), exchange("parameter_server, factors: auto")],
            "factors are sent as they are, not as onebit; use factors: never, or none here",
        ),
        (
            [_DATA.format(2), compression("powersgd"), exchange("averaging, every: 2")],
            "powersgd sums two factors over all, and averaging sends parameters; topk or qsgd would fit",
        ),
        (
            [_DATA.format(2), compression("qsgd"), exchange("gossip")],
            (
                "gossip sends in qsgd what has changed since a replica last spoke to its neighbours, and on the random "
                "graph they are others at every step; use graph: ring or complete, or none here"
            ),
        ),
        (
            [_DATA.format(2), compression("qsgd"), exchange("gossip, graph: ring, mixing: push_sum")],
            (
                "gossip sends in qsgd what has changed since a replica last spoke to its neighbours, and push_sum "
                "sends parts of a sum; use mixing: symmetric, or none here"
            ),
        ),
        (
            [_DATA.format(2), compression("powersgd"), exchange("gossip, graph: ring")],
            "powersgd sums two factors over all, and gossip sends parameters; topk or qsgd would fit",
        ),
        (
            [_DATA.format(2), compression("dgc"), exchange("averaging, every: 2")],
            "dgc adds a momentum to gradients, and averaging sends parameters; topk or qsgd would fit",
        ),
        (
            [_PIPEDREAM, compression("float16")],
            (
                "pipedream's stages update after each micro-batch, each at a moment of its own; use compression none, "
                "or another schedule"
            ),
        ),
    ],
)
def test_an_exchange_that_cannot_carry_a_compression_says_why(overrides: list[str], line: str) -> None:
    assert problems_of(GOOD, *overrides) == [f"config: strategy.compression.type: {line}"]


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "lars"])
def test_dgc_and_an_optimizer_do_not_both_have_momentum(optimizer: str) -> None:
    config = [_DATA.format(2), compression("dgc, momentum: 0.8")]
    assert problems_of(GOOD, *config, f"train.optimizer={{type: {optimizer}, lr: 0.1, momentum: 0.9}}") == [
        (
            "config: train.optimizer.momentum: dgc keeps a momentum of its own (strategy.compression.momentum: 0.8), "
            "and two would multiply; use momentum: 0 here, got 0.9"
        )
    ]
    load_train_config(GOOD, [*config, f"train.optimizer={{type: {optimizer}, lr: 0.1, momentum: 0.0}}"])


def test_a_clip_of_dgc_needs_the_whole_gradient_in_one_place() -> None:
    clipped = [compression("dgc, clip: 1.0"), "train.optimizer={type: sgd, lr: 0.1}"]
    for cut, parts in (
        (exchange("parameter_server, shards: 4"), "shards: 4, tensor: 1 and pipeline: 1"),
        ("strategy.network.tensor=2", "shards: 1, tensor: 2 and pipeline: 1"),
        ("strategy.network.pipeline=2", "shards: 1, tensor: 1 and pipeline: 2"),
    ):
        assert problems_of(GOOD, _DATA.format(2), *clipped, cut) == [
            (
                "config: strategy.compression.clip: needs the norm of a whole gradient, of which parts are coded apart "
                f"with {parts}; use 1 for each, or take it out"
            )
        ]
    load_train_config(GOOD, [_DATA.format(2), *clipped])


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "adamw"])
@pytest.mark.parametrize("kind", ["dgc", "topk"])
def test_optimizers_without_a_momentum_of_that_kind_go_with_sparse_gradients(kind: str, optimizer: str) -> None:
    load_train_config(GOOD, [_DATA.format(2), compression(kind), f"train.optimizer={{type: {optimizer}, lr: 0.1}}"])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [aggregation("krum"), exchange("allreduce, shard: gradients")],
            (
                "needs each worker's gradient by itself, and shard: gradients spreads sums of them; use shard: none, "
                "or mean"
            ),
        ),
        (
            [aggregation("median"), exchange("allreduce, algorithm: tree")],
            (
                "needs each worker's gradient by itself, and tree adds them up on the way; use algorithm: native, "
                "or mean"
            ),
        ),
        (
            [aggregation("median"), exchange("allreduce, factors: always")],
            (
                "needs each worker's gradient by itself, and factors are added up as they come; use factors: never, "
                "or mean"
            ),
        ),
        (
            [aggregation("krum"), compression("topk")],
            f"needs each worker's gradient by itself, and topk holds parts of it back; use mean, or {_NO_RESIDUE}",
        ),
        (
            [aggregation("krum"), compression("qsgd, error_feedback: true")],
            f"needs each worker's gradient by itself, and qsgd holds parts of it back; use mean, or {_NO_RESIDUE}",
        ),
        (
            [aggregation("krum"), exchange("gossip")],
            "combines gradients, and gossip does not send them; use mean, allreduce or a parameter_server",
        ),
        (
            [aggregation("median"), exchange("parameter_server, consistency: asynchronous")],
            (
                "compares the gradients of one step, and asynchronous updates need not be of one; "
                "use consistency: synchronous, or mean"
            ),
        ),
        (
            [aggregation("median"), exchange("parameter_server, groups: 2")],
            "compares workers, and leaf servers send the sum of theirs; use groups: 1 with median, or mean",
        ),
        (
            [aggregation("multi_krum"), exchange("parameter_server, shards: 2")],
            (
                "compares whole gradients, and with shards: 2 each server sees a part; use shards: 1, or median "
                "or trimmed_mean"
            ),
        ),
        (
            ["strategy.network.pipeline=2", "strategy.network.schedule=pipedream", aggregation("median")],
            (
                "pipedream's stages update after each micro-batch, each at a moment of its own; use mean, or "
                "another schedule"
            ),
        ),
    ],
)
def test_an_exchange_that_does_not_tell_workers_apart_says_why(overrides: list[str], line: str) -> None:
    assert problems_of(GOOD, _DATA.format(6), *overrides) == [f"config: strategy.aggregation.type: {line}"]


@pytest.mark.parametrize(
    ("kind", "byzantine", "bound"),
    [
        (kind, byzantine, 2 * byzantine + extra)
        for kind, extra in (("krum", 3), ("multi_krum", 3), ("median", 1), ("trimmed_mean", 1))
        for byzantine in (1, 2, 3)
    ],
)
def test_the_workers_that_a_rule_needs_are_the_bound_of_its_paper(kind: str, byzantine: int, bound: int) -> None:
    rule = [aggregation(f"{kind}, byzantine: {byzantine}"), "train.batch_size=16"]
    load_train_config(GOOD, [_DATA.format(bound), *rule])
    load_train_config(GOOD, [_DATA.format(bound), *rule, exchange("parameter_server")])
    extra = bound - 2 * byzantine
    fitting = f"at most {byzantine - 1} would fit" if byzantine > 1 else "raise strategy.network.data, or use mean"
    sentence = (
        f"config: strategy.aggregation.byzantine: {kind} needs {bound} workers or more (2 x byzantine + {extra}) to "
        f"withstand {byzantine}, and there are {bound - 1}; {fitting}"
    )
    assert problems_of(GOOD, _DATA.format(bound - 1), *rule) == [sentence]
    # A backup worker repeats what another does: its gradient is the same one.
    server = exchange("parameter_server, backup_workers: 1")
    assert problems_of(GOOD, _DATA.format(bound), *rule, server) == [sentence]


def test_a_batch_too_small_for_a_rule_is_refused() -> None:
    assert problems_of(GOOD, _DATA.format(5), aggregation("krum"), "train.batch_size=4") == [
        "config: train.batch_size: krum compares the gradients of 5 workers or more, and each needs a sample, got 4"
    ]


@pytest.mark.parametrize(
    ("kind", "stays"),
    [
        ("none", True),
        ("float16", True),
        ("bfloat16", True),
        ("qsgd", True),
        ("terngrad", True),
        ("qsgd, error_feedback: true", False),
        ("onebit", False),
        ("topk, error_feedback: false", False),
        ("dgc", False),
        ("powersgd", False),
    ],
)
def test_ray_train_runs_compressions_that_keep_nothing(kind: str, stays: bool) -> None:
    overrides = [_DATA.format(2), compression(kind), "engine=ray_train"]
    if stays:
        assert load_train_config(GOOD, overrides).engine == "ray_train"
    else:
        name = kind.partition(",")[0]
        text = f"ray_train does not keep what {name} has yet to send; use engine: actors, or {_NO_RESIDUE}"
        assert problems_of(GOOD, *overrides) == [f"config: engine: {text}"]


_REQUIRED: dict[str, dict[str, Any]] = {"averaging": {"every": 2}, "threshold": {"threshold": 0.1}}


def _all(union: Any) -> list[dict[str, Any]]:
    kinds = [tag_of(section) or "" for section in sections_of(union)]
    return [{"type": kind, **_REQUIRED.get(kind, {})} for kind in dict.fromkeys(kinds)]


def _is_carried(strategy: dict[str, Any]) -> bool:
    """Return True if the config is let through; one that is comes back from its own dump."""
    data = {**GOOD, "strategy": {"network": {"data": 8}, **strategy}}
    try:
        config = load_train_config(data)
    except ConfigError:
        return False
    return load_train_config(read(dump_yaml(config))) == config


def test_each_compression_and_aggregation_goes_with_the_exchanges_it_is_made_for_and_with_no_other() -> None:
    carried = {
        (how["type"], wire["type"], rule["type"])
        for how, wire, rule in itertools.product(_all(Exchange), _all(Compression), _all(Aggregation))
        if _is_carried({"exchange": how, "compression": wire, "aggregation": rule})
    }
    gradients = {"allreduce", "parameter_server"}
    every_compression = {kind["type"] for kind in _all(Compression)}
    robust = {kind["type"] for kind in _all(Aggregation)} - {"mean"}
    memoryless = {"none", "float16", "bfloat16", "qsgd", "terngrad"}
    wanted = {(how, wire, "mean") for how in gradients for wire in every_compression}
    sends_parameters = ("averaging", "elastic_averaging")
    wanted |= {(how, wire, "mean") for how in sends_parameters for wire in every_compression - {"powersgd", "dgc"}}
    wanted |= {(how, "none", "mean") for how in ("gossip", "independent")}
    wanted |= {("allreduce", wire, rule) for wire in memoryless for rule in robust}
    wanted |= {("parameter_server", wire, rule) for wire in every_compression for rule in robust}
    assert carried == wanted
