"""Why an actor died, in a few words: Ray says it in many."""

from __future__ import annotations

_PLAIN_CAUSES = {
    "Worker unexpectedly exits with a connection error code 2": "its process was killed or crashed",
}


def cause_of(error: BaseException) -> str:
    """The short reason in Ray's long text on a dead actor."""
    text = str(error)
    for line in text.splitlines():
        if "exit type" in line.lower() or "exit detail" in line.lower():
            detail = line.split("detail:", 1)[-1].strip().split(". ")[0].rstrip(".")
            return _PLAIN_CAUSES.get(detail, detail)
    return last_line(error).rstrip(".")


def last_line(error: BaseException) -> str:
    """The last line of an error's text, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".") + "."
