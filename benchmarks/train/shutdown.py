"""From the end of the last step to the exit status of the command, against `ray.train.torch.TorchTrainer`."""

from __future__ import annotations

import json
from typing import Any

from harness import benchmark
from train import lifetimes


def add_options(parser: Any) -> None:
    parser.add_argument("--lives", help="a startup.json of this hour: reads its runs in place of making new ones")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    if options.arguments.lives:
        with open(options.arguments.lives, encoding="utf-8") as file:  # noqa: PTH123
            lives = json.load(file)["details"]["lives"]
        report.notes.append("The runs are those of `startup`, measured just before.")
    else:
        lives = lifetimes.live(options, twice=False)
    report.details["lives"] = {side: lives[side] for side in ("ours", "ray_train")}
    report.settings = {"rounds": len(lives["ours"]), "workers": 2, "training": lifetimes.SPEC}
    last = {side: [life["shutdown_s"] for life in lives[side]] for side in ("ours", "ray_train")}
    ours = report.add("orchestray train: end of the last step to exit status", "s", last["ours"])
    report.add("TorchTrainer: end of the last step to exit status", "s", last["ray_train"])
    report.add("orchestray train: call to exit status", "s", [life["exit_s"] for life in lives["ours"]])
    report.compare("last step to exit / TorchTrainer", last["ours"], last["ray_train"])
    report.goal("last step to exit status", ours.median, 1.5, "s")
    report.notes.append(
        "In that time ours validates, saves the last checkpoint and the model, writes the result and ends every "
        "process it started; the peer's script saves the model and reports it."
    )


if __name__ == "__main__":
    benchmark.run(
        "shutdown", "From the last step to the exit status of the command, against Ray Train.", measure, add_options
    )
