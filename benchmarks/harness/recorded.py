"""Earlier results of a benchmark, for a run that measures only a part of it: cases, or times apart from trainings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import benchmark, machine

_OURS = ("orchestray", "commit")
"""Versions that may differ: the note on what was kept tells them."""


@dataclass(frozen=True)
class Record:
    """The cases of an earlier result that can stand beside new ones."""

    details: dict[str, Any] = field(default_factory=dict)
    """The raw numbers of each case."""
    origins: dict[str, str] = field(default_factory=dict)
    """Date and commit of each measurement."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Numbers by the name of a measurement."""

    def notes(self) -> list[str]:
        """Return what a reader must know of rows that were not measured with the others."""
        return [
            f"{num_rows} of the rows were measured before the others, on a machine of the same kind ({moment}); "
            "`settings.kept` in the .json file names them."
            for moment, num_rows in Counter(self.origins.values()).items()
        ]

    def without(self, names: list[str]) -> Record:
        """Return the record without the cases that are measured again."""
        kept = [name for name in self.details if name not in names]
        return Record({n: self.details[n] for n in kept}, {n: self.origins[n] for n in kept}, self.values)


def load(path: Path, settings: Mapping[str, Any], cases: Mapping[str, Any]) -> Record:
    """Return the cases of the result at `path` that were measured as they would be now.

    Args:
        path: a result's .json file.
        settings: what all cases have in common.
        cases: what each changes; one that has changed since, or is gone, is left out.

    Raises:
        BenchmarkError: there is no result, or it is of another kind of machine, other versions or other settings.
    """
    if not path.exists():
        raise benchmark.BenchmarkError(f"there is no {path.name} to keep anything of: leave --keep out")
    result = json.loads(path.read_text(encoding="utf-8"))
    versions = {name: text for name, text in machine.versions().items() if name not in _OURS}
    _compare("machine", result["machine"], machine.description())
    _compare("versions", result["versions"], versions)
    _compare("settings", result["settings"], json.loads(json.dumps(settings)))
    moment = f"{result['began']}, commit {result['versions'].get('commit', 'unknown')}"
    before = result["settings"].get("kept", {})
    then = result["settings"]["strategies"]
    names = [name for name in result["details"] if name in cases and then.get(name) == cases[name]]
    return Record(
        {name: result["details"][name] for name in names},
        {name: before.get(name, moment) for name in names},
        {measured["name"]: measured["values"] for measured in result["measurements"]},
    )


def add_trained_option(parser: Any) -> None:
    parser.add_argument(
        "--trained",
        type=Path,
        default=None,
        metavar="FILE",
        help="where the results of trainings are kept, one by one; those that are there are not trained again",
    )


def trained(
    path: Path | None, settings: Mapping[str, Any], cells: Iterable[str], train: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the result of each cell: what is kept at `path`, or else that of a training, which is kept there.

    So steps, which do not depend on what else a machine does, can be measured apart from times.

    Args:
        path: the file; None: nothing is kept.
        settings: those of all trainings; what was kept with others is not used.
        cells: names.
        train: returns what JSON can hold.
    """
    told, found = json.loads(json.dumps(settings)), {}
    if path is not None and path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = kept["found"] if kept["settings"] == told else {}
    for cell in cells:
        if cell not in found:
            found[cell] = json.loads(json.dumps(train(cell)))
            if path is not None:
                path.write_text(json.dumps({"settings": told, "found": found}), encoding="utf-8")
    return found


def _compare(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a BenchmarkError if something that there is now was different then."""
    differing = [f"{key} {then.get(key)!r} then, {value!r} now" for key, value in now.items() if then.get(key) != value]
    if differing:
        raise benchmark.BenchmarkError(
            f"what is recorded was measured with other {what} ({'; '.join(differing)}), and rows of both in one table "
            "would mislead: measure all of them, without --keep"
        )
