"""`orchestray submit`: a command as a job on a Ray cluster."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestray.platform.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from orchestray.platform.jobs.files import JobFiles

app = typer.Typer()

_NOT_AS_JOBS = ("submit", "jobs", "dashboard")
_YAML = (".yaml", ".yml")
_EPILOG = (  # one paragraph each: within one, line breaks would be kept
    "Examples:\n\n"
    "orchestray submit --address http://127.0.0.1:8265 --follow train configs/train/digits.yaml train.epochs=3\n\n"
    "orchestray submit --address http://127.0.0.1:8265 --follow runs list\n\n"
    "orchestray submit --manifest train configs/train/digits.yaml | kubectl apply --server-side -f -\n\n"
    "Sent along are the config, the files it names by relative paths, a task file with the modules beside it that "
    "it imports, and orchestray itself; what else it needs (torch, ...) must be installed on the cluster. Absolute "
    "paths and URIs of data are those of the cluster.\n\n"
    "Runs go to ~/orchestray-runs on the cluster, or to the --runs-dir of COMMAND; a relative one starts at the "
    "home directory of the user Ray runs as. On several machines, choose a directory that all of them see."
)


@dataclass(frozen=True)
class _Words:
    """A command's words, parsed: the positions of its arguments, and its runs directory."""

    words: tuple[str, ...]
    positional: tuple[int, ...]
    runs_dir: str | None
    """Directory of its runs; None for a command that has none."""


@app.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="A command of orchestray, and its arguments.", show_default=False),
    ],
    *,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the job's log, and exit with the exit status of the command.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="URL", help="The cluster's dashboard; default: $RAY_API_SERVER_ADDRESS."),
    ] = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            "--working-dir",
            metavar="DIR",
            help="Send all of this directory (but what its .gitignore names) in place of single files; "
            "modules in it can be imported.",
            show_default=False,
        ),
    ] = None,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Print Kubernetes objects for the job, and do no more.")
    ] = False,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="Container image that --manifest names.")
    ] = "orchestray:latest",
) -> None:
    """Run a command as a job on a Ray cluster.

    Prints the job's id as the last line; with --follow its log. Ctrl-C while following leaves the job running.
    """
    from orchestray.platform.jobs.address import job_address

    parsed = _parse(command)
    if manifest:
        _print_manifest(parsed, image, follow=follow, address=address, working_dir=working_dir)
        return
    job_address(address)
    _check_config(parsed)
    try:
        server, job_id = _send(parsed, address, working_dir)
    except KeyboardInterrupt:
        _say("Interrupted.")
        raise typer.Exit(130) from None
    if not follow:
        print(job_id)
        return
    raise typer.Exit(show_until_end(server, job_id))


def show_until_end(server: Any, job_id: str) -> int:
    """Print a job's log as it grows, and return the exit status of its command; 130 if interrupted."""
    try:
        job = server.follow(job_id, _write)
    except KeyboardInterrupt:
        _say(
            f"\nJob {job_id} goes on. `orchestray jobs logs --follow {job_id}` shows its log again, "
            f"`orchestray jobs stop {job_id}` stops it."
        )
        return 130
    if job.exit_status is None:
        raise ClusterError(f"Job {job_id} failed without its command: {job.message or 'no reason is known'}")
    if job.status == "stopped":
        _say(f"Job {job_id} was stopped.")
    return int(job.exit_status)


def _print_manifest(parsed: _Words, image: str, *, follow: bool, address: str | None, working_dir: Path | None) -> None:
    from orchestray.cli.submit_manifest import check_options, manifest_yaml
    from orchestray.platform.jobs.submit import DEFAULT_RUNS_DIR

    runs_dir = None if parsed.runs_dir == DEFAULT_RUNS_DIR else parsed.runs_dir
    check_options(follow=follow, address=address, working_dir=working_dir, runs_dir=runs_dir)
    print(manifest_yaml(parsed.words, parsed.positional, partial(_gather, parsed, None), image=image), end="")


def _send(parsed: _Words, address: str | None, working_dir: Path | None) -> tuple[Any, str]:
    from orchestray.platform.jobs.files import copy_package
    from orchestray.platform.jobs.submit import JobServer, entrypoint

    with tempfile.TemporaryDirectory(prefix="orchestray-") as scratch:
        words, sent_dir = _gather(parsed, working_dir, Path(scratch) / "files")
        server = JobServer(address)
        _warn_of_versions(server.ray_version)
        package = copy_package(Path(scratch))
        job_id = server.submit(
            shlex.join(parsed.words), entrypoint(words, parsed.runs_dir), package=package, working_dir=sent_dir
        )
    place = "" if parsed.runs_dir is None else f"; its runs go to {_shown(parsed.runs_dir)} there"
    _say(f"Job {job_id} is on the cluster at {server.address}{place}.")
    return server, job_id


