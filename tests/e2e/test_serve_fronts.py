"""Several fronts behind Ray Serve's proxy, of which one is killed, and one loses its machine."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from support.certificates import NEEDS_OPENSSL, written_pair
from support.machines import NUM_CPUS, Machines
from support.patience import PATIENCE_S
from support.serve_command import Endpoint, asked, metric
from support.served import written_run

NAME = f"fronted-{os.getpid()}"
SAMPLE = [0.5] * 64
_ASK_S = 0.2
"""Time between requests of one who waits for a process to start: it needs the processor itself."""


def front_processes() -> list[psutil.Process]:
    return titled("fronts")


def titled(kind: str) -> list[psutil.Process]:
    """Return processes of a Serve application of the endpoint: its fronts, or the replicas of a version."""
    title = f"ServeReplica:orchestray-{NAME}-{kind}"
    return [each for each in psutil.process_iter(["cmdline"]) if title in " ".join(each.info["cmdline"] or [])]


def answering(endpoint: Endpoint) -> set[str]:
    """Send a few requests, each of which succeeds; return the names of fronts that have answered any by then."""
    assert asked(endpoint, 8) == [200] * 8
    told = [labels for _ in range(8) for labels in metric(endpoint, "orchestray_requests_total")]
    return {found[1] for labels in told if (found := re.search(r'front="(.+?)".*status="200",version="1"', labels))}


def until_fronts(endpoint: Endpoint, wanted: int, *, beside: frozenset[str] = frozenset()) -> frozenset[str]:
    """Ask until `wanted` fronts have answered, those `beside` not counted."""
    found: set[str] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found - beside) < wanted:
        assert time.monotonic() < deadline_s, f"only these answer: {found}"
        found |= answering(endpoint)
        time.sleep(_ASK_S)
    return frozenset(found)


def until_answered(endpoint: Endpoint) -> set[int]:
    """Ask until all requests succeed: a front that is gone is asked until its loss is noticed.

    Return all statuses that came by then.
    """
    found: set[int] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while (statuses := asked(endpoint, 8)) != [200] * 8:
        found |= set(statuses)
        assert time.monotonic() < deadline_s, f"nobody answers any more: {found}"
        time.sleep(_ASK_S)
    return found | {200}


def until_one_waits(endpoint: Endpoint) -> psutil.Process:
    """Return a front that has requests in its queue."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline_s, "no front has a request that waits"
        for labels, num_queued in metric(endpoint, "orchestray_queue_length").items():
            found = re.search(r'front="[^"]+:(\d+)"', labels)
            if found and num_queued:
                return next(each for each in front_processes() if int(found[1]) in ports_of(each))


def ports_of(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


@NEEDS_OPENSSL
def test_fronts_on_two_machines_answer_alike_over_https_and_go_on_when_one_is_killed_and_when_a_machine_is_lost(
    machines: Machines, tmp_path: Path
) -> None:
    tls = written_pair(tmp_path)
    keys = (f"http.tls.certificate={tls.certificate}", f"http.tls.key={tls.key}")
    run = written_run(tmp_path / "runs", NAME)
    several = ("http.fronts=2", "replicas=2", f"resources.cpus_per_worker={NUM_CPUS}", *keys)
    place = ("--address", machines.gcs_address)
    endpoint = Endpoint(run, *several, *place, cwd=tmp_path, env=machines.token, certificate=tls.certificate)
    try:
        assert endpoint.url.startswith("https://")
        node_of = machines.workers()
        assert len({node_of[process.pid] for process in front_processes()}) == 2, "a front on each node"
        wanted = endpoint.predict(SAMPLE)
        before = until_fronts(endpoint, 2)
        replicas = titled(NAME)
        for replica in replicas:
            replica.suspend()
        with ThreadPoolExecutor(1) as clients:
            try:
                asking = clients.submit(asked, endpoint, 16)
                killed = until_one_waits(endpoint)
                killed.send_signal(signal.SIGKILL)
            finally:
                for replica in replicas:
                    replica.resume()
            statuses = set(asking.result())
        assert {500} <= statuses <= {200, 500}, "Serve's proxy says so of those that waited there, and of no others"
        assert until_answered(endpoint) <= {200, 500}
        after = until_fronts(endpoint, 1, beside=before) | until_fronts(endpoint, 2)
        assert (len(after & before), len(after - before)) == (1, 1), "the one that was left, and a new one"
        assert endpoint.predict(SAMPLE) == wanted
        assert killed not in front_processes()
        machines.kill_last_node()
        until_answered(endpoint)
        assert endpoint.predict(SAMPLE) == wanted
    finally:
        ended, stderr = endpoint.end(signal.SIGTERM)
    assert (ended, "Traceback" in stderr) == (0, False)
    assert front_processes() == []
