"""A step's timeline as a PNG: one row per worker, one box per action, with waiting left blank."""

from __future__ import annotations

import math
from pathlib import Path

from orchestray.platform.report.png import WHITE, Colour, Picture, text_size
from orchestray.platform.report.timeline import KINDS, Done, Step, row_label, time_text
from orchestray.platform.run.files import write_atomic

# Colours that differ in lightness, blue against orange, for readers who do not see red from green.
_COLOURS: dict[str, Colour] = {
    "F": (76, 126, 190),
    "B": (235, 162, 60),
    "I": (118, 178, 128),
    "W": (168, 116, 180),
    "U": (120, 130, 136),
}
_INK: Colour = (45, 48, 54)
_FAINT: Colour = (150, 155, 162)
_TRACK: Colour = (243, 244, 246)
_MARGIN = 28
_ROW, _GAP = 46, 8
_HEAD = 88
_MIN_WIDTH = 1000


def timeline_picture(step: Step, title: str, *, width: int = 1600) -> Picture:
    """Draw a step.

    Args:
        step: step to draw.
        title: text above the picture.
        width: pixels, >= 1000.
    """
    width = max(width, _MIN_WIDTH)
    labels = [row_label(row) for row in step.rows]
    left = _MARGIN + max(text_size(each)[0] for each in labels) + 16
    right = width - _MARGIN - text_size("bubble")[0] - 16
    bottom = _HEAD + len(labels) * (_ROW + _GAP)
    duration_s = step.end_s - step.begin_s
    picture = Picture(width, bottom + 96)

    def x(at_s: float) -> int:
        return left + round(at_s / duration_s * (right - left)) if duration_s else left

    picture.text(_MARGIN, 24, f"{title}   step {step.step}", _INK, size=3)
    facts = f"{time_text(duration_s)}   bubble {step.bubble:.1%}"
    picture.text(width - _MARGIN - text_size(facts)[0], 28, facts, _INK)
    picture.text(right + 16, _HEAD - 20, "bubble", _FAINT)
    for place, row in enumerate(step.rows):
        top = _HEAD + place * (_ROW + _GAP)
        middle = top + (_ROW - text_size("")[1]) // 2
        picture.text(_MARGIN, middle, labels[place], _INK)
        picture.rectangle(left, top, right, top + _ROW, _TRACK)
        for action in row.actions:
            local = row.stages.index(action.stage) if action.stage in row.stages else 0
            _box(picture, action, local, x(action.begin_s - step.begin_s), x(action.end_s - step.begin_s), top)
        picture.text(right + 16, middle, f"{row.bubble:.1%}", _INK)
    _axis(picture, duration_s, left, right, bottom)
    _legend(picture, step, left, bottom + 62)
    return picture


def write_timeline_picture(step: Step, title: str, path: Path) -> None:
    """Draw a step to a PNG file.

    Args:
        step: step to draw.
        title: text above the picture.
        path: file to write.

    Raises:
        StorageError: the file cannot be written.
    """
    write_atomic(path, timeline_picture(step, title).png())


def _box(picture: Picture, action: Done, local: int, left: int, right: int, top: int) -> None:
    """Draw an action's box, lighter for a later stage of its worker, with its micro-batch's number if it fits."""
    base = _COLOURS[action.kind]
    fill = _mix(base, WHITE, 0.8 * local / (local + 1))
    right = max(right, left + 1)
    picture.rectangle(left, top, right, top + _ROW, fill)
    if right - left > 3:  # an edge on the left separates two boxes of one colour
        picture.rectangle(left, top, left + 1, top + _ROW, _mix(base, _INK, 0.45))
    number = str(action.micro_batch) if KINDS[action.kind].is_pass and action.micro_batch >= 0 else ""
    for size in (2, 1):
        text_width, text_height = text_size(number, size)
        if number and text_width + 3 <= right - left:
            at = left + (right - left - text_width + 1) // 2, top + (_ROW - text_height) // 2
            picture.text(*at, number, WHITE if sum(fill) < 400 else _INK, size=size)
            return


def _axis(picture: Picture, duration_s: float, left: int, right: int, top: int) -> None:
    """Draw ticks at round times."""
    picture.rectangle(left, top, right, top + 1, _FAINT)
    between_s = _round_time(duration_s / 6) if duration_s else 1.0
    for tick in range(int(duration_s / between_s + 1e-9) + 1):
        at = left + round(tick * between_s / duration_s * (right - left)) if duration_s else left
        picture.rectangle(at, top, at + 1, top + 7, _FAINT)
        text = _tick_text(tick * between_s, between_s)
        picture.text(min(at - text_size(text)[0] // 2, right - text_size(text)[0]), top + 14, text, _FAINT)


def _round_time(seconds: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `seconds`."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= seconds * (1 - 1e-9))


def _tick_text(at_s: float, between_s: float) -> str:
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
        if between_s * factor >= 1 or unit == "µs"
    )
    return f"{at_s * factor:.0f} {unit}" if at_s else "0"


def _legend(picture: Picture, step: Step, left: int, top: int) -> None:
    used = {action.kind for row in step.rows for action in row.actions}
    for key, kind in KINDS.items():
        if key in used:
            picture.rectangle(left, top, left + 14, top + 14, _COLOURS[key])
            picture.text(left + 22, top, kind.name, _INK)
            left += 22 + text_size(kind.name)[0] + 32
    if any(len(row.stages) > 1 for row in step.rows):
        picture.text(left, top, "(lighter: later stages)", _FAINT)


def _mix(colour: Colour, other: Colour, part: float) -> Colour:
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(colour, other, strict=True))
    return red, green, blue