def _gather(parsed: _Words, working_dir: Path | None, directory: Path) -> tuple[list[str], Path | None]:
    """Copy the files to send into `directory`; return the words with their new paths, and the directory to send."""
    from orchestray.platform.jobs.files import JobFiles

    files, words, places = JobFiles(), list(parsed.words), dict[int, Path]()
    for index in parsed.positional:
        word = words[index]
        if word.endswith(_YAML) and Path(word).is_file():
            files.add_config(Path(word), word)
            places[index] = Path(word).absolute()
        elif "=" in word:
            place = files.add_override(word)
            if place is not None:
                places[index] = place
    files.check()
    root = _checked_working_dir(working_dir, files) if working_dir else files.root if files.paths else None
    for index, place in places.items():
        words[index] = _moved(words[index], os.path.relpath(place, root))
    if working_dir is None and files.paths:
        files.copy_to(directory)
        root = directory
    return words, root


def _moved(word: str, place: str) -> str:
    """Return a word with its path replaced: that of a config, of `key=path`, or of `key=file.py:Class`."""
    key, equals, value = word.partition("=")
    if not equals or (word.endswith(_YAML) and Path(word).is_file()):
        return place
    _, colon, name = value.rpartition(":")
    return f"{key}={place}{colon}{name if colon else ''}"


def _checked_working_dir(working_dir: Path, files: JobFiles) -> Path:
    directory = working_dir.absolute()
    if not directory.is_dir():
        raise ConfigError(f"--working-dir: there is no directory {working_dir}.")
    if (directory / "platform" / "__init__.py").is_file() or (directory / "platform.py").is_file():
        raise ConfigError(
            f"--working-dir: {working_dir} has a module named platform, which would hide Python's own from Ray. "
            "Rename it."
        )
    if files.changed:
        named = ", ".join(map(str, sorted(files.changed)))
        raise ConfigError(f"--working-dir: {named} names a Python file by its absolute path; make it a relative one.")
    outside = sorted(str(file) for file in files.paths if not file.is_relative_to(directory))
    if outside:
        raise ConfigError(f"--working-dir: {', '.join(outside)} would not be sent, being outside {working_dir}.")
    return directory


def _check_config(parsed: _Words) -> None:
    """Check a training config here, while the user waits, instead of on the cluster."""
    if parsed.words[0] != "train":
        return
    from orchestray.trainers.config.load import load_train_config

    config, *overrides = (parsed.words[index] for index in parsed.positional)
    load_train_config(config, overrides)


def _parse(words: Sequence[str]) -> _Words:
    """Parse the words as `orchestray` would, with the same errors; --help shows the help."""
    from orchestray.cli.app import app as orchestray

    if words[0] in _NOT_AS_JOBS:
        raise ConfigError(f"`orchestray {words[0]}` is for this side of the cluster: it cannot run as a job.")
    _refuse_own_options(words)
    group: Any = typer.main.get_command(orchestray)
    parent = typer.Context(group, info_name="orchestray")
    rest = list(words)
    while True:
        name, command, rest = group.resolve_command(parent, rest)
        if not hasattr(command, "resolve_command") or not rest or rest[0].startswith("-"):
            break
        parent = typer.Context(command, info_name=name, parent=parent)
        group = command
    command.make_context(name, list(rest), parent=parent)
    num_leading = len(words) - len(rest)
    return _split(tuple(words), num_leading, [param for param in command.params if param.param_type_name == "option"])


def _split(words: tuple[str, ...], num_leading: int, options: Sequence[Any]) -> _Words:
    """Separate a command's arguments from its options, and take out --runs-dir."""
    from orchestray.platform.jobs.submit import DEFAULT_RUNS_DIR

    with_value = {name for option in options if not option.is_flag for name in option.opts}
    runs_dir = DEFAULT_RUNS_DIR if "--runs-dir" in with_value else None
    kept, positional = list(words[:num_leading]), list[int]()
    rest = iter(words[num_leading:])
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--":
            positional += range(len(kept), len(words))
            kept += rest
        elif name == "--runs-dir":
            runs_dir = value if equals else next(rest)
        elif word.startswith("-") and len(word) > 1:
            kept += [word, next(rest)] if word in with_value else [word]
        else:
            positional.append(len(kept))
            kept.append(word)
    return _Words(tuple(kept), tuple(index for index in positional if index < len(kept)), runs_dir)


def _refuse_own_options(words: Sequence[str]) -> None:
    """Raise an error for options of `submit` after COMMAND, which would be taken for the command's."""
    for index, word in enumerate(words):
        value = word.partition("=")[2] or "".join(words[index + 1 : index + 2])
        if word == "--follow" or (word.partition("=")[0] == "--address" and value.startswith(("http://", "https://"))):
            option = word.partition("=")[0]
            raise ConfigError(
                f"{option} belongs to `submit`: put it before the command, submit {option} ... {words[0]} ..."
            )


def _warn_of_versions(on_cluster: str) -> None:
    from importlib.metadata import version

    if on_cluster != version("ray"):
        _say(f"Warning: the cluster runs Ray {on_cluster}, here is {version('ray')}; the job may not work there.")


def _shown(runs_dir: str) -> str:
    return runs_dir if runs_dir.startswith("/") else f"~/{runs_dir}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
