"""`orchestray submit --manifest`: a command as Kubernetes objects, for KubeRay."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestray.platform.errors import ConfigError
from orchestray.platform.jobs.kuberay import RUNS
from orchestray.platform.jobs.ray_job import WorkerPods, ray_job

Gather = Callable[[Path], tuple[list[str], Path | None]]
"""A function that copies a command's files into a directory; it returns its words with their new paths."""


def manifest_yaml(words: Sequence[str], positional: Sequence[int], gather: Gather, *, image: str) -> str:
    """Return the manifest of a command as YAML documents, for `kubectl apply --server-side -f -`.

    Args:
        words: the command and its arguments, without `--runs-dir`.
        positional: positions of its arguments.
        gather: copies the command's files.
        image: image of a container with orchestray installed.

    Raises:
        ConfigError: the command is another than `train` or `search`, its config is wrong, or its files are too large.
    """
    from orchestray.platform.config import yaml_text

    name, pods = _asked(words[0], [words[index] for index in positional], _option(words, "--name"))
    with tempfile.TemporaryDirectory(prefix="orchestray-") as scratch:
        moved, root = gather(Path(scratch))
        found = [] if root is None else [file for file in root.rglob("*") if file.is_file()]
        files = {file.relative_to(root).as_posix(): file for file in found if root is not None}
        return "---\n".join(yaml_text.write(each) for each in ray_job(name, moved, files, pods, image=image))


def check_options(*, follow: bool, address: str | None, working_dir: Path | None, runs_dir: str | None) -> None:
    """Refuse what has no meaning for a manifest."""
    given = {
        "--follow": (follow, "kubectl logs shows the log"),
        "--address": (address is not None, "kubectl says where it goes"),
        "--working-dir": (working_dir is not None, "the files that the config names are in it"),
        "--runs-dir": (runs_dir is not None, f"runs go to the volume NAME-runs, which is {RUNS} in the pods"),
    }
    problems = [f"{option}: goes with no --manifest: {reason}" for option, (there, reason) in given.items() if there]
    if problems:
        raise ConfigError(problems)


def _asked(command: str, arguments: Sequence[str], name: str | None) -> tuple[str, WorkerPods]:
    """Return the name of the run, and the pods that its workers need."""
    if command not in {"train", "search"}:
        raise ConfigError(f"--manifest: takes the commands train and search, got {command}")
    config, *overrides = arguments
    return (_training if command == "train" else _search)(config, overrides, name)


def _training(source: str, overrides: Sequence[str], name: str | None) -> tuple[str, WorkerPods]:
    """Return the pods of a training: workers that split layers are neighbours, and so are all that share memory."""
    from orchestray.trainers.config.load import load_train_config

    config = load_train_config(source, overrides, name=name)
    network, exchange, resources = config.strategy.network, config.strategy.exchange, config.resources
    size = network.data * network.tensor * network.pipeline
    together = network.tensor
    if exchange.type == "parameter_server":
        together = size if exchange.transport == "shared_memory" else network.tensor * network.pipeline
    count = size // together + -(-resources.spares // together)
    return config.name, WorkerPods(count, together, resources.cpus_per_worker, resources.gpus_per_worker)


def _search(source: str, overrides: Sequence[str], name: str | None) -> tuple[str, WorkerPods]:
    """Return the pods of a search: one for each trial that runs beside the others, with all its workers."""
    from orchestray.search.config.gangs import most_workers
    from orchestray.search.config.load import load_search_config

    config = load_search_config(source, overrides, name=name)
    workers = max(1, most_workers(config.base, config.search.space))
    resources = config.base.resources
    return config.name, WorkerPods(
        config.search.parallel, workers, resources.cpus_per_worker, resources.gpus_per_worker
    )


def _option(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option; None: it is not given."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else words[index + 1]
    return None
