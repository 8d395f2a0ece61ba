"""`orchestray serve` as a user types it: it says where it is, answers, and ends as a signal asks."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from support import gated_task
from support.cli import orchestray, orchestray_here
from support.machines import NUM_CPUS, Machines
from support.patience import PATIENCE_S
from support.serve_command import Endpoint, metric, until_replicas
from support.served import written_run

WARNING = "lets other machines ask, without a token"


@pytest.mark.parametrize(
    ("number", "status", "host", "local"),
    [(signal.SIGINT, 130, "http.host=127.0.0.1", True), (signal.SIGTERM, 0, "http.host=0.0.0.0", False)],
)
def test_a_signal_ends_it_when_what_runs_and_what_waits_is_answered_and_who_serves_others_without_a_token_is_warned(
    tmp_path: Path, number: signal.Signals, status: int, host: str, local: bool
) -> None:
    task = {"type": f"{Path(gated_task.__file__)}:Gated", "directory": str(tmp_path)}
    run = written_run(tmp_path / "runs", task=task)
    endpoint = Endpoint(run, "batching.max_batch_size=2", host, cwd=tmp_path, local=local)
    inputs = [[2.0 + i] * gated_task.NUM_INPUTS for i in range(6)]
    with ThreadPoolExecutor(len(inputs)) as pool:
        answers = [pool.submit(endpoint.predict, each) for each in inputs]
        try:
            until("a batch runs and the others wait", lambda: in_hand(endpoint) == 6 and (tmp_path / "waits").exists())
            endpoint.process.send_signal(number)
            until("nobody is let in", lambda: not lets_in(endpoint))
            assert endpoint.process.poll() is None
        except BaseException:
            endpoint.process.kill()
            raise
        (tmp_path / "open").touch()
        assert [each.result(PATIENCE_S) for each in answers] == [[2 * x for x in each] for each in inputs]
    _, stderr = endpoint.process.communicate(timeout=PATIENCE_S)
    assert endpoint.process.returncode == status
    assert "Traceback" not in stderr
    assert (WARNING in stderr) == host.endswith("=0.0.0.0")
    assert list((tmp_path / "runs" / ".endpoints").iterdir()) == []


def in_hand(endpoint: Endpoint) -> int:
    """Return the number of requests that wait or run."""
    return sum(sum(metric(endpoint, f"orchestray_{name}").values()) for name in ("queue_length", "in_flight"))


def lets_in(endpoint: Endpoint) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", int(endpoint.url.rpartition(":")[2])), timeout=PATIENCE_S):
            return True
    except ConnectionRefusedError:
        return False


def until(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: never"
        time.sleep(0.02)


@pytest.mark.slow
def test_replicas_on_two_machines_share_the_load_lose_one_and_answer_every_request_rightly(
    machines: Machines, tmp_path: Path
) -> None:
    task = {"type": f"{Path(gated_task.__file__)}:Gated", "directory": str(tmp_path)}
    run = written_run(tmp_path / "runs", task=task)
    inputs = torch.rand(120, gated_task.NUM_INPUTS, generator=torch.Generator().manual_seed(0)).tolist()
    held = [[2.0 + x for x in each] for each in inputs]
    each = "batching.max_batch_size=4"  # both get a part
    apart = ("replicas=2", f"resources.cpus_per_worker={NUM_CPUS}", "--address", machines.gcs_address)
    endpoint = Endpoint(run, each, *apart, cwd=tmp_path, local=False, env=machines.token)
    before = counted_by_serve(machines)
    try:
        until_replicas(endpoint, 2)
        assert len({node_of(labels) for labels in metric(endpoint, "orchestray_replica_info")}) == 2
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(endpoint.predict, inputs))
            until("both have a part", lambda: share_of_the_least(endpoint, pool, inputs) > 0.25)
            answered = metric(endpoint, "orchestray_requests_total")
            num_posts = sum(count for labels, count in answered.items() if 'model=""' not in labels)
            until("Ray Serve has counted them as well", lambda: counted_by_serve(machines) - before == num_posts)
            under_way = [pool.submit(endpoint.predict, each) for each in held]
            until("both hold a batch, and the rest waits", lambda: in_hand(endpoint) == 12)
            machines.kill_last_node()
            (tmp_path / "open").touch()
            answers += [each.result(PATIENCE_S) for each in under_way]
        for answer, given in zip(answers, [*inputs, *held], strict=True):
            assert answer == pytest.approx([2 * x for x in given], abs=1e-5)
        until_replicas(endpoint, 1)
        (left,) = metric(endpoint, "orchestray_replica_info")
        assert node_of(left) == machines.head
    finally:
        ended, stderr = endpoint.end(signal.SIGTERM)
    assert (ended, "Traceback" in stderr) == (0, False)


def node_of(labels: str) -> str:
    """Return the node of the cluster among the labels of a replica."""
    return labels.partition('node="')[2].partition('"')[0]


def counted_by_serve(machines: Machines) -> int:
    """Return the number of answered POSTs that Ray Serve's own metrics show."""
    lines = [line for line in machines.metrics().splitlines() if line.startswith("ray_serve_num_http_requests_total{")]
    return sum(
        int(float(line.rpartition(" ")[2])) for line in lines if 'method="POST"' in line and 'status_code="200"' in line
    )


