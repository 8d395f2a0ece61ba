"""`orchestray plan`: what each scheme would cost, before paying for it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestray.cli import options
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.files import dump_json
from orchestray.platform.terminal.format import number, size
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from orchestray.trainers.planning.goodput import Goodput
    from orchestray.trainers.planning.planner import Plans
    from orchestray.trainers.planning.plans import Plan
    from orchestray.trainers.planning.record import Record

app = typer.Typer()

_SHOWN, _LATEST = 12, 12
_EPILOG = """Examples:

orchestray plan configs/train/digits.yaml

orchestray plan configs/train/digits.yaml --why 1 "one process"

orchestray plan configs/train/digits.yaml --try 3

orchestray plan configs/train/digits.yaml --workers 64 --nodes 8 --machine cluster.json

orchestray plan configs/train/digits.yaml --price-per-hour 0.10
"""


@app.command(epilog=_EPILOG)
def plan(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)] = None,
    overrides: options.Overrides = None,
    *,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Most workers; default: the cores of all machines.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Number of machines.")] = 1,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="Profile of each machine; default: this one, as calibrated."),
    ] = None,
    this: Annotated[bool, typer.Option("--this", help="Predict the config as it stands, and nothing else.")] = False,
    why: Annotated[
        tuple[str, str] | None,
        typer.Option("--why", metavar="A B", help="Show which part decides between two plans, by name or place."),
    ] = None,
    tried: Annotated[
        int | None,
        typer.Option(
            "--try",
            metavar="N",
            help="Train by the N fastest plans for some seconds each, and choose by that.",
        ),
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="A", help="Show where the time of a plan goes.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All plans, and the schemes that do not fit.")] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="PRICE", help="Most that the run may cost; the profile has a worker's price."),
    ] = None,
    mtbf_h: Annotated[
        float | None,
        typer.Option("--mtbf-hours", metavar="H", help="Mean hours between failures: show the expected goodput."),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option("--price-per-hour", metavar="P", help="Price of a worker for an hour: show what a run costs."),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show the errors of earlier predictions; CONFIG may be a runs directory.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Predict the time, memory and traffic of each scheme for a config, ranked, with the planner's own errors."""
    chosen = {"--this": this, "--why": why, "--explain": explain, "--all": everything, "--history": history}
    _check_together([option for option, value in chosen.items() if value])
    if tried is not None and tried < 1:
        raise ConfigError(f"--try must be 1 or more, got {tried}")
    if tried is not None:  # the other machines are not here, and the other answers have no place for what steps took
        elsewhere = {"--machine": machine, "--nodes": nodes != 1}
        others = {**elsewhere, **chosen, "--all": None}
        _check_together(["--try", *(option for option, value in others.items() if value)])
    if history:
        _history(config, as_json=as_json)
        return
    if config is None:
        raise ConfigError("name the config to plan: orchestray plan CONFIG")
    from orchestray.trainers.planning import plan as planning

    if this:
        beside = {"--workers": workers, "--budget": budget}
        _check_together(["--this", *(option for option, value in beside.items() if value is not None)])
        found = [
            planning.plan_as_it_stands(
                config,
                overrides=overrides or (),
                nodes=nodes,
                machine=machine,
                price_per_hour=price_per_hour,
                mtbf_h=mtbf_h,
            )
        ]
    else:
        plans = planning.plan(
            config,
            overrides=overrides or (),
            workers=workers,
            nodes=nodes,
            machine=machine,
            price_per_hour=price_per_hour,
            budget=budget,
            mtbf_h=mtbf_h,
            report=_reporter("schemes"),
        )
        if tried is not None:
            plans = _with_tries(plans, tried)
        named = why or ([] if explain is None else [explain])
        found = [plans.find(name) for name in named] or [*plans.plans]
    if as_json:
        print(dump_json([each.to_json() for each in found]))
    elif why is not None:
        show(_difference(*found))
        print(f"\n{_deciding(*found)}")
    elif this or explain is not None:
        show(_explained(found[0]))
        _print_notes(found)
    else:
        show(_table(plans, everything=everything))
        print()
        for line in _closing(plans, config, everything=everything):
            print(line)
        _print_notes(plans.plans)


def _check_together(options: Sequence[str]) -> None:
    """Raise if options are given of which each takes the place of the others."""
    if len(options) > 1:
        raise ConfigError(f"{options[0]} and {options[1]} do not go together; take one of them out")


def _print_notes(plans: Sequence[Plan]) -> None:
    for note in dict.fromkeys(note for each in plans for note in each.notes):
        print(f"Note: {note}.")


