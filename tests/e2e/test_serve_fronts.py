"""Several fronts behind Ray Serve's proxy, of which one is killed, or loses its machine."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil

from support.certificates import NEEDS_OPENSSL, written_pair
from support.patience import PATIENCE_S
from support.ray_cluster import ray_cluster
from support.serve_command import Endpoint, asked, metric
from support.served import written_run

NAME = f"fronted-{os.getpid()}"
SAMPLE = [0.5] * 64


def front_processes() -> list[psutil.Process]:
    title = f"ServeReplica:orchestray-{NAME}-fronts"
    return [each for each in psutil.process_iter(["cmdline"]) if title in " ".join(each.info["cmdline"] or [])]


def answering(endpoint: Endpoint) -> set[str]:
    """A few requests, each of which succeeds, and the names of fronts that have answered any by then."""
    assert asked(endpoint, 8) == [200] * 8
    told = [labels for _ in range(8) for labels in metric(endpoint, "orchestray_requests_total")]
    return {found[1] for labels in told if (found := re.search(r'front="(.+?)".*status="200",version="1"', labels))}


def until_fronts(endpoint: Endpoint, wanted: int, *, beside: frozenset[str] = frozenset()) -> frozenset[str]:
    """Ask until so many fronts have answered, those `beside` not counted."""
    found: set[str] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found - beside) < wanted:
        assert time.monotonic() < deadline_s, f"only these answer: {found}"
        found |= answering(endpoint)
    return frozenset(found)


def until_answered(endpoint: Endpoint) -> None:
    """A front that is gone may be asked until its loss is noticed."""
    deadline_s = time.monotonic() + PATIENCE_S
    while asked(endpoint, 8) != [200] * 8:
        assert time.monotonic() < deadline_s, "nobody answers any more"


@NEEDS_OPENSSL
def test_a_killed_front_is_replaced_and_the_other_answers_over_https_meanwhile(tmp_path: Path) -> None:
    tls = written_pair(tmp_path)
    keys = (f"http.tls.certificate={tls.certificate}", f"http.tls.key={tls.key}")
    run = written_run(tmp_path / "runs", NAME)
    endpoint = Endpoint(run, "http.fronts=2", *keys, cwd=tmp_path, certificate=tls.certificate)
    try:
        assert endpoint.url.startswith("https://")
        wanted = endpoint.predict(SAMPLE)
        before = until_fronts(endpoint, 2)
        killed = front_processes()[0]
        killed.send_signal(signal.SIGKILL)
        until_answered(endpoint)
        after = until_fronts(endpoint, 1, beside=before) | until_fronts(endpoint, 2)
        assert (len(after & before), len(after - before)) == (1, 1), "the one that was left, and a new one"
        assert endpoint.predict(SAMPLE) == wanted
        assert killed not in front_processes()
    finally:
        ended, stderr = endpoint.end(signal.SIGTERM)
    assert (ended, "Traceback" in stderr) == (0, False)
    assert front_processes() == []


def test_fronts_and_replicas_on_two_machines_answer_alike_and_go_on_when_one_machine_is_lost(tmp_path: Path) -> None:
    run = written_run(tmp_path / "runs", NAME)
    with ray_cluster(num_cpus=1, num_nodes=2) as cluster:
        several = ("http.fronts=2", "replicas=2")
        endpoint = Endpoint(run, *several, "--address", cluster.gcs_address, cwd=tmp_path)
        try:
            assert len({process.ppid() for process in front_processes()}) == 2, "a front on each node"
            until_fronts(endpoint, 2)
            wanted = endpoint.predict(SAMPLE)
            cluster.kill_last_node()
            until_answered(endpoint)
            assert endpoint.predict(SAMPLE) == wanted
        finally:
            ended, stderr = endpoint.end(signal.SIGTERM)
        assert (ended, "Traceback" in stderr) == (0, False)
