"""From the command `orchestray serve` to the first answer: without Ray, with a Ray of its own, on one that runs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from harness import benchmark, commands
from serve import serving_sides as sides

_GOALS_S = {"--local": 3.0, "with a Ray of its own": 9.0, "on a Ray that runs": 4.0}
_RAY_READY_S = 120.0


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    rounds = options.rounds(5)
    report.settings = {"rounds": rounds}
    found: dict[str, list[float]] = {name: [] for name in _GOALS_S}

    def run(name: str, *flags: str) -> None:
        called_s = time.time()
        with sides.ours(options, 0.0, 0.0, flags=flags)() as endpoint:
            found[name].append(time.time() - endpoint.running.called_at)
            benchmark.say(f"  {name}: {found[name][-1]:.2f} s, {time.time() - called_s:.2f} s with what came before")

    with _a_ray(options.workspace / "ray") as address:
        sides_ = {
            "--local": partial(run, "--local", "--local"),
            "with a Ray of its own": partial(run, "with a Ray of its own"),
            "on a Ray that runs": partial(run, "on a Ray that runs", "--address", address),
        }
        benchmark.alternate(sides_, rounds, benchmark.say)
    for name, goal_s in _GOALS_S.items():
        report.goal(name, report.add(f"{name}: command to first answer", "s", found[name]).median, goal_s, "s")
    report.notes.append(
        "The model takes no time; the answer is asked for every 20 ms. The Ray that runs is `ray start --head` with a "
        "dashboard; Ray Serve is started on it by the first endpoint, and ended with it."
    )


@contextlib.contextmanager
def _a_ray(folder: Path) -> Iterator[str]:
    """Run `ray start --head`, and yield its address."""
    gcs, dashboard, client = (sides.free_port() for _ in range(3))
    command = [commands.script("ray"), "start", "--head", "--block", "--num-cpus=2", f"--port={gcs}"]
    command += ["--node-ip-address=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    command += ["--disable-usage-stats", f"--temp-dir={folder}"]
    with commands.running(command) as ray:
        ray.wait_until(partial(_listens, dashboard), _RAY_READY_S, "Ray")
        yield f"127.0.0.1:{gcs}"


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    benchmark.run("serve_ready", "From the command `orchestray serve` to the first answer.", measure)
