"""Readable numbers for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def number(value: object, digits: int = 4) -> str:
    """Return a number with some significant digits: `0.0312`, `41,230`, `1.5e-07`; `-` for None."""
    if value is None or isinstance(value, bool):
        return "-" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000 and abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """Return a duration as `0.8 s`, `12 s`, `3:07 min` or `2:03 h`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600:,}:{whole % 3600 // 60:02d} h"


def size(num_bytes: float | None) -> str:
    """Return a size as `812 B`, `3.4 MB` or `1.2 GB` (powers of 1000); `-` for None."""
    if num_bytes is None:
        return "-"
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    value = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:,.3g} TB"


def short_path(path: Path) -> str:
    """Return a path relative to the working directory if it is below that (unless that is the root), else as it is."""
    try:
        here = Path.cwd()
    except OSError:  # it was deleted
        return str(path)
    return str(path.relative_to(here)) if here.parent != here and path.is_relative_to(here) else str(path)


def metrics_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation line, or of one part of `final`: its numbers, with the loss last."""
    placed = {"step", "epoch", "time_s", "split", "samples"}
    values = {key: value for key, value in line.items() if key not in placed and isinstance(value, int | float | None)}
    return {key: values[key] for key in sorted(values, key=lambda key: key == "loss")}


def metrics_text(line: Mapping[str, Any]) -> str:
    """Return metrics as text: `accuracy 0.9611  loss 0.1312`."""
    return "  ".join(f"{key} {number(value)}" for key, value in metrics_of(line).items())


def result_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a result for a table, without null values."""
    rows: list[tuple[str, str]] = []

    def add(name: str, value: object, text: str) -> None:
        if value is not None:
            rows.append((name, text))

    epochs = result.get("epochs")
    add("steps", result.get("steps"), number(result.get("steps")) + (f"  ({number(epochs)} epochs)" if epochs else ""))
    for split, values in (result.get("final") or {}).items():
        if values:
            rows.append((split, metrics_text(values)))
    if best := result.get("best"):
        rows.append(("best", f"{best['checkpoint']}  {metrics_text({best['metric']: best['value']})}"))
    first_s = result.get("time_to_first_step_s")
    add("time", result.get("seconds"), duration(result.get("seconds")))
    if first_s is not None and rows:
        rows[-1] = ("time", f"{rows[-1][1]}  (first step after {duration(first_s)})")
    speed = result.get("samples_per_s")
    add("speed", speed, f"{number(speed)} samples/s")
    if noted := result.get("predicted"):
        predicted, least, most, taken = (
            number(1e3 * each, 3) for each in (noted["step_s"], *noted["interval_s"], noted["measured_step_s"])
        )
        rows.append(("step", f"{taken} ms  (predicted {predicted} ms, {least} to {most})"))
    sent = (result.get("bytes") or {}).get("sent")
    add("sent", sent or None, size(sent))
    goodput = result.get("goodput")
    counted = "" if goodput is None else f"  (goodput {goodput:.1%})"
    add("restarts", result.get("restarts") or None, number(result.get("restarts")) + counted)
    add("stopped by", result.get("stopped_by"), str(result.get("stopped_by")))
    add("error", result.get("error"), str(result.get("error")))
    if made := result.get("compressed"):
        rows += [("made from", str(made["run"])), *compressed_rows(made)]
    return rows


def compressed_rows(made: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of `compressed` in a result: bytes, weights, and the metrics after each stage."""
    before, now, left, weights = made["bytes_before"], made["bytes"], made["weights_left"], made["weights"]
    rows = [
        ("compressed", f"{before:,} -> {now:,} bytes, {before / now:.1f} x smaller"),
        ("weights", f"{left:,} of {weights:,} left, in {made['bits']} bits"),
    ]
    return rows + [(stage, metrics_text(metrics)) for stage, metrics in made["validation"].items() if metrics]
