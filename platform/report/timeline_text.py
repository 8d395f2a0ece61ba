"""A step's timeline on the terminal: one row per worker, in which an action's cells are proportional to its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.report.timeline import KINDS, Row, Step, row_label, time_text

if TYPE_CHECKING:
    from rich.text import Text


def draw(step: Step, *, width: int = 80, has_colour: bool = False) -> list[Text]:
    """Return lines for the terminal: one row per worker, in which an action's cells are proportional to its time.

    An action begins with the number of its micro-batch, if there is room, and continues in the shade and colour of its
    kind. A worker's second and later stages have a brighter colour. Waiting is left blank.

    Args:
        step: step to draw.
        width: characters per line, >= 60.
        has_colour: True if the terminal shows colours: then a number may stand without its shade.
    """
    from rich.text import Text

    labels = [row_label(row) for row in step.rows]
    margin = max(map(len, labels))
    cells = width - margin - len(" │") - len("│  99.9%")
    duration_s = step.end_s - step.begin_s
    lines = [Text.assemble((f"step {step.step}", "bold"), f"   {time_text(duration_s)}   bubble {step.bubble:.1%}")]
    lines.append(Text(" " * (margin + 2 + cells) + "  bubble", style="dim"))
    for row, label in zip(step.rows, labels, strict=True):
        bar = _bar(row, step.begin_s, duration_s, cells, has_colour)
        lines.append(Text.assemble((f"{label:<{margin}} │", "dim"), bar, ("│", "dim"), f"{row.bubble:>7.1%}"))
    last = time_text(duration_s)
    lines.append(Text(" " * margin + " └" + "─" * cells + "┘", style="dim"))
    lines.append(Text(" " * (margin + 2) + "0" + last.rjust(cells - 1), style="dim"))
    return lines + _legend(step, margin + 2, width)


def _bar(row: Row, begin_s: float, duration_s: float, cells: int, has_colour: bool) -> Text:
    """Draw the row's actions, each from the cell of its begin to that of its end, without overlaps."""
    from rich.text import Text

    def cell(at_s: float) -> int:
        return round((at_s - begin_s) / duration_s * cells) if duration_s else 0

    bar, at = Text(), 0
    for action in row.actions:
        start, stop = max(cell(action.begin_s), at), cell(action.end_s)
        if start >= stop:
            continue
        kind = KINDS[action.kind]
        colour = kind.colour if action.stage in row.stages[:1] or not kind.is_pass else f"bright_{kind.colour}"
        number = str(action.micro_batch) if kind.is_pass and action.micro_batch >= 0 else ""
        number = number if len(number) < stop - start + has_colour else ""
        bar.append(" " * (start - at))
        bar.append(number, style=f"black on {colour}")
        bar.append(kind.shade * (stop - start - len(number)), style=colour)
        at = stop
    bar.append(" " * (cells - at))
    return bar


def _legend(step: Step, margin: int, width: int) -> list[Text]:
    from rich.text import Text

    used = {action.kind for row in step.rows for action in row.actions}
    entries = [("0", "default", "micro-batch 0")]
    entries += [(kind.shade * 2, kind.colour, kind.name) for key, kind in KINDS.items() if key in used]
    lines = [Text(" " * margin)]
    for sign, colour, name in entries:
        entry = Text.assemble((sign, colour), (f" {name}", "dim"))
        if len(lines[-1]) > margin and len(lines[-1]) + 2 + len(entry) > width:
            lines.append(Text(" " * margin))
        lines[-1].append("  " if len(lines[-1]) > margin else "").append_text(entry)
    return lines
