"""Write the results of the network's benchmarks into their place in docs/network.md: `python benchmarks/docs.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import harness

_PAGE = harness.REPOSITORY / "docs" / "network.md"
_BEGIN, _END = "<!-- results of the benchmarks: begin -->", "<!-- results of the benchmarks: end -->"
_GOALS = ("pipeline", "sharding", "tensor_parallel", "recompute", "split")


def main() -> None:
    layouts = _result("layouts")
    found = {name: result for name in _GOALS if (result := _result(name)) is not None}
    if layouts is None and not found:
        sys.exit(f"there are no results of the network in {harness.RESULTS.name}/: run benchmarks/run_all.py first")
    before, begin, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        sys.exit(f"{_PAGE.name} has no place for results: a line '{_BEGIN}', and after it a line '{_END}'")
    lines = _layouts(layouts) if layouts is not None else []
    lines += _held_against(found) if found else []
    _PAGE.write_text("\n".join([before + begin, "", *lines, end + after]), encoding="utf-8")


def _layouts(result: dict[str, Any]) -> list[str]:
    machine, table = result["machine"], result["tables"][0]
    return [
        f"One training, a fully connected network of 0.8 M parameters, under each layout on {machine['cores']} cores.",
        "So small a one shows what is sent and kept, and what is exact, not how fast a large model would be.",
        "",
        *harness.table(table["header"], table["rows"]),
        *(f"- {note}" for note in result["notes"]),
        "",
    ]


def _held_against(results: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        [name, goal["name"], f"{goal['value']:.3g}", f"{goal['limit']:.3g}"]
        for name, result in results.items()
        for goal in result["goals"]
    ]
    return [
        "Against what others do, and against what was promised; the files of `benchmarks/results/` have every number:",
        "",
        *harness.table(["benchmark", "what", "median", "goal: at most"], rows),
    ]


def _result(name: str) -> dict[str, Any] | None:
    path: Path = harness.RESULTS / f"{name}.json"
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    main()
