"""Checks between the keys of a serve config, and of the files that it names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from orchestray.platform.config.problems import Problem
from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.policies import timeout_problem
from orchestray.serving.config.own_class import names_class
from orchestray.serving.config.schema import ComputeSection, ModelSection, Scaling, ServeConfig

_PROPAGATORS = "OTEL_PROPAGATORS"


def check_environment() -> None:
    """Refuse what FastAPI and Ray Serve cannot be imported with.

    Raises:
        ConfigError: the variable OTEL_PROPAGATORS names what is not installed.
    """
    if not os.environ.get(_PROPAGATORS):
        return
    try:
        import opentelemetry.propagate  # noqa: F401 - it reads the variable
    except Exception as error:
        raise ConfigError(f"{_PROPAGATORS}: {str(error).rstrip('.')}; correct the variable, or unset it") from error


def find_serve_problems(config: ServeConfig, *, look_at_files: bool = True) -> list[Problem]:
    """Return every problem, in the order of the keys.

    Args:
        config: config of the endpoint.
        look_at_files: True if the runs and files that it names must exist.
    """
    problems = [*_between_models(config), *_between_keys(config)]
    problems += [*_of_gpus(config), *_of_compute(config), *_of_classes(config)]
    return problems + (_of_files(config) if look_at_files else [])


def _between_models(config: ServeConfig) -> Iterator[Problem]:
    seen: set[tuple[str, int]] = set()
    for index, model in enumerate(config.models):
        if (model.name, model.version) in seen:
            yield Problem(
                f"models.{index}.version", f"{model.name} has a version {model.version} already; give it another number"
            )
        seen.add((model.name, model.version))
    for name in dict.fromkeys(model.name for model in config.models):
        versions = [(index, model) for index, model in enumerate(config.models) if model.name == name]
        yield from _of_traffic(name, versions)


def _of_traffic(name: str, versions: list[tuple[int, ModelSection]]) -> Iterator[Problem]:
    for index, model in versions:
        if model.shadow and model.traffic:
            yield Problem(f"models.{index}.traffic", "a shadow answers no requests: leave it out, or set it to 0")
    answering = [(index, model) for index, model in versions if not model.shadow]
    if not answering:
        yield Problem(f"models.{versions[0][0]}.shadow", f"every version of {name} is a shadow: who would answer?")
        return
    total = sum(model.traffic or 0.0 for _, model in answering)
    is_open = any(model.traffic is None for _, model in answering)
    if total > 100 or not (is_open or math.isclose(total, 100.0)):
        wanted = "must add up to no more than 100" if is_open else "must add up to 100"
        yield Problem(f"models.{answering[0][0]}.traffic", f"the versions of {name} {wanted}, got {total:g}")


def _between_keys(config: ServeConfig) -> Iterator[Problem]:
    batching, replicas, tls = config.batching, config.replicas, config.http.tls
    reason = timeout_problem(batching.policy, batching.timeout_ms)
    if reason is not None:
        yield Problem("batching.timeout_ms", reason)
    if isinstance(replicas, Scaling) and replicas.min > replicas.max:
        yield Problem("replicas.min", f"must be <= replicas.max ({replicas.max}), got {replicas.min}")
    if (tls.certificate is None) != (tls.key is None):
        missing, there = ("key", "certificate") if tls.key is None else ("certificate", "key")
        yield Problem(f"http.tls.{missing}", f"is required with http.tls.{there}")


def _of_classes(config: ServeConfig) -> Iterator[Problem]:
    for index, model in enumerate(config.models):
        if not names_class(model.run):
            if model.arguments:
                yield Problem(f"models.{index}.arguments", "are those of a class (run: file.py:Class): leave them out")
        elif config.compute != ComputeSection():
            yield Problem("compute", f"is for trained runs, and {model.name} is a class that computes as it likes")


def _of_gpus(config: ServeConfig) -> Iterator[Problem]:
    compute, gpus = config.compute, config.resources.gpus_per_worker
    if gpus > 1 and not float(gpus).is_integer():
        yield Problem("resources.gpus_per_worker", f"must be a fraction of one GPU, or a whole number, got {gpus:g}")
    if compute.cuda_graphs and not gpus:
        yield Problem("compute.cuda_graphs", "is for GPUs: leave it out, or set resources.gpus_per_worker")
    multiple = compute.pad_to_multiple or 1
    if compute.pad_to is not None:
        if not (compute.compile or compute.cuda_graphs or gpus or compute.pad_to_multiple):
            yield Problem("compute.pad_to", "is for compute.compile and GPUs, and batches are not padded here")
        if wrong := [size for size in compute.pad_to if size % multiple]:
            yield Problem(
                "compute.pad_to", f"must be multiples of compute.pad_to_multiple ({multiple}), got {wrong[0]}"
            )
    if config.update.free_first and config.update.rollback is not None:
        yield Problem(
            "update.free_first", "does not go with update.rollback, which keeps the versions of before loaded"
        )


def _of_compute(config: ServeConfig) -> Iterator[Problem]:
    compute, network = config.compute, config.compute.network
    if compute.quantize is None:
        return
    if config.resources.gpus_per_worker:
        yield Problem("compute.quantize", "is for the CPU: leave it out, or set resources.gpus_per_worker to 0")
    if network is not None and network.tensor * network.pipeline > 1:
        yield Problem("compute.quantize", "is for models in one process: leave it out, or compute.network")
    if compute.compile:
        yield Problem("compute.quantize", "does not go with compute.compile: leave one of them out")


def _of_files(config: ServeConfig) -> list[Problem]:
    problems = []
    for index, model in enumerate(config.models):
        text = _of_run(model.run)
        if text is not None:
            problems.append(Problem(f"models.{index}.run", text))
    files = {
        "http.tls.certificate": config.http.tls.certificate,
        "http.tls.key": config.http.tls.key,
        "auth.tokens_file": config.auth.tokens_file,
    }
    problems += [
        Problem(key, f"there is no file {file}") for key, file in files.items() if file and not Path(file).is_file()
    ]
    return problems


def _of_run(run: str) -> str | None:
    if names_class(run):
        file = run.rpartition(":")[0]
        return None if Path(file).is_file() else f"there is no file {file}"
    path = Path(run)
    is_search = (path / "trials.jsonl").is_file()
    found = path / "best" if is_search else path
    if is_search and not (found / "config.yaml").is_file():
        return f"{path} is a search that has found no run yet: there is nothing to serve"
    if not (found / "config.yaml").is_file():
        return f"there is no run in {path}; `orchestray runs list` shows the runs"
    if not (found / "model" / "model.json").is_file():
        return f"there is no trained model in {found}: the run has not finished; go on with it by --resume"
    return None
