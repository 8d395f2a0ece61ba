"""Time for which a checkpoint of 100 M float32 parameters holds up the training loop, against a synchronous save."""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import Any

from harness import benchmark

_WIDTHS = [2048, 8192, 8192, 2048]  # 100.7 M parameters with the last layer
_BATCH_SIZE = 32
_SAVES = 2
_LIMIT = 0.10


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(3)
    widths = [512, 2048, 2048, 512] if options.quick else _WIDTHS
    every = 4 if options.quick else 6
    sides = ("ours", "torch.save", "safetensors")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    num_parameters = []

    def call(name: str) -> None:
        place = options.workspace / f"{name}-{len(found[name])}"
        measured = _train(name, widths, every, str(place))
        num_parameters.append(measured.pop("parameters"))
        found[name].append(measured)
        gc.collect()

    benchmark.alternate({name: partial(call, name) for name in sides}, rounds, benchmark.say)
    report.settings = {
        "rounds": rounds,
        "parameters": num_parameters[0],
        "saves_a_round": _SAVES,
        "save_every_steps": every,
        "batch_size": _BATCH_SIZE,
        "threads_of_the_loop": 1,
    }
    waited = {name: [s for run in found[name] for s in run["waited_s"]] for name in sides}
    ours = report.add("ours, the loop waits", "s", waited["ours"])
    saves = {name: report.add(f"{name} + fsync", "s", waited[name]) for name in sides[1:]}
    report.add("a step between saves", "s", [s for name in sides for run in found[name] for s in run["plain_steps_s"]])
    report.add("ours, extra time of the steps after a save", "s", [s for run in found["ours"] for s in run["extra_s"]])
    report.add("ours, the first save of a run", "s", [run["waited_s"][0] for run in found["ours"]])
    cheapest = min(saves, key=lambda name: saves[name].median)
    for name in sides[1:]:
        report.compare(f"ours / {name}", waited["ours"], waited[name])
    report.goal(f"pause / synchronous save ({cheapest})", ours.median / saves[cheapest].median, _LIMIT)
    report.notes += [
        (
            "The loop is the one workers run (trainers/loop/replica.py), with forward, backward and update of the "
            "whole model between saves; only the writer differs. Waiting: beginning the save, and the update's wait "
            "for the copy."
        ),
        (
            "Extra time: how much longer than usual the steps until the next save took in all; what the background "
            "thread takes from the loop through memory, disk and cores shows there and not in the waiting."
        ),
        "Synchronous: torch.save or safetensors of the same tensors, fsync of both; the cheaper one counts.",
    ]


def _train(name: str, widths: list[int], every: int, place: str) -> dict[str, Any]:
    """Run the loop once with a writer, and return what its saves cost."""
    import torch

    from harness.tasks import Mlp
    from orchestray.platform.comm.solo import SoloCollective
    from orchestray.platform.data.source import open_source
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.run.recorder import Recorder
    from orchestray.platform.task import TaskSource
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.loop.replica import Replica
    from train.ours.stopwatch import Stopwatch, Synchronous

    torch.set_num_threads(1)
    task = Mlp(widths=widths, num_samples=1024)
    source = open_source(task.dataset("train"))
    steps = every * (_SAVES + 1)
    settings = ReplicaSettings(
        task=TaskSource(type="tasks:Mlp", arguments={}, file=None, source=None),
        batch_size=_BATCH_SIZE,
        epochs=None,
        steps=steps,
        optimizer={"type": "sgd", "lr": 1e-4},
        lr_schedule={"type": "constant", "warmup_steps": 0},
        validate_every_steps=steps,
        checkpoint_every_steps=every,
    )

    def stream(split: str, _rank: int) -> SampleStream:
        return SampleStream(
            source, task.to_batch, batch_size=_BATCH_SIZE, rank=0, num_replicas=1, shuffle=split == "train"
        )

    recorder = Recorder()
    replica = Replica(task, settings, stream, recorder=recorder)
    replica.connect(SoloCollective())
    writer: Any = Stopwatch(place) if name == "ours" else Synchronous(place, name)
    replica.write_checkpoints_with(writer)
    replica.run(time.time())
    writer.wait()
    writer.close()
    lines = [line for line in recorder.drain(0.0) if "loss" in line and "split" not in line]
    # A step's time is from the end of the one before, so a save after step k is in the time of step k + 1.
    took_s = {after["step"]: after["time_s"] - before["time_s"] for before, after in pairwise(lines)}
    saved = [every * number for number in range(1, _SAVES + 1)]
    plain = [took_s[step] for step in range(2, every + 1)]
    usual_s = statistics.median(plain)
    return {
        "parameters": sum(parameter.numel() for parameter in replica.model.parameters()),
        "waited_s": [writer.waited_s[step] for step in saved],
        "plain_steps_s": plain,
        "extra_s": [sum(took_s[step + k] - usual_s for k in range(1, every + 1)) for step in saved],
    }


if __name__ == "__main__":
    benchmark.run(
        "checkpoint_pause",
        "How long a checkpoint of 100 M float32 parameters keeps the loop waiting, against saving synchronously.",
        measure,
    )
