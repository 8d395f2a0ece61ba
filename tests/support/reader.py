"""A reader of the pages, who does what they say.

Their files are written, and their commands typed into a terminal. What they show must come out, but for numbers that
differ from run to run.

A comment before a block says what becomes of it:

- `<!-- file: NAME -->`: it is written
- `<!-- run -->`: a shell runs it
- `<!-- output -->`: the last command must have printed it, in this order
- `run: exits with N`, `run: in the background`, `run: on a cluster`: a run of this kind
- `run: beside RUN_DIRECTORY`: a run once that one is under way
- `run: once PATH answers`: a run once the endpoint in the background answers
- `output: of the background`: waits for the end of the one in the background
- `output: of the background, after Ctrl-C`: ends it

Endpoints get a port of their own instead of 8000. A page of `docs/tutorials/` is read in an empty folder, or if it
changes the code in a copy of it; beside the others stand `configs/` and `docs/`, as in a checkout.

The first training of README.md is a command on a terminal, and starts a Ray of its own, as the reader's do. So is what
goes on in the background, or needs a shell. The others run in this process, on the Ray that the tests share, and write
to an object that claims to be such a terminal. They print the same, and a start costs more than most of these
trainings.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orchestray.platform.actors.pool import make_room
from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.process.sockets import free_ports
from support.cli import beside, outside, read_lines, typed_here
from support.pages import PAGES, ROOT, Block, blocks, first_missing, name_of
from support.patience import PATIENCE_S

SHORTER = {"train.epochs=200": "train.epochs=20", "search.budget.trials=8": "search.budget.trials=4"}
"""A person needs time to reach for another terminal; the test does not."""
SHORTER_FILES = {
    "photos.yaml": {"epochs: 6": "epochs: 2"},
    "rates.yaml": {"trials: 6": "trials: 3"},
}
"""Their outputs differ from those shown in numbers alone."""
CLUSTER_ADDRESS = "http://127.0.0.1:8265"
ENDPOINT = "127.0.0.1:8000"
COLUMNS, ROWS = 80, 50
TIMEOUT_S = PATIENCE_S
TRAINS = ("orchestray train ", "orchestray search ", "python ")
MAKES_DATA = "python make_"
TOKEN = "5e" * 32
CHANGES_CODE = {"tutorials/write-an-exchange.md"}
"""Pages whose reader stands in a clone of the repository, and changes it."""
CODE = ("platform", "search", "serving", "src", "trainers")
PLAIN = re.compile(r"(orchestray|python [\w/]+\.py)( [^$;|&<>`\n]*)?")
"""A line that needs no shell."""


def parts(*, on_a_cluster: bool) -> list[Any]:
    """Return the parts of pages between two headings with, or without, a run on a cluster, as parameters of a test.

    Each is a test, since a page is read in order, and takes minutes. The fast lane reads those that a new user reads:
    README and tutorials.
    """
    found = []
    for page in PAGES:
        for heading in dict.fromkeys(block.heading for block in blocks(page) if block.is_done):
            details = {block.detail for block in blocks(page) if block.heading == heading}
            if ("on a cluster" in details) == on_a_cluster:
                lane = () if name_of(page).startswith(("README", "tutorials/")) else pytest.mark.slow
                found.append(pytest.param(page, heading, id=f"{name_of(page)}: {heading}", marks=lane))
    return found


class Screen(io.StringIO):
    """A terminal to write to, as programs of this process see it."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Keep a text; what comes after the end is lost, as on a window that was closed."""
        return len(text) if self.closed else super().write(text)

    def flush(self) -> None:
        """Do nothing: no output is held back."""


