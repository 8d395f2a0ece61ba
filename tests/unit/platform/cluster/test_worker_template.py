"""Workers forked from the template: they equal those that would have been started; the others are started."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from orchestray.platform.cluster import forking
from support.patience import PATIENCE_S

WORKER = """
import json, os, random, signal, sys, threading
if "--which" in sys.argv:
    sys.path.insert(0, os.getcwd())  # as Ray puts the folder of the driver's script there
    import orchestray
    print(orchestray.__file__, flush=True)
    os._exit(0)
from orchestray.platform.process.working_directory import import_torch
early = [name for name in ("torch", "numpy", "sympy", "pyarrow", "pandas") if name in sys.modules]
for name, _, value in (argument[6:].partition("=") for argument in sys.argv if argument.startswith("--set=")):
    os.environ[name] = value

if "--at-once" in sys.argv:
    torch, numpy = [threading.Thread(target=__import__, args=[name], daemon=True) for name in ("torch", "numpy")]
    numpy_is_locked, cpus = threading.Event(), os.sched_getaffinity(0)
    class Locked:
        def find_spec(self, name, *_):
            if name == "numpy":
                numpy_is_locked.set()  # a finder is asked under the lock of the module
    sys.meta_path.insert(0, Locked())
    def in_the_import_of_torch(process):
        if not numpy_is_locked.is_set():
            numpy.start()
            numpy_is_locked.wait(timeout=600)
        return cpus
    os.sched_getaffinity = in_the_import_of_torch  # the number of threads depends on it
    torch.start()
    torch.join(timeout=600)
    numpy.join(timeout=600)
    print(numpy_is_locked.is_set(), torch.is_alive(), numpy.is_alive(), flush=True)
    os._exit(0)

said = {
    "arguments": sys.argv, "path": sys.path[0], "main": sys.modules["__main__"].__file__,
    "environment": dict(os.environ), "directory": os.getcwd(), "umask": os.umask(0), "niceness": os.nice(0),
    "group": os.getpgid(0) == os.getpid(), "cpus": sorted(os.sched_getaffinity(0)),
    "oom_score": open("/proc/self/oom_score_adj").read(),
    "child_signal": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "parent": os.getppid(),
}
if "--computes" in sys.argv:
    import_torch()
    import numpy, pandas, pyarrow.compute, threadpoolctl, torch
    column = pyarrow.array(numpy.arange(100_000))
    blas = [of["num_threads"] for of in threadpoolctl.threadpool_info() if of["user_api"] == "blas"]
    said |= {
        "early": early, "num_threads": torch.get_num_threads(), "num_threads_of_blas": blas,
        "num_threads_of_arrow": pyarrow.cpu_count(),
        "sums": [pyarrow.compute.sum(pyarrow.chunked_array([column] * 4)).as_py(), int(column.to_pandas().sum())],
    }
if "--draws" in sys.argv:
    import numpy, sympy.core.random, torch
    said["random"] = [random.random(), numpy.random.rand(), torch.rand(1).item(), sympy.core.random.random()]
print(json.dumps(said), flush=True)
print("errors", file=sys.stderr)
if "--lasts" in sys.argv:
    print("heard", sys.stdin.readline())
"""


def outside() -> dict[str, str]:
    """Return the environment of this process, without the variables that pytest and threadpoolctl set."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KMP_"))}


