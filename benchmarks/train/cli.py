"""Time that a command that does little takes: `orchestray --help` and `orchestray validate`, beside `ray --help`."""

from __future__ import annotations

from functools import partial

from harness import benchmark, commands

_CONFIG = benchmark.REPOSITORY / "configs" / "train" / "digits.yaml"
_TIMEOUT_S = 60.0


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    lines = {
        "orchestray --help": [commands.script("orchestray"), "--help"],
        "orchestray train --help": [commands.script("orchestray"), "train", "--help"],
        "orchestray validate": [commands.script("orchestray"), "validate", str(_CONFIG)],
        "ray --help": [commands.script("ray"), "--help"],
        "torchrun --help": [commands.script("torchrun"), "--help"],
        "python -c pass": commands.python("-c", "pass"),
    }
    rounds = options.rounds(12, quick=2)
    report.settings = {"rounds": rounds, "config": "configs/train/digits.yaml", "caches": "warm: one run before"}
    taken: dict[str, list[float]] = {name: [] for name in lines}

    def call(name: str, *, keep: bool) -> None:
        called_at, ended_at = commands.run_command(lines[name], _TIMEOUT_S)
        if keep:
            taken[name].append(ended_at - called_at)

    for name in lines:
        call(name, keep=False)
    benchmark.alternate({name: partial(call, name, keep=True) for name in lines}, rounds, lambda _: None)
    seconds = {name: report.add(name, "s", values) for name, values in taken.items()}
    for ours in ("orchestray --help", "orchestray validate"):
        report.compare(f"{ours} / ray --help", taken[ours], taken["ray --help"])
    report.goal("orchestray --help", seconds["orchestray --help"].median, 0.5, "s")
    report.goal("orchestray validate", seconds["orchestray validate"].median, 1.0, "s")
    report.notes.append(
        "Wall-clock time from the call to the exit status; `ray --help` and `torchrun --help` are the peers' "
        "commands of the same kind, `python -c pass` the interpreter alone. Nobody else has a `validate`."
    )


if __name__ == "__main__":
    benchmark.run("cli", "How soon `orchestray --help` and `orchestray validate` answer, beside `ray --help`.", measure)
