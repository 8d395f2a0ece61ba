"""Pushes to a replicated server while its state floods a connection: a copy's, another copy's, or the worker's."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness import benchmark, commands
from train.ours.replicated_server import COPY, END, HOST, OTHER_COPY, WORKER, channel_of

_SPEC: dict[str, Any] = {"width": 1024, "lr": 0.01, "in_flight": 4}
"""Two square matrices of float32, 8 MB, and as many in a gradient; copies of the state that are on their way."""
_PUSHES, _PUSHES_QUICK, _WARM_UP = 200, 20, 5
_SIDES = {
    "no flood": "",
    "another copy's connection": OTHER_COPY,
    "the awaited copy's connection": COPY,
    "the worker's connection": WORKER,
}
_LIMIT = 3.0
_TIMEOUT_S = 60.0


class Worker:
    """A worker that pushes gradients, and passes over all that comes before an answer."""

    def __init__(self, store: Any) -> None:
        from orchestray.trainers.ps.protocol.requests import Hello, Request

        self._store = store
        self._channel = channel_of(store, WORKER, 1)
        self._step = self._number = 0
        self._gradient = torch.full((2 * _SPEC["width"] ** 2,), 1e-6)
        self._ask(Request(hello=Hello(0, True)), [])

    def push(self) -> float:
        """Push a gradient; return the seconds until it was acknowledged."""
        from orchestray.trainers.ps.protocol.requests import Origin, Part, Push, Request

        self._step += 1
        origin = Origin(0, (Part(self._step, 0, 1, 1),), self._step - 1)
        began_s = time.perf_counter()
        self._ask(Request(push=Push(origin=origin)), [self._gradient])
        return time.perf_counter() - began_s

    def flood(self, peer: str) -> int:
        """Have the server end its flood and flood the connection of a peer; return the bytes of the one that ended."""
        number, self._number = self._number, self._number + 1
        self._store.set(f"flood-{number}", peer)
        while not self._store.check([f"flooded-{number}"]):  # what is on its way is passed over
            self.push()
        return int(self._store.get(f"flooded-{number}"))

    def end(self) -> None:
        self.flood("")
        self._store.set(f"flood-{self._number}", END)
        self._channel.close()

    def _ask(self, request: Any, tensors: list[Tensor]) -> None:
        from orchestray.trainers.ps.protocol.messages import ANSWER, REQUEST, finish, result, start
        from orchestray.trainers.ps.protocol.requests import Answer, Header

        handles = start(self._channel, REQUEST, request, tensors)
        while (message := result(self._channel.irecv())).tag != ANSWER:
            pass
        finish(handles)
        answer = Header.decode(Answer, message.content).sections
        if answer.error is not None:
            raise benchmark.BenchmarkError(f"the server says: {answer.error}")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(5)
    pushes = _PUSHES_QUICK if options.quick else _PUSHES
    report.settings = {"rounds": rounds, "pushes": pushes, **_SPEC}
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    told = commands.write_json(options.workspace / "spec.json", _SPEC)
    script = str(benchmark.FOLDER / "train" / "ours" / "replicated_server.py")
    command = commands.python(script, "server", str(told), str(store.port))
    taken_ms: dict[str, list[list[float]]] = {name: [] for name in _SIDES}
    rates: dict[str, list[float]] = {name: [] for name in _SIDES}
    with commands.running(command, {"OMP_NUM_THREADS": "1"}) as server:
        worker = Worker(store)

        def call(name: str) -> None:
            worker.flood(_SIDES[name])
            for _ in range(_WARM_UP):
                worker.push()
            began_s = time.perf_counter()
            taken_ms[name].append([1e3 * worker.push() for _ in range(pushes)])
            seconds = time.perf_counter() - began_s
            rates[name].append(worker.flood("") / seconds / 1e6)

        benchmark.alternate({name: partial(call, name) for name in _SIDES}, rounds, benchmark.say)
        worker.end()
        server.process.wait(_TIMEOUT_S)
    _report(report, taken_ms, rates)


def _report(report: benchmark.Report, taken_ms: dict[str, list[list[float]]], rates: dict[str, list[float]]) -> None:
    p95 = {name: [statistics.quantiles(each, n=20)[-1] for each in runs] for name, runs in taken_ms.items()}
    for name, runs in taken_ms.items():
        report.add(f"{name}: median of a push", "ms", [statistics.median(each) for each in runs])
        report.add(f"{name}: p95 of a push", "ms", p95[name])
        if _SIDES[name]:
            report.add(f"{name}: flood", "MB/s", rates[name])
    quiet = p95["no flood"]
    for name in list(_SIDES)[1:]:
        ratio = report.compare(f"flood of {name}: p95 / no flood", p95[name], quiet)
        if _SIDES[name] != WORKER:
            report.goal(f"flood of {name}: p95 / no flood", ratio, _LIMIT)
    apart = report.compare(
        "p95: flood of another copy's connection / of the worker's",
        p95["another copy's connection"],
        p95["the worker's connection"],
    )
    report.goal("p95: flood of another copy's connection / of the worker's", apart, 1.0)
    report.notes += [
        "A server of 8 MB with a copy, whose word every answer waits for, and a worker; all over TCP in one machine.",
        "The flood is the state, as a new copy is sent it, again and again with four on their way.",
        (
            "On the awaited copy's connection an entry stands behind the flood, and the answer waits for it: with the "
            "copy's word nothing acknowledged is lost. A new copy is sent the state once."
        ),
    ]


if __name__ == "__main__":
    benchmark.run(
        "replication_flood",
        "The 95th percentile of a push to a replicated server while its state floods one of its connections.",
        measure,
    )
