"""A command of the table of systems, run as a user types it in an empty folder, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import shutil
import signal
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestray.platform.cluster.cluster import Cluster
from support.cli import Running, beside, orchestray_here, read_lines
from support.machines import Machines
from support.patience import PATIENCE_S
from support.serve_command import Endpoint

ROOT = Path(__file__).parents[2]
MARKERS: dict[str, dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests" / "systems_markers.yaml").read_text(encoding="utf-8")
)
"""By command: `first`, commands that are run before; `meanwhile`, a training under way while it runs, ended after it;
`with`, words that shorten it; `systems`, by name the marker.
"""
_STEPS_AFTER = 50


@dataclass
class LeftBehind:
    """The output and the files of a command.

    Attributes:
        output: what it printed.
        result: the newest `result.json`.
        metrics: the lines of the run's `metrics.jsonl`, or of the search's `trials.jsonl`.
        events: its events.
        files: paths of all files, relative to the folder.
        config: the run's `config.yaml`.
    """

    output: str
    result: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    files: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def lacks(self, marker: Mapping[str, Any]) -> list[str]:
        """Return what of a marker is not here.

        Args:
            marker: what must have been left, by where: `parts`, names of classes in `result.json`; `result`, values
                by their dotted path there (null: any value that is not null); `below`, numbers that are above those at
                their dotted path there; `metrics`, keys that a line has, or values by key (a text between slashes: a
                regular expression for the whole value; a list: each of them, on lines of their own); `event`, a name,
                or some of its values; `prints`, a regular expression; `file`, a pattern; `workers`, their number;
                `config`, values of the run's config, for what is a parameter of a class; `plain`, true for what a
                plain training leaves as well.
        """
        return [f"{kind}: {wanted}" for kind, wanted in marker.items() if not self._has(kind, wanted)]

    def _has(self, kind: str, wanted: Any) -> bool:
        many = wanted if isinstance(wanted, list) else [wanted]
        match kind:
            case "parts":
                return set(many) <= set(self.result.get("parts", ()))
            case "result":
                return all(_is(_at(self.result, path), value) for path, value in wanted.items())
            case "below":
                return all(0 < (_at(self.result, path) or 0) < limit for path, limit in wanted.items())
            case "above":  # `below` turned round: numbers that are below those at their dotted path
                return all((_at(self.result, path) or 0) > limit for path, limit in wanted.items())
            case "metrics":
                values = wanted if isinstance(wanted, Mapping) else dict.fromkeys(many)
                pairs = [(p, one) for p, v in values.items() for one in (v if isinstance(v, list) else [v])]
                return all(any(_is(_at(line, path), value) for line in self.metrics) for path, value in pairs)
            case "event":
                asked = [one if isinstance(one, Mapping) else {"event": one} for one in many]
                return all(any(one.items() <= event.items() for event in self.events) for one in asked)
            case "prints":
                return all(re.search(pattern, self.output, re.MULTILINE) for pattern in many)
            case "file":
                return all(any(Path(name).match(pattern) for name in self.files) for pattern in many)
            case "config":
                return all(_is(_at(self.config, path), value) for path, value in wanted.items())
            case "workers":
                return len(self.result.get("workers", ())) == wanted
            case "plain":
                return True
        raise ValueError(f"a marker of the kind {kind}")


def _at(values: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is none. Keys may have dots themselves."""
    if isinstance(values, Mapping):
        if path in values:
            return values[path]
        key, _, rest = path.partition(".")
        return _at(values.get(key), rest) if rest else None
    if isinstance(values, list):
        key, _, rest = path.partition(".")
        value = values[int(key)] if key.isdigit() and int(key) < len(values) else None
        return _at(value, rest) if rest else value
    return None


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and wanted.startswith("/") and wanted.endswith("/"):
        return isinstance(value, str) and re.fullmatch(wanted[1:-1], value) is not None
    if isinstance(wanted, float) and isinstance(value, float | int):
        return math.isclose(value, wanted, rel_tol=1e-6)
    return value is not None if wanted is None else bool(value == wanted)


def desk(folder: Path) -> Path:
    """Make an empty folder into one with the configs of the project."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "configs").exists():
        shutil.copytree(ROOT / "configs", folder / "configs")
    return folder


def run(
    command: str, folder: Path, cluster: Cluster, more: Sequence[str] = (), meanwhile: str | None = None
) -> LeftBehind:
    """Run a command in a folder, and return what it left there.

    Args:
        command: the command, as the table has it.
        folder: the folder, with the configs.
        cluster: the Ray of this process, on which trainings and searches run; an endpoint that asks for one gets a
            cluster of two machines.
        more: words added to it, which shorten it.
        meanwhile: a training that is under way meanwhile, and leaves its files.
    """
    _, *words = shlex.split(command)
    before = _results(folder)
    if words[0] == "serve" and "--manifest" not in words:
        if "--address" not in words:
            return LeftBehind(_served([*words[1:], *more], folder, {}))
        with _two_machines(folder) as env:
            return LeftBehind(_served([*words[1:], *more], folder, env))
    with _under_way(meanwhile, folder, cluster), contextlib.chdir(folder):
        done = orchestray_here(*words, *more)
    text = done.stdout + done.stderr
    if done.returncode:
        raise AssertionError(f"{command} {' '.join(more)} ended with status {done.returncode}:\n{text}")
    new = [path for path, written_ns in _results(folder).items() if written_ns != before.get(path)]
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if "configs" not in path.parts]
    if not new:
        return LeftBehind(text, files=files)
    place = max(new, key=lambda path: path.stat().st_mtime).parent
    lines = [line for name in ("metrics.jsonl", "trials.jsonl") for line in read_lines(place / name)]
    result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((place / "config.yaml").read_text(encoding="utf-8"))
    return LeftBehind(text, result, lines, read_lines(place / "events.jsonl"), files, config)


@contextlib.contextmanager
def _two_machines(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which a command finds a cluster of two machines, which ends then."""
    machines = Machines(folder)
    try:
        machines.repair()
        yield {**machines.token, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": machines.gcs_address}
    finally:
        machines.stop()


@contextlib.contextmanager
def _under_way(command: str | None, folder: Path, cluster: Cluster) -> Iterator[None]:
    """Have a training go on inside, and for some steps after; then interrupt it."""
    if command is None:
        yield
        return
    _, *words = shlex.split(command)
    running = Running(words, folder / "runs" / Path(words[1]).stem, folder, env=beside(cluster))
    try:
        running.until("a step", running.steps)
        yield
        step = running.steps()
        running.until("some steps more", lambda: running.steps() > step + _STEPS_AFTER)
    finally:
        running.signal(signal.SIGINT)
        status, _, text = running.finish()
    assert status in (0, 130), text


def _results(folder: Path) -> dict[Path, int]:
    """Return the results of runs in a folder, with the times at which they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}


def _served(arguments: Sequence[str], folder: Path, env: dict[str, str]) -> str:
    """Ask an endpoint a few questions at once; return what it says of itself: metrics, models, and what it printed."""
    endpoint = Endpoint(*arguments, cwd=folder, local=False, env=env)
    try:
        example = json.loads(_read(f"{endpoint.url}/models"))[0]["example"]
        with ThreadPoolExecutor(8) as several:
            assert len(list(several.map(endpoint.predict, [example] * 32))) == 32
        told = [_read(f"{endpoint.url}/{page}") for page in ("metrics", "models")]
    finally:
        status, text = endpoint.end(signal.SIGINT)
    assert status in (0, 130), text
    return "\n".join((endpoint.started, *told, text))


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text
