"""A check of the product on GPUs: one line PASS, FAIL or SKIP with its figure, or REHEARSED on the CPU.

This file imports neither torch nor the product: where there is no GPU, a check says so at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 180
"""Seconds that a check may take."""
_FOLDER = Path(__file__).resolve().parent


class Skip(Exception):  # noqa: N818 - not an error
    """Raised by a check that cannot be made here; the text says why."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check."""

    holds: bool
    figure: str
    """Figures that were measured, each with its bound."""


@dataclass(frozen=True)
class Place:
    """The place of a check: GPUs, or the CPU for a rehearsal."""

    is_rehearsal: bool

    def device(self, index: int = 0) -> Any:
        """Return a GPU by its index, or the CPU."""
        import torch

        return torch.device("cpu") if self.is_rehearsal else torch.device("cuda", index)

    def sized(self, on_gpu: int, on_cpu: int) -> int:
        """Return a number of steps, rows or bytes: a rehearsal takes seconds."""
        return on_cpu if self.is_rehearsal else on_gpu


Check = Callable[[Place], Verdict]


def main(check: Check, *, gpus: int = 1, needs_ray: bool = False) -> None:
    """Make a check and print its line; the exit status is 1 if it fails.

    Args:
        check: the check; its docstring begins with what it holds.
        gpus: number of GPUs that it needs.
        needs_ray: True if it starts Ray.
    """
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--cpu", action="store_true", help="rehearse it on the CPU, small, and say REHEARSED")
    place = Place(parser.parse_args().cpu)
    word, figure = verdict_of(check, place, gpus=gpus, needs_ray=needs_ray)
    number, _, name = Path(sys.argv[0]).stem.removeprefix("check_").partition("_")
    print(f"{word} {number} {name.replace('_', ' ')}: {figure}", flush=True)
    sys.exit(1 if word == "FAIL" else 0)


def verdict_of(check: Check, place: Place, *, gpus: int = 1, needs_ray: bool = False) -> tuple[str, str]:
    """Return PASS, FAIL, SKIP or REHEARSED, and the figure or the reason."""
    if reason := _lacking(place, gpus, needs_ray):
        return "SKIP", reason
    signal.signal(signal.SIGALRM, _take_too_long)
    signal.alarm(LIMIT_S)
    try:
        if not place.is_rehearsal:
            _exact()
        verdict = check(place)
    except Skip as reason:
        return "SKIP", str(reason)
    except Exception as error:  # noqa: BLE001 - whatever it is, the check has failed
        traceback.print_exc()
        return "FAIL", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        signal.alarm(0)
    if not verdict.holds:
        return "FAIL", verdict.figure
    return "REHEARSED" if place.is_rehearsal else "PASS", verdict.figure


def _take_too_long(*_: object) -> None:
    raise TimeoutError(f"it took more than {LIMIT_S} s")


def _lacking(place: Place, gpus: int, needs_ray: bool) -> str | None:
    """Return what this machine lacks, in a clause; None: nothing."""
    if needs_ray and not has_ray():
        return "it needs Ray, which is not installed here"
    if place.is_rehearsal:
        return None
    found = num_gpus()
    if found >= gpus:
        return None
    return f"it needs {gpus} GPU{'s' * (gpus > 1)}, and there is {found or 'none'} here"


def num_gpus() -> int:
    """Return the number of GPUs of this machine that torch can use."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def has_ray() -> bool:
    """Return True if Ray can be imported."""
    if importlib.util.find_spec("ray") is None:
        return False
    try:
        import ray  # noqa: F401 - a broken installation counts as none
    except ImportError:
        return False
    return True


def _exact() -> None:
    """Have float32 computed in float32, so that a GPU and a CPU can be compared."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
