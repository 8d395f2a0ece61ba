"""From the call of the command to the first training step, against `ray.train.torch.TorchTrainer` doing the same."""

from __future__ import annotations

from harness import benchmark
from train import lifetimes


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    lives = lifetimes.live(options, twice=True)
    report.details["lives"] = lives
    report.settings = {"rounds": len(lives["ours"]), "workers": 2, "training": lifetimes.SPEC}
    first = {side: [life["first_step_s"] for life in of] for side, of in lives.items()}
    ours = report.add("orchestray train: call to the end of the first step", "s", first["ours"])
    report.add("orchestray train: call to the first line in metrics.jsonl", "s", [x["seen_s"] for x in lives["ours"]])
    report.add("TorchTrainer: call to the end of the first step", "s", first["ray_train"])
    again = report.add("orchestray.train(), second run of a process", "s", first["ours_again"])
    report.add("orchestray.train(), second run: call to return", "s", [x["returned_s"] for x in lives["ours_again"]])
    report.add("TorchTrainer.fit(), second run of a process", "s", first["ray_train_again"])
    ratio = report.compare("first step / TorchTrainer", first["ours"], first["ray_train"])
    report.compare("second run / TorchTrainer", first["ours_again"], first["ray_train_again"])
    report.goal("call to first step", ours.median, 6.0, "s")
    report.goal("call to first step / TorchTrainer", ratio, 0.5)
    report.goal("second run of a process", again.median, 2.0, "s")
    report.notes += [
        (
            "Each first run starts Python and a Ray of its own. Ray Train's script leaves out the dashboard, validates "
            "nothing and reports once, at its end, with a checkpoint: the least a script can do."
        ),
        (
            "Our first step's time is what metrics.jsonl says, moved to the clock of the caller; the line itself is"
            " seen from outside at most a flush of the log later."
        ),
    ]


if __name__ == "__main__":
    benchmark.run(
        "startup",
        "From the command to the first training step of two workers, against Ray Train's TorchTrainer.",
        measure,
    )