@contextmanager
def template_in(folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a template that forks for shims with these `arguments`; its workers run a script of the tests."""
    workers = folder / "ray" / "_private" / "workers"
    workers.mkdir(parents=True)
    (workers / "default_worker.py").write_text(WORKER)
    (workers / "setup_worker.py").write_text("print('plain')")
    script = Path(forking.SHIM).with_name("worker_template.py")
    command = [sys.executable, str(script), str(folder / forking.NAME), str(workers / "default_worker.py")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=log, env={**outside(), **environment}, text=True, process_group=0
        )
    assert process.stdin is not None
    while not (folder / forking.NAME).exists():
        assert process.poll() is None
    with process:
        yield process
        process.kill()


def arguments(folder: Path, *more: str) -> list[str]:
    worker = folder / "ray" / "_private" / "workers" / "default_worker.py"
    return [str(worker), f"--raylet-name={folder / 'raylet'}", "--worker-id=7", "--language=PYTHON", *more]


def shim(folder: Path, *more: str) -> list[str]:
    """Return the command by which the raylet starts a worker."""
    return [sys.executable, forking.SHIM, *arguments(folder, *more)]


def plain(folder: Path, *more: str) -> list[str]:
    """Return the command of the same worker without a template."""
    return [sys.executable, *arguments(folder, *more)]


def start(
    folder: Path,
    *more: str,
    command: Callable[..., list[str]] = shim,
    directory: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Start a worker as the raylet does, and return when it has ended."""
    return subprocess.run(
        command(folder, *more),
        env={**outside(), **environment},
        cwd=directory or folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        umask=0o027,
        preexec_fn=lambda: os.nice(3),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("t")
    with template_in(folder):
        yield folder


def test_a_fork_has_the_arguments_environment_directory_and_streams_that_it_was_asked_with(folder: Path) -> None:
    done = start(folder, RAY_JOB_ID="01000000", RAY_RAYLET_PID="17")
    said = json.loads(done.stdout)
    assert done.stderr == "errors\n"
    assert said["arguments"] == arguments(folder)[:3]
    assert said["main"] == said["arguments"][0]
    assert Path(said["path"]) == Path(said["main"]).parent
    wanted = {**outside(), "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "17"}
    assert {name: said["environment"].get(name) for name in wanted} == wanted
    assert said["directory"] == str(folder)
    assert (said["umask"], said["niceness"]) == (0o027, os.nice(0) + 3)
    assert said["cpus"] == sorted(os.sched_getaffinity(0))
    assert said["oom_score"] == Path("/proc/self/oom_score_adj").read_text()
    assert said["group"]
    assert said["child_signal"]


def test_a_fork_has_the_variables_of_ray_that_its_runtime_environment_sets(folder: Path) -> None:
    context = {"command_prefix": [], "env_vars": {"RAY_TRAIN_X": "1"}, "py_executable": sys.executable}
    option = f"--serialized-runtime-env-context={json.dumps(context)}"
    assert json.loads(start(folder, option).stdout)["environment"]["RAY_TRAIN_X"] == "1"


@pytest.mark.parametrize(
    "variables", [("OMP_NUM_THREADS=1",), ("OMP_NUM_THREADS=64", "MKL_NUM_THREADS=2", "OPENBLAS_NUM_THREADS=1")]
)
def test_torch_and_numpy_come_into_being_when_imported_with_as_many_threads_as_in_a_plain_worker(
    folder: Path, variables: tuple[str, ...]
) -> None:
    options = ["--computes", *(f"--set={variable}" for variable in variables)]
    forked, started = [json.loads(start(folder, *options, command=how).stdout) for how in (shim, plain)]
    assert forked["early"] == started["early"] == []
    for name in ("num_threads", "num_threads_of_blas", "num_threads_of_arrow", "sums"):
        assert forked[name] == started[name]


def test_threads_of_a_worker_that_import_torch_and_numpy_at_once_come_to_an_end(folder: Path) -> None:
    assert start(folder, "--at-once").stdout == "True False False\n"


def test_forks_share_no_random_numbers(folder: Path) -> None:
    one, two = [json.loads(start(folder, "--draws").stdout)["random"] for _ in range(2)]
    assert all(left != right for left, right in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        ([], {"OMP_NUM_THREADS": "7"}),
        ([], {"PYTHONPATH": "elsewhere"}),
        (["--worker-type=SPILL_WORKER"], {}),
        (['--serialized-runtime-env-context={"env_vars": {"X": "1"}}'], {}),
        (['--serialized-runtime-env-context={"env_vars": {"RAY_X": "${HOME}"}}'], {}),
        (['--serialized-runtime-env-context={"env_vars": {}, "command_prefix": ["cd elsewhere &&"]}'], {}),
        (['--serialized-runtime-env-context={"py_executable": "/another/python"}'], {}),
    ],
)
def test_what_is_not_as_in_the_template_starts_plainly(
    folder: Path, more: list[str], environment: dict[str, str]
) -> None:
    assert start(folder, *more, **environment).stdout == "plain\n"


def test_a_template_ends_with_its_input_and_lets_its_workers_finish_and_the_next_start_plainly_on_the_same_path(
    tmp_path: Path,
) -> None:
    # No folder of the script is on the path.
    safe = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "first")}
    with template_in(tmp_path, **safe) as template:
        asking = subprocess.Popen(
            shim(tmp_path, "--lasts"),
            env={**outside(), **safe},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with asking:
            assert asking.stdout is not None
            forked = json.loads(asking.stdout.readline())
            (worker,) = psutil.Process(template.pid).children()
            assert template.stdin is not None
            template.stdin.close()
            assert template.wait(timeout=PATIENCE_S) == 0
            assert worker.is_running()
            said, _ = asking.communicate("yes\n", timeout=PATIENCE_S)
        assert said == "heard yes\n\n"
        psutil.wait_procs([worker], timeout=PATIENCE_S)
        assert not worker.is_running()
        assert start(tmp_path, **safe).stdout == "plain\n"
    started = json.loads(start(tmp_path, command=plain, **safe).stdout)
    assert (forked["parent"], started["parent"]) == (template.pid, os.getpid())
    assert forked["path"] == started["path"] == safe["PYTHONPATH"]


def test_a_template_that_is_given_threads_says_why_it_ends_and_workers_start_plainly(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with template_in(tmp_path, PYTHONPATH=str(tmp_path)) as template:
        assert template.wait(timeout=PATIENCE_S) == 0
        assert "threads" in (tmp_path / "log").read_text()
        assert start(tmp_path, PYTHONPATH=str(tmp_path)).stdout == "plain\n"


def test_a_template_outlives_requests_that_break_off_and_keeps_nothing_of_them(folder: Path) -> None:
    template = psutil.Process(json.loads(start(folder).stdout)["parent"])
    before = open_when_idle(template)
    for head, rest in ((9, b""), (9, b"not of marshal"), (1, b"N"), (1 << 63, b"N"), (None, b"")):
        with socket.socket(socket.AF_UNIX) as broken:
            broken.connect(str(folder / forking.NAME))
            socket.send_fds(broken, [b"half" if head is None else head.to_bytes(8, "little")], [0, 1, 2])
            with contextlib.suppress(BrokenPipeError):  # what came so far may be enough to refuse it
                broken.sendall(rest)
    assert json.loads(start(folder).stdout)["parent"] == template.pid
    assert open_when_idle(template) == before


def open_when_idle(template: psutil.Process) -> int:
    """Return the number of descriptors of a template without a request in hand.

    It may still be closing those of the last request: wait until the number stays the same.
    """
    deadline_s, found = time.monotonic() + PATIENCE_S, [-1]
    while len(found) < 10 or len(set(found[-10:])) > 1:
        assert time.monotonic() < deadline_s
        found.append(template.num_fds())
        time.sleep(0.01)
    return found[-1]


def test_a_template_short_of_descriptors_forks_when_there_are_some(folder: Path) -> None:
    template = psutil.Process(json.loads(start(folder).stdout)["parent"])
    limits = resource.prlimit(template.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(template.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    with subprocess.Popen(shim(folder), env=outside(), stdout=subprocess.PIPE, text=True) as asking:
        while "Too many open files" not in (folder / "log").read_text():
            assert template.is_running()
            assert asking.poll() is None
        resource.prlimit(template.pid, resource.RLIMIT_NOFILE, limits)
        said, _ = asking.communicate(timeout=PATIENCE_S)
    assert json.loads(said)["parent"] == template.pid


def test_a_fork_imports_the_orchestray_that_its_own_path_leads_to(folder: Path, tmp_path: Path) -> None:
    package = tmp_path / "orchestray" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    assert start(folder, "--which", directory=tmp_path).stdout == f"{package}\n"
