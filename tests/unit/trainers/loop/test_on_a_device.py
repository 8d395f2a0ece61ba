"""A step on a device that is not the CPU gives the CPU's bits, and waits for the device only where that is stated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestray.trainers.aggregation.registry import AGGREGATIONS
from orchestray.trainers.compression.registry import COMPRESSIONS
from orchestray.trainers.optim.registry import OPTIMIZERS
from orchestray.trainers.solvers.registry import SOLVERS
from orchestray.trainers.sync.registry import EXCHANGES
from support.device_layouts import ALL, BY_TIMES, GROUPS, NOT_HELD
from support.device_layouts import SERVERS as SERVED
from support.fake_accelerator import built, compiler
from support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[4]
Wait = tuple[str, str, str]


def read(file: str, *functions: str) -> set[Wait]:
    """Return the waits of functions of a file that read a number."""
    return {(f"trainers/{file}.py", function, "a number is read") for function in functions}


SUMS = ("trainers/sync/common/exact_sum.py", "ExactSums.read", "copy to the host")
"""All replicas decide together which parameters were used, and whether to stop."""
SUMS_AT_ONCE = read("sync/common/exact_sum", "ExactSums.write")
"""The same where gradients are not summed by torch: the losses are read before they are sent."""
AGREED = ("trainers/core/unread.py", "Arriving.read", "read in the step that made it")
"""Workers that agree beside the gradients send their losses along, at the end of the step."""
FLAT = ("platform/comm/channel/wire.py", "flat_bytes", "copy to the host")
"""A channel sends what is in the memory of the host."""
ANSWERED = ("trainers/sync/local/answering.py", "Links.answered", "copy from pageable memory")
"""An answer goes from the channel's memory to the device of what was asked."""
PIPELINE = {
    FLAT,
    *read("core/forward", "Forward.loss"),
    ("trainers/parallel/pipeline/links.py", "Links._unpacked", "copy from pageable memory"),
}
"""Activations cross through the memory of the host, micro-batch by micro-batch, so a loss read there adds no wait."""
SERVERS = {FLAT, *read("ps/worker/order_loop", "OrderLoop._backward")}
"""A push sends the gradient from the memory of the host, and the loss with it."""
INDICES = {("trainers/compression/bits.py", "nonzero_indices", "nonzero")}
"""Values that are chosen by size: how many there are is known when they are."""
LARGEST = INDICES | read("compression/largest", "_exactly")
ERROR = read("compression/base", "SparseCompressor.error_norm")
"""The metric of what was not sent."""
SPARSE = {
    *SUMS_AT_ONCE,
    *INDICES,
    *ERROR,
    *read("compression/sparse", "unpack"),
    ("trainers/sync/compressed/sparse_sum.py", "SparseSum.all_reduce", "equal"),
}
_BUTTERFLY = "trainers/sync/compressed/nested_butterfly.py"
GOSSIP = {AGREED, *read("sync/local/gossip", "Gossip._estimate")}
ELASTIC = {AGREED, *read("sync/local/elastic", "ElasticAveraging.after_step.<locals>.<genexpr>")}
GATHERED = {
    *SUMS_AT_ONCE,
    ("trainers/sync/robust/gathered.py", "Gathered.combine", "a mask selects"),
}
PENALTY = read("solvers/penalised", "Penalised.penalty")
GRADIENT = PENALTY | read("loop/solver_oracle", "SharedOracle.gradient")
VALUE = read("loop/solver_oracle", "SharedOracle.value")
LINE = read("solvers/line_search", "Line.__init__")
SEARCHED = (
    GRADIENT | LINE | read("solvers/line_search", "Line._at", "LineSearchSolver.find", "LineSearchSolver.learned")
)
"""A solver decides by the loss, its gradient and their changes along a line."""
REDUCED = GRADIENT | read("solvers/svrg", "Svrg.reduced", "Svrg.metrics")
FACTORS = read("optim/kfac", "KFAC._averaged", "_is_measured")
"""Factors of the curvature that are measured are counted, and damped by their traces."""
KFAC = FACTORS | read("optim/kfac", "KFAC._product")
NATURAL = {
    *FACTORS,
    *read("optim/kronecker", "_inverse", "damped_inverses.<locals>.<genexpr>"),
    *read("optim/natural_gradient", "NaturalGradient._inverses"),
}
NORMS = {("trainers/optim/lars.py", "LayerWise._norms", "copy to the host")}