def share_of_the_least(endpoint: Endpoint, pool: ThreadPoolExecutor, inputs: list[Any]) -> float:
    """Return the share of the replica that has had the fewest samples, of all so far and some more."""
    list(pool.map(endpoint.predict, inputs))
    parts = metric(endpoint, "orchestray_replica_samples_total").values()
    assert len(parts) == 2
    return min(parts) / sum(parts)


def test_without_ray_the_model_is_in_the_process_that_listens_and_the_load_generator_counts_what_it_does(
    tmp_path: Path,
) -> None:
    endpoint = Endpoint(written_run(tmp_path / "runs"), cwd=tmp_path)
    try:
        assert psutil.Process(endpoint.process.pid).children(recursive=True) == []
        loaded = {Path(each.path).name for each in psutil.Process(endpoint.process.pid).memory_maps()}
        assert any(name.startswith("libtorch") for name in loaded)
        assert not any(name.startswith("_raylet") for name in loaded)
        load = ["--clients", "3", "--duration-s", "0.5", "--warm-up-s", "0"]
        done = orchestray("bench", endpoint.url, *load, "--quiet", "--json", cwd=tmp_path)
        counted = metric(endpoint, "orchestray_requests_total")
    finally:
        endpoint.end(signal.SIGTERM)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["url"] == f"{endpoint.url}/predict"
    assert (told["num_failed"], told["errors"], told["statuses"]) == (0, {}, {"200": told["num_ok"]})
    assert told["num_ok"] == told["num_offered"] >= 3
    by_model = {labels: num for labels, num in counted.items() if 'model="digits"' in labels}
    # One more than were measured: whether the endpoint answers well is asked first.
    assert by_model == {'{model="digits",status="200",version="1"}': told["num_ok"] + 1}


def test_what_is_wrong_is_a_sentence_and_a_status(tmp_path: Path) -> None:
    run = written_run(tmp_path / "runs")
    cases = {
        ("serve", tmp_path / "nothing.yaml"): (2, "there is no such file"),
        ("serve", tmp_path): (2, "there is no run in"),
        ("serve", run, "http.prot=1", "replicas=0"): (2, "did you mean 'port'"),
        ("serve", run, "--update"): (2, "no endpoint named 'digits' runs"),
        ("serve", run, "--local", "replicas=2"): (2, "replicas: without Ray (--local) there is one process"),
        ("serve", run, "--port", "0", "--address", "127.0.0.1:1"): (1, "127.0.0.1:1"),
    }
    for arguments, (status, text) in cases.items():
        ended = orchestray_here(*arguments, "--runs-dir", tmp_path / "runs")
        assert ended.returncode == status, ended.stderr
        assert text in ended.stderr
        assert "Traceback" not in ended.stderr


def test_what_cannot_be_served_ends_the_command_with_a_sentence_and_a_status(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run, empty, damaged = (written_run(runs, name) for name in ("good", "empty", "damaged"))
    shutil.rmtree(empty / "model")
    weights = damaged / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # as long as before
    weights.write_bytes(data)
    gone = written_run(runs, "gone", task={"type": f"{tmp_path}/gone.py:Task"}, tensors={"weight": torch.zeros(1)})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: dict[tuple[str | Path, ...], tuple[int, str]] = {
            (run, "--port", str(port)): (1, f"could not listen on 127.0.0.1:{port}: address already in use"),
            (empty, "--port", "0"): (2, "there is no trained model in"),
            (damaged, "--port", "0"): (1, "is damaged (model.safetensors: checksum differs)"),
            (gone, "--port", "0"): (2, f"there is no module {tmp_path}/gone.py for task.type"),
        }
        for arguments, (status, text) in cases.items():
            ended = orchestray_here("serve", *arguments, "--local", "--runs-dir", runs)
            assert ended.returncode == status, ended.stderr
            assert text in ended.stderr
            assert "Traceback" not in ended.stderr
            assert not ended.stdout
