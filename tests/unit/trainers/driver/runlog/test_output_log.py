"""The output of a run's processes reaches their logs whole, and the terminal as far as it stays readable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestray.platform.actors.member import Identity
from orchestray.platform.actors.output_reader import NodeReader, OutputReader
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.writer import RunWriter
from orchestray.trainers.driver.runlog import output_log
from orchestray.trainers.driver.runlog.output_log import OutputLog, Shower


class Printing:
    """A run whose processes print into files of this test."""

    def __init__(self, folder: Path, writer: RunWriter, *, shows_all: bool = False) -> None:
        self._folder, self._writer = folder, writer
        self.shown: list[str] = []
        self.log = OutputLog(writer, self._show, shows_all=shows_all)

    def _show(self, who: str, lines: list[str]) -> None:
        self.shown += [f"{who}: {line}" for line in lines]

    def process(self, pid: int) -> Identity:
        return Identity(pid, "here", str(self._folder / f"worker-{pid}.out"))

    def prints(self, pid: int, text: str) -> None:
        with Path(self.process(pid).output).open("a") as file:
            file.write(text)

    def kept(self, name: str) -> list[str]:
        self._writer.flush()
        return (self._folder / "run" / "logs" / f"{name}.log").read_text().splitlines()


@pytest.fixture
def printing(tmp_path: Path) -> Iterator[Printing]:
    with RunDirectory.create(tmp_path, "run") as directory, RunWriter(directory) as writer:
        yield Printing(tmp_path, writer)


def test_each_process_has_its_log_and_the_terminal_a_line_of_several_once(printing: Printing) -> None:
    workers = [("worker", 0, printing.process(1)), ("worker", 1, printing.process(2))]
    printing.prints(1, ":job_id:01\nbuilding\nrank 0\nhalf a ")
    printing.prints(2, "building\nrank 1\n")
    printing.log.take(workers)
    printing.prints(1, "line\nbuilding\n[Gloo] Rank 0 is connected\nlast")
    printing.log.take(workers)
    printing.log.close()
    assert printing.kept("worker-0") == [
        "building", "rank 0", "half a line", "building", "[Gloo] Rank 0 is connected", "last",
    ]  # fmt: skip
    assert printing.kept("worker-1") == ["building", "rank 1"]
    assert printing.shown == [
        "worker 0: building",
        "worker 0: rank 0",
        "worker 1: rank 1",
        "worker 0: half a line",
        "worker 0: building",
        "worker 0: last",
    ]


def test_a_process_that_is_replaced_is_read_to_its_end_and_its_log_goes_on(printing: Printing) -> None:
    printing.prints(1, "begins\n")
    printing.log.take([("worker", 0, printing.process(1)), ("spare", 0, printing.process(2))])
    printing.prints(1, "dies\n")
    printing.prints(2, "takes over\n")
    printing.log.take([("worker", 0, printing.process(2))])
    assert printing.kept("worker-0") == [
        "begins", "--- from here on process 2 of node here ---", "dies", "takes over",
    ]  # fmt: skip


def test_what_a_warm_process_printed_in_an_earlier_run_is_left_out(printing: Printing) -> None:
    printing.prints(1, "of the run before\n")
    workers = [("worker", 0, printing.process(1))]
    printing.log.skip(workers)
    printing.prints(1, "of this one\n")
    printing.log.take(workers)
    assert printing.kept("worker-0") == ["of this one"]


def test_nothing_is_made_where_nothing_is_printed(printing: Printing, tmp_path: Path) -> None:
    printing.prints(1, ":job_id:01\n:actor_name:Member\n")
    printing.log.take([("worker", 0, printing.process(1)), ("worker", 1, Identity(2, "here"))])
    printing.log.close()
    assert not (tmp_path / "run" / "logs").exists()
    assert printing.shown == []


def test_a_log_has_a_largest_size_and_says_so(printing: Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "MOST_BYTES", 1 << 20)
    workers = [("worker", 0, printing.process(1))]
    for _ in range(3):
        printing.prints(1, "x" * (1 << 20) + "\n")
        printing.log.take(workers)
    assert printing.kept("worker-0")[1:] == ["--- no more than 1 MB are kept of what one process prints ---"]


def test_a_flood_is_cut_on_the_terminal_with_a_sentence_and_single_lines_are_not() -> None:
    shown: list[str] = []
    now_s = [0.0]
    shower = Shower(lambda _who, lines: shown.extend(lines), lambda: now_s[0])
    shower.lines("worker 0", [str(number) for number in range(1000)])
    assert shown[:200] == [str(number) for number in range(200)]
    assert shown[200:] == ["... 800 more lines were printed: they are in logs/ of the run"]
    for number in range(100):  # ten a second
        now_s[0] += 0.1
        shower.lines("worker 0", [f"calm {number}"])
    assert shown[201:] == [f"calm {number}" for number in range(100)]


def test_a_reader_on_another_node_answers_as_soon_as_there_is_anything(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    paths = {str(tmp_path / "a"): 1, str(tmp_path / "b"): 0}
    assert NodeReader().read(paths, wait_s=60.0) == {str(tmp_path / "a"): b"yz"}
    assert NodeReader().read({str(tmp_path / "b"): 0}, wait_s=0.0) == {}


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    file, reader = tmp_path / "a", OutputReader()
    reader.follow("here", str(file))
    file.write_bytes(b"one")
    found = [reader.read(), reader.read()]
    file.write_bytes(b"one, two")
    reader.follow("here", str(file))
    assert [*found, reader.read_last()] == [{("here", str(file)): b"one"}, {}, {("here", str(file)): b", two"}]