WAITS: dict[str, set[Wait]] = {
    "one": set(),
    "one, clipped": set(),
    "one, adamw and an average": set(),
    "data": {SUMS},
    "data, clipped": {SUMS},
    "zero1": {SUMS},
    "zero2": {SUMS},
    "zero3": {SUMS},
    "averaging": {AGREED},
    "tensor": {AGREED},
    "tensor, clipped": {AGREED, ("trainers/optim/clipping.py", "clip_pieces", "copy to the host")},
    "pipeline": PIPELINE,
    "tensor and pipeline": PIPELINE,
    "gossip": GOSSIP,
    "elastic averaging": ELASTIC,
    "independent": {AGREED},
    "noise scale": {SUMS, ("trainers/loop/noise_watch.py", "_square", "copy to the host")},
    # How many values there are stays on the device, and so do the running statistics that replicas agree on.
    "batch normalisation": {SUMS},
    "local batch normalisation": {SUMS},
    "recomputed": {SUMS},
    "one in bfloat16": set(),
    "data in bfloat16": {SUMS},
    "zero3 in bfloat16": {SUMS},
    "factors": SUMS_AT_ONCE,
    "a store": SUMS_AT_ONCE,
    "compressed by float16": SUMS_AT_ONCE | read("compression/half_precision", "_within"),
    "compressed by bfloat16": SUMS_AT_ONCE | read("compression/half_precision", "_within"),
    "compressed by qsgd": {
        *SUMS_AT_ONCE,
        *read("compression/huffman", "huffman_decode"),
        ("trainers/compression/huffman.py", "huffman_encode", "copy to the host"),
    },
    "compressed by terngrad": SUMS_AT_ONCE,
    "compressed by onebit": SUMS_AT_ONCE | read("compression/base", "Compressor.error_norm"),
    "compressed by topk": SPARSE | LARGEST,
    "compressed by threshold": SPARSE | read("compression/delta", "_lengths"),
    "compressed by adaptive_threshold": {
        *SPARSE,
        ("trainers/compression/adaptive_threshold.py", "AdaptiveThreshold._threshold", "a mask selects"),
    },
    "compressed by powersgd": SUMS_AT_ONCE | read("sync/compressed/powersgd", "PowerSgd.combine.<locals>.<genexpr>"),
    "compressed by dgc": SPARSE | LARGEST,
    # Nothing is chosen, and nothing but values comes, so neither is counted.
    "four merge in pairs": {
        *SUMS_AT_ONCE,
        *ERROR,
        ("trainers/sync/compressed/sparse_sum.py", "SparseSum.all_reduce", "equal"),
    },
    "nested butterfly": {
        *SUMS_AT_ONCE,
        *LARGEST,
        *ERROR,
        *read("compression/delta", "_lengths"),
        (_BUTTERFLY, "NestedButterfly._configure", "_unique2"),
        (_BUTTERFLY, "NestedButterfly._configure", "copy to the host"),
        (_BUTTERFLY, "NestedButterfly.all_reduce", "equal"),
    },
    "gossip, compressed": {
        *GOSSIP,
        *LARGEST,
        *read("compression/sparse", "unpack"),
        *read("sync/local/delta_encoding", "swap_messages.<locals>.<dictcomp>"),
    },
    "elastic averaging, compressed": ELASTIC,
    "median": GATHERED,
    "trimmed mean": GATHERED,
    "asynchronous gossip": {
        AGREED,
        FLAT,
        *read("sync/local/asynchronous_gossip", "AsynchronousGossip.after_step.<locals>.<genexpr>"),
        ANSWERED,
    },
    "asynchronous elastic averaging": {
        *ELASTIC,
        FLAT,
        ANSWERED,
    },
    **{kind: set() for kind in ("sgd", "adagrad", "rmsprop", "adam", "adamw", "muon", "soap")},
    "lars": NORMS,
    "lamb": NORMS,
    "kfac": KFAC,
    "kfac, spread": {SUMS, *KFAC},
    "natural_gradient": NATURAL,
    "natural_gradient, spread": {SUMS, *NATURAL},
    "soap, spread": {SUMS},
    "yellowfin": {("trainers/optim/yellowfin.py", "YellowFin._totals", "copy to the host")},
    "newton": GRADIENT | VALUE | LINE | read("solvers/dense", "solved") | read("solvers/newton", "Newton.find"),
    "levenberg_marquardt": {
        *GRADIENT,
        *VALUE,
        *read("solvers/dense", "solved"),
        *read("solvers/levenberg_marquardt", "LevenbergMarquardt.find"),
    },
    "hessian_free": {
        *GRADIENT,
        *VALUE,
        *LINE,
        *read("solvers/hessian_free", "HessianFree.find"),
        *read("solvers/linear_cg", "conjugate_gradients"),
    },
    "neumann": GRADIENT | read("solvers/neumann", "Neumann.find", "largest_eigenvalue"),
    "stochastic_lbfgs": {
        *REDUCED,
        *read("solvers/lbfgs", "Pairs.times"),
        *read("solvers/stochastic_lbfgs", "StochasticLbfgs.find"),
    },
    "svrg": REDUCED,
    "conjugate_gradient": SEARCHED
    | read("solvers/conjugate_gradient", "ConjugateGradient.first_length", "ConjugateGradient.learn"),
    "bfgs": SEARCHED | read("solvers/bfgs", "Bfgs.learn"),
    "lbfgs": SEARCHED | read("solvers/lbfgs", "Pairs.add", "Pairs.times"),
    "admm": {
        *PENALTY,
        *VALUE,
        *read("loop/solver_oracle", "SharedOracle.samples"),
        ("trainers/loop/solver_oracle.py", "SharedOracle.samples", "copy from pageable memory"),
        *read("solvers/admm", "Admm._residual", "Admm.find", "kind_of_loss"),
    },
    "servers": SERVERS,
    "servers, factors": SERVERS,
    "servers, compressed": SERVERS | LARGEST | ERROR,
}
"""The places at which the steps of a layout wait for the device; none may be added without its reason here."""

