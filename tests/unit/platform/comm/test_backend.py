"""The choice of the backend: by what a gang was given, whatever its processes see."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orchestray.platform.comm.backend import (
    NCCL_SETTINGS,
    BackendKind,
    Given,
    apply_nccl_settings,
    backend_of_stages,
    check_visible,
    choose_backend,
    device_index,
    nccl_settings,
    refuse_amount,
)
from orchestray.platform.errors import ClusterError


def on(node: str, gpus: float, *ids: str) -> Given:
    return Given(gpus, node, ids)


def packed(gpus: float) -> list[Given]:
    """Return four workers of one machine, which Ray gives the first GPUs that are free."""
    ranges = [range(int(rank * gpus), math.ceil((rank + 1) * gpus)) for rank in range(4)]
    return [on("a", gpus, *map(str, each)) for each in ranges]


AMOUNTS = (0, 0.25, 0.5, 1, 2)
"""GPUs for each worker."""
OVER_HOST_FOR_PARTS: tuple[BackendKind, ...] = ("gloo", "over_host", "over_host", "nccl", "nccl")
WITHOUT: tuple[BackendKind, ...] = ("gloo",) * 5
SITUATIONS: dict[str, tuple[Callable[[float], list[Given]], tuple[BackendKind | None, ...]]] = {
    "workers on one machine, in a Ray of our own or one that is there": (packed, OVER_HOST_FOR_PARTS),
    "the same with spares that have taken over on another machine": (
        lambda gpus: [*packed(gpus)[:2], on("b", gpus, *packed(gpus)[0].ids)],
        OVER_HOST_FOR_PARTS,
    ),
    "a worker on each of two machines": (
        lambda gpus: [on(node, gpus, *packed(gpus)[0].ids) for node in "ab"],
        ("gloo", "nccl", "nccl", "nccl", "nccl"),
    ),
    "Ray Train, which makes the group before the places are known": (
        lambda gpus: [Given(gpus)] * 3,
        OVER_HOST_FOR_PARTS,
    ),
    "one worker": (lambda gpus: packed(gpus)[:1], WITHOUT),
    "the servers beside workers that have GPUs": (lambda _: [Given(0.0)] * 2, WITHOUT),
    "another worker on a machine without GPUs": (
        lambda gpus: [*packed(gpus), on("b", 0)],
        ("gloo", None, None, None, None),
    ),
}
"""Maps situations to what the members are given, and the backend for each of `AMOUNTS`; None: refused."""


@pytest.mark.parametrize(("column", "gpus"), list(enumerate(AMOUNTS)))
@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_amount_of_gpus_has_its_backend_in_each_situation(situation: str, column: int, gpus: float) -> None:
    members, row = SITUATIONS[situation]
    if (expected := row[column]) is not None:
        assert choose_backend(members(gpus)) == expected
        return
    with pytest.raises(ClusterError, match=r"4 of 5 workers have a GPU and the others have none.*Set resources"):
        choose_backend(members(gpus))


def test_stages_that_meet_at_their_servers_never_make_a_communicator() -> None:
    assert [backend_of_stages(on_gpus=on_gpus) for on_gpus in (False, True)] == ["gloo", "over_host"]


CASES: dict[str, tuple[list[Given], BackendKind]] = {
    "a run on CPUs, also on a machine with GPUs that all its processes see": ([on("a", 0), on("a", 0)], "gloo"),
    "the servers beside workers with GPUs": ([Given(0.0), Given(0.0)], "gloo"),
    "one worker, which talks to nobody": ([on("a", 1, "0")], "gloo"),
    "a GPU each on one machine": ([on("a", 1, "0"), on("a", 1, "1")], "nccl"),
    "a GPU each on two machines, where the ids are the same": ([on("a", 1, "0"), on("b", 1, "0")], "nccl"),
    "two GPUs each": ([on("a", 2, "0", "1"), on("a", 2, "2", "3")], "nccl"),
    "halves of one GPU": ([on("a", 0.5, "0"), on("a", 0.5, "0")], "over_host"),
    "quarters of one GPU": ([on("a", 0.25, "0")] * 4, "over_host"),
    "quarters, of which two are on one GPU": (
        [on("a", 0.25, "0"), on("a", 0.25, "1"), on("a", 0.25, "1")],
        "over_host",
    ),
    "halves that Ray has put on different GPUs": ([on("a", 0.5, "0"), on("a", 0.5, "1")], "nccl"),
    "halves on different machines": ([on("a", 0.5, "0"), on("b", 0.5, "0")], "nccl"),
    "most of a GPU each, so that no two fit on one": ([Given(0.6), Given(0.6)], "nccl"),
    "Ray Train, which makes the group before the places are known: a GPU each": ([Given(1)] * 4, "nccl"),
    "Ray Train: halves may come to share a GPU": ([Given(0.5)] * 2, "over_host"),
    "halves whose machines are known and differ": ([on("a", 0.5), on("b", 0.5)], "nccl"),
    "halves whose machine is known and the same": ([on("a", 0.5), on("a", 0.5)], "over_host"),
    "a half whose machine is not known yet": ([on("a", 0.5), Given(0.5)], "over_host"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gang_gets_the_backend_that_fits_what_it_was_given(case: str) -> None:
    given, expected = CASES[case]
    assert choose_backend(given) == expected
    assert choose_backend(given[::-1]) == expected, "the order of ranks makes no difference"


@pytest.mark.parametrize("sees", [False, True])
def test_what_a_process_sees_changes_nothing(monkeypatch: pytest.MonkeyPatch, *, sees: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8 * sees)
    for given, expected in CASES.values():
        assert choose_backend(given) == expected


def test_a_gang_over_machines_with_and_without_gpus_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"1 of 3 workers have a GPU .* Set resources.gpus_per_worker to 0, or take"):
        choose_backend([on("a", 1, "0"), on("b", 0), on("b", 0)])


def test_a_part_of_a_second_gpu_is_refused() -> None:
    assert [refuse_amount(gpus) for gpus in (0.0, 0.25, 0.5, 1.0, 2.0)] == [None] * 5
    with pytest.raises(ClusterError, match=r"gpus_per_worker is 1.5: Ray divides one GPU, .* use a whole number"):
        choose_backend([on("a", 1.5, "0", "1")] * 2)


@pytest.mark.parametrize(
    ("ids", "visible", "index"),
    [
        ((), (), 0),
        (("0",), ("0",), 0),
        (("5",), ("5",), 0),  # an actor sees its own alone
        (("2",), ("0", "1", "2", "3"), 2),  # Ray Train: a worker sees those of its neighbours
        (("2",), ("3", "2"), 1),
        (("3", "2"), ("2", "3"), 0),
        (("2",), (), 2),
        (("GPU-5f2e",), ("GPU-77aa", "GPU-5f2e"), 1),
    ],
)
def test_a_process_computes_on_the_first_of_its_own_gpus(
    ids: tuple[str, ...], visible: tuple[str, ...], index: int
) -> None:
    assert device_index(ids, visible) == index


def test_a_gpu_that_torch_does_not_find_is_refused() -> None:
    check_visible(1, 2, "2.13.0")
    with pytest.raises(ClusterError, match=r"given a GPU, and torch 2.13.0\+cpu finds none on its machine. Install"):
        check_visible(0, 0, "2.13.0+cpu")
    with pytest.raises(ClusterError, match="finds only 1 on its machine"):
        check_visible(1, 1, "2.13.0")


def test_each_setting_of_nccl_is_one_that_this_torch_reads() -> None:
    """Find a variable that torch has renamed: its watchdog would be on, and end the process of a survivor."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    read = header.read_text(encoding="utf-8")
    assert [name for name in NCCL_SETTINGS if f'"{name}"' not in read] == []


def test_settings_of_the_user_are_kept() -> None:
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    apply_nccl_settings(environment)
    assert environment == dict(NCCL_SETTINGS) | {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    chosen = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert nccl_settings({**chosen, "PATH": "/bin"}) == dict(NCCL_SETTINGS) | chosen
