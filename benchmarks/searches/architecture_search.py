"""Ten minutes of architecture search on `digits`: a network as good as the hand-written one, with fewer weights.

`orchestray search configs/search/digits-architecture.yaml` runs from the command line on two cores; Ray's start counts.
Of its trials that were trained to the end, the most accurate one with fewer parameters than the CNN of
configs/train/digits-cnn.yaml is taken. `orchestray train` trains both for the same steps with the same seed and
settings; their accuracy is measured from the weights that were saved. Both, and the choice, see the same 360 images;
what the choice owes to chance shows when the two are trained with seeds that the search has not used.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from harness import benchmark
from harness.commands import script
from orchestray.search.config.load import load_search_config
from orchestray.search.config.trial import trial_config
from orchestray.search.results.run import SearchRun, load_search
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.saved.run import load_run

_SEARCH = benchmark.REPOSITORY / "configs/search/digits-architecture.yaml"
_BY_HAND = benchmark.REPOSITORY / "configs/train/digits-cnn.yaml"
_LIMIT_S = 600.0
_TIMEOUT_S = 1200.0
_SEEDS, _FRESH_SEEDS = 3, 3


def orchestray(*arguments: str) -> None:
    """Run a command, as a user would."""
    command = [script("orchestray"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise benchmark.BenchmarkError(f"orchestray {' '.join(arguments[:2])} failed: {done.stderr[-2000:]}")


def measured(run: Path) -> tuple[float, int]:
    """Return validation accuracy and number of parameters of a run's network, from its saved weights."""
    loaded = load_run(run)
    model, task = loaded.load_model().eval(), loaded.load_task()
    batch = task.to_batch(task.dataset("validation"))
    accuracy = task.metrics(model(batch["inputs"]), batch)["accuracy"].item()
    return accuracy, sum(parameter.numel() for parameter in model.parameters())


def trained(config: Path, name: str, runs: Path, *overrides: str) -> tuple[float, int]:
    """Train a config, and measure what it leaves."""
    orchestray("train", str(config), *overrides, "--name", name, "--runs-dir", str(runs), "--quiet")
    return measured(runs / name)


def by_hand(name: str, runs: Path, steps: int, seed: int) -> tuple[float, int]:
    """Train the hand-written network by one worker for `steps` steps, with the search's settings otherwise."""
    overrides = ("strategy.network.data=1", "train.epochs=null", "train.until=null", f"train.steps={steps}")
    return trained(_BY_HAND, name, runs, *overrides, f"train.seed={seed}")


def chosen(search: SearchRun, steps: int, fewer_than: int) -> dict[str, Any]:
    """Return the line of the best trial with fewer parameters that was trained to its end, with its `accuracy`."""
    last = {row["trial"]: row["metrics"]["accuracy"] for row in search.reports().to_pylist() if row["step"] == steps}
    fits = [
        {**line, "accuracy": last[line["trial"]]}
        for line in search.lines()
        if line["trial"] in last and line.get("parameters", fewer_than) < fewer_than
    ]
    if not fits:
        raise benchmark.BenchmarkError("no network with fewer parameters was trained to the end")
    return max(fits, key=lambda line: (line["accuracy"], -line["parameters"]))