ROUNDED = 2**-8
"""Most by which weights, all below 1, differ after steps in bfloat16: the rounding of one number to its 8 bits."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="the device is compiled, and there is no g++")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    library = built(request.config.cache.mkdir("fake_accelerator"))
    with ThreadPoolExecutor(len(GROUPS)) as pool:
        groups = list(pool.map(lambda group: _run(library, group), GROUPS))
    layouts = {name: run for group in groups for name, run in group["layouts"].items()}
    return {key: value for group in groups for key, value in group.items()} | {"layouts": layouts}


def _run(library: Path, group: str) -> dict[str, Any]:
    """Return what a process of its own finds, which has the device."""
    done = subprocess.run(
        [sys.executable, "-m", "support.on_fake_accelerator", str(library), group],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_every_run_in_float32_gives_weights_and_lines_of_the_cpu_bit_for_bit(found: dict[str, Any]) -> None:
    names = [name for name in ALL if name not in found["rounded"] and name not in BY_TIMES]
    keys = ("weights are equal", "lines are equal", "result is equal")
    equal = {name: {key: found["layouts"][name][key] for key in keys} for name in names}
    assert equal == {name: dict.fromkeys(keys, True) for name in names}


def test_every_registered_exchange_compression_aggregation_optimizer_and_solver_runs_or_is_named_with_its_reason() -> (
    None
):
    def chosen(section: str, default: str) -> set[str]:
        return {keys.get(section, {}).get("type", default) for keys in ALL.values()}

    held = {
        *(chosen("exchange", "allreduce") | {"parameter_server"}),
        *chosen("compression", "none"),
        *chosen("aggregation", "mean"),
        *chosen("optimizer", "sgd"),
        *chosen("solver", "sgd"),
    }
    registered = {*EXCHANGES, *COMPRESSIONS, *AGGREGATIONS, *OPTIMIZERS, *SOLVERS}
    assert registered - held == NOT_HELD.keys()
    assert held <= registered


def test_bfloat16_is_as_near_to_float32_on_a_device_as_on_the_cpu(found: dict[str, Any]) -> None:
    """Bits differ, as a device rounds by a list of operations of its own."""
    assert found["rounded"].keys() == {name for name in WAITS if "in bfloat16" in name}
    for name, far in found["rounded"].items():
        assert 0 < far <= ROUNDED, name
        assert found["layouts"][name]["furthest"] <= ROUNDED, name


@pytest.mark.parametrize("name", sorted(SERVED.keys() - BY_TIMES))
def test_workers_on_a_device_under_parameter_servers_train_to_the_cpus_bits(found: dict[str, Any], name: str) -> None:
    assert found["servers"][name]["weights are equal"]
    assert found["servers"][name]["losses are equal"]


def test_a_step_waits_for_the_device_where_it_is_stated_and_nowhere_else(found: dict[str, Any]) -> None:
    waits = {
        name: {tuple(each) for each in run["waits"]} for name, run in (found["layouts"] | found["servers"]).items()
    }
    for name in BY_TIMES:
        assert waits.pop(name) <= WAITS[name], name
    assert waits == {name: stated for name, stated in WAITS.items() if name not in BY_TIMES}


def test_a_tensor_at_the_wrong_place_fails_as_on_a_gpu(found: dict[str, Any]) -> None:
    assert "Expected all tensors to be on the same device" in found["misplaced"]


@pytest.mark.parametrize("layout", ["one", "data"])
def test_a_loss_that_is_read_late_is_refused_with_the_text_of_one_that_is_read_at_once(
    found: dict[str, Any], layout: str
) -> None:
    at_once, late = found["nan"][layout]
    assert "The loss became nan at step 2 on worker" in at_once
    assert late == at_once


def test_a_loss_that_is_not_finite_is_refused_after_the_steps_that_follow_without_an_agreement(
    found: dict[str, Any],
) -> None:
    for text in found["nan long ago"]:
        assert "The loss became nan at step 2 on worker" in text


def test_no_checkpoint_is_saved_behind_a_loss_that_is_not_finite(found: dict[str, Any]) -> None:
    assert found["saved"] == [[1], [1]]


def test_a_served_batch_is_answered_as_on_the_cpu_and_waits_for_its_answers_alone(found: dict[str, Any]) -> None:
    assert found["served"] == {"answers are equal": True, "waits": ["CPU waits for answers"]}
