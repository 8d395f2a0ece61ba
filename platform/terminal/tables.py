"""Output of tables on a terminal, and in a file or a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_NO_LIMIT = 10_000


def show(what: RenderableType, console: Console | None = None) -> None:
    """Print a table or a text.

    On a terminal it is fitted to the width. In a file or a pipe, which have no width, lines are not wrapped, for grep,
    and have no trailing spaces.

    Args:
        what: object that rich can draw.
        console: default: stdout.
    """
    from rich.console import Console

    console = console or Console(highlight=False)
    if console.is_terminal:
        console.print(what)
        return
    wide = Console(highlight=False, width=_NO_LIMIT, color_system=None)
    with wide.capture() as captured:
        wide.print(what)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
