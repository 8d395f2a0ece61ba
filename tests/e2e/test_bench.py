"""`orchestray bench` as a user types it, against a server of this process."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from support.cli import Running, orchestray, orchestray_here

DOCUMENT = {
    "paths": {"/predict": {"post": {"requestBody": {"content": {"application/json": {"example": {"inputs": [1]}}}}}}}
}


class Counted(ThreadingHTTPServer):
    """A server that wants the token `mine` and the document's example, and counts what it gets."""

    daemon_threads = True
    num_good = num_bad = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Counted

    def do_GET(self) -> None:
        self._answer(200, json.dumps(DOCUMENT).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        allowed = self.headers.get("Authorization") == "Bearer mine"
        good = allowed and json.loads(body) == {"inputs": [1]} and self.path == "/predict"
        if good:
            self.server.num_good += 1
        else:
            self.server.num_bad += 1
        self._answer(200 if good else 422 if allowed else 401, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, Counted]]:
    with Counted(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{made.server_address[1]}", made
        made.shutdown()
        thread.join()


def test_an_endpoint_is_measured_at_each_rate_with_its_own_example(server: tuple[str, Counted], tmp_path: Path) -> None:
    url, made = server
    arguments = [
        "--rates",
        "20,40",
        "--duration-s",
        "0.5",
        "--warm-up-s",
        "0.1",
        "--deadline-ms",
        "30000",
        "--processes",
        "2",
    ]
    done = orchestray("bench", url, *arguments, "--output", tmp_path, "--json", env={"ORCHESTRAY_TOKEN": "mine"})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [point["load"] for point in told["points"]] == ["20 requests/s", "40 requests/s"]
    for point in told["points"]:
        assert point["num_failed"] == 0
        assert 0 < point["num_ok"] == point["num_offered"]
        assert point["goodput_per_s"] == pytest.approx(point["num_ok"] / 0.5, rel=1e-3)
    assert sum(point["num_ok"] for point in told["points"]) <= made.num_good
    assert "Latency against rate" in done.stdout
    assert "the example in /openapi.json" in done.stderr
    assert json.loads((tmp_path / "bench.json").read_text()) == told
    ET.parse(tmp_path / "bench.svg")  # noqa: S314 - our own


def test_a_recorded_trace_is_asked_as_it_was_recorded_and_bursts_come_at_once(
    server: tuple[str, Counted], tmp_path: Path
) -> None:
    url, made = server
    recorded = [7.0, 7.0, 7.01, 7.3]
    (tmp_path / "trace.txt").write_text("# seconds\n" + "".join(f"{moment}\n" for moment in recorded))
    env = {"ORCHESTRAY_TOKEN": "mine"}
    done = orchestray("bench", url, "--trace", "trace.txt", "--warm-up-s", "0", "--json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["load"], told["num_ok"], told["num_offered"]) == ("a trace of 4 requests", 4, 4)
    assert made.num_good >= 4
    load = ["--rate", "60", "--burst", "6", "--duration-s", "0.5", "--warm-up-s", "0"]
    done = orchestray("bench", url, *load, "--json", env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["load"] == "60 requests/s in bursts of 6"
    assert told["num_failed"] == 0
    assert told["num_ok"] == told["num_offered"] > 0


def test_an_interrupted_load_gives_what_was_measured_until_then(server: tuple[str, Counted], tmp_path: Path) -> None:
    url, made = server
    load = ["--clients", "2", "--duration-s", "600", "--warm-up-s", "0", "--processes", "2", "--json"]
    running = Running(["bench", url, *load], tmp_path, env={"ORCHESTRAY_TOKEN": "mine"})
    running.until("some answers", lambda: made.num_good > 50)
    running.signal(signal.SIGINT)
    status, stdout, stderr = running.finish()
    assert (status, "Traceback" in stderr) == (130, False)
    assert stderr.endswith("Interrupted: these are the results until then.\n")
    told = json.loads(stdout.splitlines()[-1])
    assert told["num_failed"] == 0
    assert told["num_ok"] == made.num_good - 1  # one more asks whether it answers well
    assert told["duration_s"] < 300


def test_where_a_result_cannot_be_kept_nothing_is_measured(
    server: tuple[str, Counted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, made = server
    monkeypatch.setenv("ORCHESTRAY_TOKEN", "mine")
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "results"
    done = orchestray_here("bench", url, "--clients", "1", "--output", place)
    assert done.returncode == 1
    assert done.stderr.startswith(f"could not make the directory {place}: ")
    assert "Traceback" not in done.stderr
    assert made.num_good + made.num_bad == 0


def test_a_token_that_is_missing_and_a_load_that_is_none_are_said_in_sentences(
    server: tuple[str, Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, made = server
    monkeypatch.setenv("ORCHESTRAY_TOKEN", "")
    done = orchestray_here("bench", url, "--clients", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"{url}/predict answered 401: it wants a token, or another one. "
        "Give it with --token, or in the environment variable ORCHESTRAY_TOKEN.\n"
    )
    assert made.num_bad == 1
    done = orchestray_here("bench", "localhost:1", "--rate", "0", "--clients", "0", "--burst", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "--rate and --clients: one load at a time",
        "--rate: must be > 0 requests/s, got 0",
        "--clients: must be >= 1, got 0",
        "--burst: goes with rates, not with --clients or --trace",
    ]
