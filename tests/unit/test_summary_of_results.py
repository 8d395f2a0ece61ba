"""The summary of the benchmarks says what their results say, and the pages what the results say."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def rows(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", line) for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_the_summary_is_of_the_results_that_lie_beside_it(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    command = [sys.executable, "benchmarks", "run_all", "--results-dir", str(results), "--only"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert rows((results / "summary.md").read_text()) == rows((RESULTS / "summary.md").read_text())


def test_the_pages_show_the_results_that_are_there(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    command = [sys.executable, "benchmarks", "docs", "--docs-dir", str(docs)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for page in sorted(docs.rglob("*.md")):
        assert page.read_text() == (ROOT / "docs" / page.relative_to(docs)).read_text(), page.name


def test_what_the_page_of_searches_says_of_bayesian_regret_is_what_was_measured() -> None:
    result = json.loads((RESULTS / "bayesian.json").read_text())
    page = " ".join((ROOT / "docs" / "explanation" / "search-methods.md").read_text().split())
    told = page.partition("### The models of bayesian")[2].partition("## ")[0]
    median = {one["name"]: one["median"] for one in result["measurements"]}
    for model, form in (("gaussian_process", "{:.1g}"), ("tpe", "{:.2g}"), ("TPESampler", "{:.2g}")):
        for function in ("Branin, 40 trials", "Hartmann-6, 80 trials"):
            assert form.format(median[f"{function}, 1 at once: regret of {model}"]) in told, (function, model)


def test_what_is_said_of_the_speed_of_optimizers_is_what_was_measured() -> None:
    goals = json.loads((RESULTS / "optimizers.json").read_text())["goals"]
    page = " ".join((ROOT / "docs" / "how-to" / "choose-an-optimizer.md").read_text().split())
    small = [goal["value"] for goal in goals if not goal["name"].startswith("20 M")]
    assert f"a step takes {min(small):.2f} to {max(small):.2f} of the time of `torch.optim`" in page
    assert all(abs(goal["value"] - 1) < 0.03 for goal in goals if goal["name"].startswith("20 M"))
    assert all(goal["met"] for goal in goals)


def test_the_p95_of_a_push_beside_a_flood_of_copies_was_within_the_factor_that_is_stated() -> None:
    """Compare real processes: with a connection of its own for the copy, and without. The README has the factor."""
    result = json.loads((RESULTS / "replication_flood.json").read_text())
    text = (ROOT / "benchmarks" / "README.md").read_text()
    factor = float(re.findall(r"^\| `replication_flood` \|[^|]*\| ([\d.]+) x; 1 x ", text, flags=re.MULTILINE)[0])
    p95 = {one["name"].partition(":")[0]: one["values"] for one in result["measurements"] if "p95" in one["name"]}
    flood = {one["name"].partition(":")[0]: one["min"] for one in result["measurements"] if "flood" in one["name"][-6:]}
    quiet, beside, own = p95["no flood"], p95["another copy's connection"], p95["the worker's connection"]
    assert min(flood.values()) > 500  # MB/s
    assert all(1 < flooded / alone <= factor for flooded, alone in zip(beside, quiet, strict=True))
    assert all(flooded < shared for flooded, shared in zip(beside, own, strict=True))


def test_the_advice_on_optimizers_is_what_was_measured() -> None:
    result = json.loads((RESULTS / "second_order.json").read_text())
    digits, source = (
        {row[0]: dict(zip(table["header"][1:], row[1:], strict=True)) for row in table["rows"]}
        for table in result["tables"]
    )

    def number(row: dict[str, str], column: str) -> float:
        return float(row[column].partition(" ")[0])

    assert {kind for kind, row in source.items() if row["training"].startswith(">")} == {"SGD", "LARS"}
    assert all(number(source[kind], "steps") < 0.6 * number(source["AdamW"], "steps") for kind in ("Muon", "SOAP"))
    assert number(source["Muon"], "state") < number(source["AdamW"], "state") < number(source["SOAP"], "state") / 3
    assert number(digits["K-FAC"], "training") == min(number(row, "training") for row in digits.values())
    assert number(digits["K-FAC"], "state") == max(number(row, "state") for row in digits.values())
    assert all(round(number(rows["K-FAC"], "step")) == 2 for rows in (digits, source))
    assert number(source["K-FAC"], "training") > number(source["AdamW"], "training")


def test_what_is_said_of_memory_and_of_methods_that_end_early_is_what_was_measured() -> None:
    result = json.loads((RESULTS / "proposal_cost.json").read_text())
    text = " ".join((ROOT / "benchmarks" / "README.md").read_text().split())
    trials = {row[0]: int(row[1]) for row in result["tables"][0]["rows"]}
    wanted = result["settings"]["finished_trials"]
    ended = {name for name, num in trials.items() if num < wanted}
    assert ended == {"spectral", "reinforce", "progressive", "progressive, chain", "omnivore"}
    about = [f"{round(trials[name], -2):,}" for name in ("spectral", "reinforce", "progressive")]
    assert f"after about {about[0]}, {about[1]} and {about[2]} trials there" in text
    assert f"over `chain` after {trials['progressive, chain']}," in text
    assert f"the {trials['omnivore']} points of its grid" in text
    kept_kb = [goal["value"] for goal in result["goals"] if "leaves behind" in goal["name"]]
    assert f"0.6 to {math.ceil(max(kept_kb))} kB" in text


def test_the_names_of_benchmarks_are_those_of_the_readme_and_of_the_run_of_all() -> None:
    done = subprocess.run([sys.executable, "benchmarks"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = re.findall(r"^\w+: (.+)$", done.stdout, flags=re.MULTILINE)
    found = {name for line in names for name in line.split(", ")} - {"run_all", "docs", "make_table", "before_after"}
    text = (ROOT / "benchmarks" / "README.md").read_text()
    assert found == set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    table = ast.parse((ROOT / "benchmarks" / "harness" / "run_all.py").read_text())
    (listed,) = [
        ast.literal_eval(node.value)
        for node in table.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCHMARKS"
    ]
    assert found == set(listed)


def test_a_name_that_is_not_a_benchmark_is_refused() -> None:
    command = [sys.executable, "benchmarks", "nothing"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no benchmark 'nothing'" in done.stderr
