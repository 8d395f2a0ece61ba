"""The choice of the backend: by what a gang was given, whatever its processes see."""

from __future__ import annotations

import pytest
import torch

from orchestray.platform.comm.backend import (
    NCCL_SETTINGS,
    BackendKind,
    Given,
    apply_nccl_settings,
    check_visible,
    choose_backend,
    device_index,
    refuse_amount,
)
from orchestray.platform.errors import ClusterError


def on(node: str, gpus: float, *ids: str) -> Given:
    return Given(gpus, node, ids)


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


def test_settings_of_the_user_are_kept() -> None:
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    apply_nccl_settings(environment)
    assert environment == dict(NCCL_SETTINGS) | {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