def one_seed(options: benchmark.Options, seed: int) -> dict[str, Any]:
    """Run a search, and train the two networks it is about."""
    runs, name = options.workspace / "runs", f"search-{seed}"
    short = ["search.budget.steps_per_trial=46", "search.budget.trials=8", "search.method.proposals.population=4"]
    short += ["search.method.proposals.sample_size=2", "search.method.grace_steps=46"]
    overrides = [f"search.seed={seed}", f"base.train.seed={seed}", *(short if options.quick else [])]
    began_s = time.perf_counter()
    orchestray("search", str(_SEARCH), *overrides, "--name", name, "--runs-dir", str(runs), "--quiet")
    took_s = time.perf_counter() - began_s
    search = load_search(runs / name)
    config = load_search_config(runs / name / "config.yaml")
    steps = config.steps_per_trial
    hand_accuracy, hand_parameters = by_hand(f"hand-{seed}", runs, steps, seed)
    line = chosen(search, steps, hand_parameters)
    found_file = options.workspace / f"found-{seed}.yaml"
    found_file.write_text(dump_yaml(trial_config(config, line["config"], line["genome"], trial=line["trial"])))
    accuracy, parameters = trained(found_file, f"found-{seed}", runs)
    if abs(accuracy - line["accuracy"]) > 1e-6:
        raise benchmark.BenchmarkError(
            f"trial {line['trial']} reported an accuracy of {line['accuracy']}, and trained again it has {accuracy}"
        )
    fresh = [1000 + 10 * seed + number for number in range(1 if options.quick else _FRESH_SEEDS)]
    return {
        "seed": seed,
        "search_s": took_s,
        "counts": search.result["counts"],
        "trial": line["trial"],
        "genome": line["genome"],
        "accuracy": accuracy,
        "parameters": parameters,
        "flops": line.get("flops"),
        "hand_accuracy": hand_accuracy,
        "hand_parameters": hand_parameters,
        "fresh": [trained(found_file, f"found-{s}", runs, f"train.seed={s}")[0] for s in fresh],
        "hand_fresh": [by_hand(f"hand-{s}", runs, steps, s)[0] for s in fresh],
    }


def fresh_note(found: list[dict[str, Any]]) -> str:
    """Return what the choice owes to chance, from the searches as `one_seed` returns them."""
    ours = statistics.mean(accuracy for one in found for accuracy in one["fresh"])
    hand = statistics.mean(accuracy for one in found for accuracy in one["hand_fresh"])
    difference = ours - hand
    than = f"{abs(difference):.4f} {'more' if difference > 0 else 'less'} accurate than the hand-written one"
    num = sum(len(one["fresh"]) for one in found)
    return (
        "The accuracies that the goal compares are of the images by which the search chose its networks, and of its "
        f"own seeds. Trained anew with seeds that it has not used ({num} trainings of each side) and validated on the "
        f"same images, the networks found are on average {than}: {ours:.4f} against {hand:.4f}."
    )


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    config = load_train_config(_BY_HAND)
    seeds = options.rounds(_SEEDS)
    report.settings = {"seeds": seeds, "hand_written_channels": config.task.model_dump().get("hidden"), "cores": 2}
    found = []
    for seed in range(seeds):
        benchmark.say(f"seed {seed}")
        found.append(one_seed(options, seed))
    report.details["searches"] = found
    for key, name, unit in (
        ("accuracy", "accuracy of the network found", ""),
        ("hand_accuracy", "accuracy of the hand-written one", ""),
        ("parameters", "parameters of the network found", ""),
        ("hand_parameters", "parameters of the hand-written one", ""),
        ("search_s", "the search, with Ray's start", "s"),
    ):
        report.add(name, unit, [one[key] for one in found])
    ours, hand = [a for one in found for a in one["fresh"]], [a for one in found for a in one["hand_fresh"]]
    report.add("accuracy of the network found, by seeds the search has not used", "", ours)
    report.add("accuracy of the hand-written one, by the same", "", hand)
    report.goal(
        "accuracy missing to the hand-written one, worst seed",
        max(one["hand_accuracy"] - one["accuracy"] for one in found),
        0.0,
    )
    report.goal(
        "parameters, of the hand-written one's, worst seed",
        max(one["parameters"] / one["hand_parameters"] for one in found),
        0.999,
        "x",
    )
    if not options.quick:
        report.goal("the search, longest", max(one["search_s"] for one in found), _LIMIT_S, "s")
    report.notes.append(fresh_note(found))
    trials = [sum(one["counts"].values()) for one in found]
    report.notes.append(f"{min(trials)} to {max(trials)} networks a search.")


if __name__ == "__main__":
    benchmark.run(
        "architecture_search", "Ten minutes of architecture search on digits, against the hand-written CNN", measure
    )