def _with_tries(plans: Plans, number: int) -> Plans:
    """Return the plans with what the steps of the fastest took when they were tried."""
    from orchestray.trainers.driver.tried_plans import try_plans

    return try_plans(plans, number, report=_reporter("trainings"))


def _reporter(what: str) -> Any:
    """Return a function that shows how many of something are done, on a terminal."""

    def report(done: int, number: int) -> None:
        if sys.stderr.isatty():
            end = "\r" if done < number else "\r\033[K"
            sys.stderr.write(f"\r\033[K{done} of {number} {what}{end}" if done < number else end)
            sys.stderr.flush()

    return report


def _table(plans: Plans, *, everything: bool) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("scheme")
    extra = _further_columns(plans)
    for name in ("step, ms", "80 % of runs", "samples/s", "memory", "sent", "stale", *extra):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Plan]] = [(str(place), each) for place, each in enumerate(plans.plans, start=1)]
    shown = rows if everything else rows[:_SHOWN]
    # Doing nothing is always shown, and what the config says.
    shown += [row for row in rows if row[1].name == "one process" and row not in shown]
    shown += [("", plans.this)] if plans.this is not None else []
    for place, each in shown:
        mark = "" if each.keeps_result else " *"
        table.add_row(
            place,
            each.name + mark,
            number(1e3 * each.step_s, 3),
            "-" if each.interval_s is None else " to ".join(number(1e3 * bound, 3) for bound in each.interval_s),
            f"{each.samples_per_s:,.0f}",
            size(each.memory.resident),
            size(sum(each.num_bytes.values())),
            f"{each.staleness:.2g}" if each.staleness else "",
            *(cell(each) for cell in extra.values()),
        )
    return table


def _further_columns(plans: Plans) -> dict[str, Callable[[Plan], str]]:
    """Return the columns of what only some tables have."""
    columns: dict[str, Callable[[Plan], str]] = {}
    if any(each.tried_s is not None for each in plans.plans):
        columns["tried, ms"] = lambda plan: number(None if plan.tried_s is None else 1e3 * plan.tried_s, 3)
    if any(each.price is not None for each in plans.plans):
        columns["price"] = lambda plan: number(plan.price, 3)
    if any(each.goodput is not None for each in plans.plans):
        columns["goodput"] = lambda plan: "-" if plan.goodput is None else f"{plan.goodput.share:.1%}"
    return columns


def _closing(plans: Plans, config: str, *, everything: bool) -> Iterator[str]:
    if any(not each.keeps_result for each in plans.plans):
        yield "* ends with other weights than a single process does."
    if not plans.num_recorded:
        yield "No run was predicted here yet: the intervals are as wide as predictions for other models were wrong."
    if plans.num_disturbed:
        yield (
            f"This machine was busy with other programs during {plans.num_disturbed} measurements: their times are too "
            "long, and were not kept. Plan again when it is quiet. Runs by these plans are not put beside predictions; "
            "`orchestray plan runs --history` does that later."
        )
    if everything:
        for unfit in plans.unfit:
            yield f"{unfit.name}: {unfit.why}"
    elif plans.unfit:
        number = len(plans.unfit)
        yield f"{number} {'scheme does' if number == 1 else 'schemes do'} not fit (--all says why)."
    best = plans.best
    if best is None:
        return
    from orchestray.trainers.planning.plan import overrides_of

    tried = "" if best.tried_s is None else ", of those that were tried"
    yield f"Fastest with the result of one process{tried}: {best.name}."
    if (cheapest := plans.cheapest) is not None:
        yield f"Cheapest with the result of one process: {cheapest.name}, {cheapest.price:.3g} for the run."
    if best.goodput is not None:
        yield f"With failures: goodput {_goodput(best.goodput)}."
    yield command_of(config, overrides_of(best))


def command_of(config: str, overrides: Sequence[str]) -> str:
    """Return the command that trains a config with some keys set, as a shell takes it."""
    return shlex.join(["orchestray", "train", config, *overrides])


def _goodput(goodput: Goodput) -> str:
    steps, interval_s = goodput.checkpoint_every_steps, goodput.interval_s
    return f"{goodput.share:.1%} with a checkpoint every {interval_s:.3g} s (Young): checkpoint.every_steps={steps}"