class Command:
    """A shell on a terminal of 80 columns, whose output is kept."""

    def __init__(self, text: str, directory: Path, environment: dict[str, str]) -> None:
        self.output = ""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            ["bash", "-e", "-c", text],
            cwd=directory,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, terminal: int) -> None:
        pieces = b""
        with contextlib.suppress(OSError):  # how a terminal says that its last process is gone
            while piece := os.read(terminal, 1 << 16):
                pieces += piece
                self.output = pieces.decode(errors="replace")
        os.close(terminal)

    def finish(self, status: int = 0) -> str:
        """Return its output; it must exit with `status`."""
        try:
            actual = self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {TIMEOUT_S:g} s:\n{self.output}") from None
        self._reader.join(TIMEOUT_S)
        assert actual == status, self.output
        return self.output

    def kill(self) -> None:
        """End the shell and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)

    def press_ctrl_c(self, after: str) -> None:
        """Interrupt all processes of the terminal, as Ctrl-C does, once they have printed a line."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while first_missing(after, self.output) is not None:
            assert not self.is_over(), self.output
            assert time.monotonic() < deadline_s, f"not printed: {after}\nprinted was:\n{self.output}"
            time.sleep(0.02)
        os.killpg(self._process.pid, signal.SIGINT)

    def is_over(self) -> bool:
        return self._process.poll() is not None


