"""Exit statuses of the command line, from the errors that carry them."""

from __future__ import annotations

from builder.reference.markdown import page, table
from orchestray.platform import errors

_ENDINGS = {
    0: "Done: the budget was used, `until` was reached, or the time limit was.",
    130: "Interrupted by Ctrl-C; a checkpoint was saved, and `--resume` goes on.",
    143: "Ended by SIGTERM, as a scheduler sends it before it takes a machine; `--resume` goes on.",
}


def exit_page() -> str:
    """Return the page of all exit statuses."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.OrchestrayError) and kind is not errors.Interrupted
    ]
    rows = [[str(status), text, ""] for status, text in _ENDINGS.items()]
    for kind in kinds:
        text = (kind.__doc__ or "").partition(".")[0].removeprefix("Raised when ").removeprefix("An error ")
        rows.append([str(kind.exit_status), text[:1].upper() + text[1:] + ".", f"`{kind.__name__}`"])
    rows.sort(key=lambda row: int(row[0]))
    introduction = (
        "How a command ends. An error is a sentence on stderr, never a traceback. "
        "In Python the same errors are raised, from `orchestray.platform.errors`."
    )
    return page("Exit codes", introduction, table(["status", "meaning", "in Python"], rows))