def _explained(plan: Plan) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("", justify="right")
    table.add_row(plan.name, f"{number(1e3 * plan.step_s)} ms", f"{plan.samples_per_s:,.0f} samples/s")
    parts = plan.parts
    for name, seconds in (
        ("  forward and backward", parts.compute_s),
        ("  exchange, not hidden", parts.exchange_s),
        ("  bubble and queues", parts.bubble_s),
        ("  optimizer", parts.optimizer_s),
        ("  reading, recording", parts.loop_s),
    ):
        table.add_row(name, f"{number(1e3 * seconds)} ms", f"{seconds / plan.step_s:.0%}" if plan.step_s else "")
    if plan.start_s:
        table.add_row("start", f"{plan.start_s:.3g} s", "to the first step")
    if plan.epoch_s:
        table.add_row("an epoch", f"{number(plan.epoch_s)} s", f"{plan.steps_per_epoch} steps")
    table.add_row("exchange behind computation", f"{number(1e3 * parts.hidden_s)} ms", "")
    for kind, num_bytes in plan.memory.to_json().items():
        table.add_row(f"memory: {kind}", size(num_bytes), "")
    for link, num_bytes in plan.num_bytes.items():
        table.add_row(f"sent a step: {link}", size(num_bytes), "")
    if plan.staleness:
        table.add_row("staleness", f"{plan.staleness:.3g}", "updates")
    if plan.price is not None:
        table.add_row("price of the run", f"{plan.price:.4g}", "")
    if plan.goodput is not None:
        table.add_row("goodput with failures", f"{plan.goodput.share:.1%}", "")
        table.add_row("best checkpoint.every_steps", f"{plan.goodput.checkpoint_every_steps:,}", "")
    return table


def _difference(one: Plan, other: Plan) -> RenderableType:
    from rich.table import Table

    from orchestray.trainers.planning.planner import why

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("us a sample")
    for name in (one.name, other.name, "difference"):
        table.add_column(name, justify="right")
    for part, first, second in why(one, other):
        table.add_row(part, *(number(1e6 * each, 3) for each in (first, second)), _signed(1e6 * (second - first)))
    totals = (1e6 * one.step_s / one.samples, 1e6 * other.step_s / other.samples)
    table.add_row("in all", *(number(each, 3) for each in totals), _signed(totals[1] - totals[0]))
    return table


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{number(abs(value), 3)}"


_PARTS = {"compute": "forward and backward", "bubble": "bubble and queues", "loop": "reading, recording"}
"""Names of parts of a step, as they are shown; those of others are their own."""


def _deciding(one: Plan, other: Plan) -> str:
    """Return a sentence on the part that decides between two plans."""
    from orchestray.trainers.planning.planner import why

    difference = other.step_s / other.samples - one.step_s / one.samples
    faster, slower = (one, other) if difference >= 0 else (other, one)
    # Of the parts that speak for the faster one, the one that says most.
    part, least, most = max(why(faster, slower), key=lambda each: each[2] - each[1])
    if most <= least:
        return f"Nothing decides between {one.name} and {other.name}: no part of a step differs."
    saved, all_saved = 1e6 * (most - least), 1e6 * abs(difference)
    return (
        f"{_PARTS.get(part, part).capitalize()} decides: {faster.name} takes {number(saved, 3)} us a sample less for "
        f"it than {slower.name}, and {number(all_saved, 3)} us less in all."
    )


def _latest(record: Record) -> RenderableType:
    """Return a table of the latest runs, each with its prediction beside what its steps took."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("latest runs", "scheme"):
        table.add_column(name, overflow="fold")
    for name in ("predicted, ms", "took, ms", "error"):
        table.add_column(name, justify="right")
    for entry, error in record.judged()[-_LATEST:]:
        predicted_ms = number(1e3 * entry.measured_s * (1 + error), 3)
        table.add_row(entry.name, entry.family, predicted_ms, number(1e3 * entry.measured_s, 3), f"{error:+.1%}")
    return table


def _history(runs: str | None, *, as_json: bool) -> None:
    """Show the record; add the runs of a directory that are not in it."""
    from statistics import median

    from rich.table import Table

    from orchestray.trainers.machine import kept
    from orchestray.trainers.planning import record as records
    from orchestray.trainers.planning.plan import note_later

    machine = kept.load().name
    if runs is not None:
        for config in sorted(Path(runs).glob("*/config.yaml")):
            try:
                if note_later(config.parent) is None:
                    print(f"{config.parent.name}: it made too few steps", file=sys.stderr)
            except ConfigError as error:
                print(f"{config.parent.name}: {error}", file=sys.stderr)
    record = records.load_record(machine)
    families = sorted({entry.family for entry in record.entries})
    rows = []
    for family in (*families, None):
        errors = [abs(each) for each in record.errors(family)]
        if errors:
            rows.append({"family": family or "all", "runs": len(errors), "median": median(errors), "max": max(errors)})
    if as_json:
        print(dump_json(rows))
        return
    if not rows:
        print("No run was predicted here yet: plan a config, then train it.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("scheme")
    for name in ("runs", "median error", "largest"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(str(row["family"]), str(row["runs"]), f"{row['median']:.1%}", f"{row['max']:.1%}")
    show(table)
    print()
    show(_latest(record))