class Desk:
    """A home directory, and a Ray or the address of a cluster: what the user has on every page."""

    def __init__(self, home: Path, *, ray: Cluster | None = None, cluster_address: str = "") -> None:
        self.home = home
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text(TOKEN, encoding="utf-8")
        self.environment = {
            **{name: value for name, value in outside().items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
            "HOME": str(home),
        }
        self.cluster_address = cluster_address
        self._ray = ray

    def give_back(self) -> None:
        """End the processes that wait for the next training."""
        assert self._ray is not None
        make_room(self._ray)

    def beside_others(self) -> dict[str, str]:
        """Return the environment of a command that trains on the Ray that is there, in which there is room now."""
        assert self._ray is not None
        return {**self.environment, **beside(self._ray)}


class Reader:
    """A user who reads a page from top to bottom, and does what it says."""

    def __init__(
        self, directory: Path, desk: Desk, *, starts_ray: bool, empty: bool = False, copies: bool = False
    ) -> None:
        self._directory = directory
        self._desk = desk
        self._starts_ray = starts_ray
        self._copies = copies
        for name in CODE if copies else ():
            shutil.copytree(ROOT / name, directory / name, symlinks=True)
        for name in () if empty else ("configs", "docs"):
            (directory / name).symlink_to(ROOT / name)
        self._output = ""
        self._background: Command | None = None
        self._endpoint = ENDPOINT

    def read(self, page: Path, heading: str) -> None:
        """Do what a part of a page says, from top to bottom."""
        for block in blocks(page):
            if block.heading == heading:
                try:
                    self.take(block)
                except AssertionError as error:
                    raise AssertionError(f"{name_of(page)}, line {block.line}: {error}") from error

    def prepare(self, page: Path, heading: str) -> None:
        """Have the files and the data of the parts before this one, without their trainings."""
        for block in blocks(page):
            if block.heading == heading:
                return
            if block.purpose == "file":
                self.take(block)
            elif block.purpose == "run":
                for line in block.text.splitlines():
                    if line.startswith(MAKES_DATA):
                        self._type_here(line, 0)

    def take(self, block: Block) -> None:
        """Do what the comment before a block says."""
        if block.purpose == "file":
            text = _shortened(block.text.replace(ENDPOINT, self._endpoint), SHORTER_FILES.get(block.detail, {}))
            (self._directory / block.detail).write_text(text, encoding="utf-8")
        elif block.purpose == "output" and block.detail.startswith("of the background"):
            assert self._background is not None
            interrupted = block.detail.endswith("after Ctrl-C")
            if interrupted:
                self._background.press_ctrl_c(after=block.text.splitlines()[0])
            self._output, self._background = self._background.finish(130 if interrupted else 0), None
            self._check(block)
        elif block.purpose == "output":
            self._check(block)
        elif block.purpose == "run":
            if self._copies:  # workers need the code of the copy, which those of a Ray that is there have not
                environment = {**self._desk.environment, "PYTHONPATH": str(self._directory / "src")}
                self._output = Command(block.text, self._directory, environment).finish(_status(block))
            else:
                self._run(block)
        else:
            assert not block.is_unmarked, "nothing says what this block is for"

    def _run(self, block: Block) -> None:
        text = _shortened(block.text, SHORTER)
        if block.detail == "in the background":
            (port,) = free_ports(1)
            self._endpoint = f"127.0.0.1:{port}"
            text = text.replace(" --port 8000", f" --port {port}")
            if text.startswith("orchestray serve ") and " --port " not in text:
                text = f"{text.rstrip()} --port {port}"
        text = text.replace(ENDPOINT, self._endpoint)
        environment = self._desk.environment
        if block.detail == "on a cluster":
            # Workers of a job start plainly, at 3 s of CPU time each: one is enough here (test_submit.py has two).
            text = re.sub(r"train\.epochs=\d+", r"\g<0> strategy.network.data=1", text)
            text = text.replace(CLUSTER_ADDRESS, self._desk.cluster_address)
        if block.detail.startswith("beside "):
            self._wait_for_steps(self._directory / block.detail.removeprefix("beside "), 20)
        if block.detail.startswith("once "):
            self._wait_for_answer(block.detail.removeprefix("once ").removesuffix(" answers"))
        starts_ray, self._starts_ray = self._starts_ray, False
        status = _status(block)
        lines = text.strip().replace("\\\n", " ").splitlines()
        if block.detail not in {"in the background", "on a cluster"} and not starts_ray and "$" not in text:
            self._output = ""
            while lines:
                if PLAIN.fullmatch(lines[0]):
                    self._output += self._type_here(lines.pop(0), 0 if lines else status)
                else:
                    self._output += Command("\n".join(lines), self._directory, environment).finish(status)
                    lines = []
            return
        if not starts_ray and block.detail != "on a cluster" and any(command in text for command in TRAINS):
            environment = self._desk.beside_others()
        command = Command(text, self._directory, environment)
        if block.detail == "in the background":
            self._background = command
        else:
            self._output = command.finish(status)

    def _type_here(self, line: str, status: int) -> str:
        """Return what a command prints that is run in this process; it must exit with `status`."""
        words = shlex.split(line, comments=True)
        if words[0] == "python" and "from ray import" in (self._directory / words[1]).read_text(encoding="utf-8"):
            self._desk.give_back()  # it asks for places of its own
        screen = Screen()
        known = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color", "HOME": str(self._desk.home)}
        with contextlib.chdir(self._directory), mock.patch.dict(os.environ, known):
            actual = typed_here(words, screen, screen)
        output = screen.getvalue()
        screen.close()
        assert actual == status, output
        return output

    def _check(self, block: Block) -> None:
        missing = first_missing(block.text, self._output)
        assert missing is None, f"not printed: {missing}\nprinted was:\n{self._output}"

    def _wait_for_steps(self, run: Path, steps: int) -> None:
        """Wait until the run in the background is under way."""
        assert self._background is not None
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(read_lines(run / "metrics.jsonl")) < steps:
            assert not self._background.is_over(), self._background.finish()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def _wait_for_answer(self, path: str) -> None:
        """Wait until the endpoint in the background answers a path, with any status."""
        assert self._background is not None
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"http://{self._endpoint}{path}", timeout=TIMEOUT_S).close()
            except urllib.error.HTTPError:
                return
            except OSError:
                assert not self._background.is_over(), self._background.finish()
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            else:
                return

    def close(self) -> None:
        """Leave nothing running."""
        if self._background is not None:
            self._background.kill()


def _shortened(text: str, shorter: dict[str, str]) -> str:
    for long, short in shorter.items():
        text = text.replace(long, short)
    return text


def _status(block: Block) -> int:
    """Return the exit status that the commands of a block must have."""
    return int(block.detail.removeprefix("exits with ")) if block.detail.startswith("exits") else 0


class Readers:
    """A reader for each page, who comes back to it for its next part."""

    def __init__(self, place: Path, desk: Desk) -> None:
        self.place, self._desk = place, desk
        self._readers: dict[Path, Reader] = {}

    def of(self, page: Path) -> Reader:
        if page not in self._readers:
            directory = self.place / name_of(page).removesuffix(".md").replace("/", "-")
            directory.mkdir()
            copies = name_of(page) in CHANGES_CODE
            empty = page.parent.name == "tutorials" and not copies
            first = page.name == "README.md"
            self._readers[page] = Reader(directory, self._desk, starts_ray=first, empty=empty, copies=copies)
        return self._readers[page]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
