"""Pages of Markdown as things to run: their blocks, what each is for, and whether an output is the one they show."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
"""Pages that users read."""
RUNNABLE = {"sh", "bash", "console", "python", "yaml"}
"""Languages of blocks of which something must say what they are for."""
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^##+ ([^\n]*)$", flags=re.MULTILINE)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STABLE = (
    (re.compile(r"[╭╮╰╯│─]+"), " "),
    (re.compile(r"[━╸╺]+"), "━"),
    (re.compile(r"raysubmit_\w+"), "raysubmit_ID"),
    (re.compile(r"\d[\d,.:]*(e[+-]?\d+)?"), "#"),
    (re.compile(r"# (s|min|h)\b"), "# s"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True)
class Block:
    """A fenced block, what the comment just before it says (`purpose` or `purpose: detail`), and the heading above."""

    language: str
    text: str
    purpose: str
    detail: str
    line: int
    heading: str

    @property
    def is_done(self) -> bool:
        """True if a reader does what the block says, or sees it."""
        return self.purpose in {"file", "run", "output"}

    @property
    def is_unmarked(self) -> bool:
        """True if it could be run, and nothing says what it is for."""
        return not self.is_done and self.purpose != "not run" and self.language in RUNNABLE


def name_of(page: Path) -> str:
    """Return the path of a page within docs/, or within the repository."""
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


@functools.cache
def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    matches = list(_BLOCK.finditer(text))
    headings = [  # a comment of a shell looks like one
        match for match in _HEADING.finditer(text) if not any(b.start() < match.start() < b.end() for b in matches)
    ]
    found = []
    for match in matches:
        purpose, _, detail = (match[1] or "").partition(": ")
        heading = next((one[1] for one in reversed(headings) if one.start() < match.start()), "")
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(match[2], match[3], purpose, detail, line, heading))
    return found


def stable(line: str) -> str:
    """Return a line of terminal output without its colours, boxes, numbers, units of time and ids, which change."""
    line = _ESCAPE.sub("", line)
    for pattern, placeholder in _STABLE:
        line = pattern.sub(placeholder, line)
    return line.strip()


def first_missing(shown: str, output: str) -> str | None:
    """Return the first line of `shown` that is not in `output` after the lines before it, as `stable` has them."""
    lines = iter([stable(line) for line in re.split(r"[\r\n]+", output)])
    for line in filter(str.strip, shown.splitlines()):
        wanted = stable(line)
        if wanted and not any(wanted in printed for printed in lines):
            return line
    return None
