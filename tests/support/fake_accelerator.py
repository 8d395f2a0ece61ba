"""A device that is not the CPU, on a machine without one: a tensor that is made at the wrong place shows up.

Its memory is the CPU's, and its operations are the CPU's: results are equal bit for bit. But an operation refuses
tensors of both, as one of a GPU does. It is torch's open registration ("PrivateUse1"), in C++, compiled by the test.
A process can register it once, before its first backward pass, and never take it back: tests use it in a child.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import backend_registration, cpp_extension

NAME = "fakegpu"
SOURCE = Path(__file__).with_suffix(".cpp")


def compiler() -> str | None:
    """Return the path of a C++ compiler; None without one."""
    return shutil.which("g++")


def built(folder: Path) -> Path:
    """Return the compiled library in a folder, which is compiled if it is not there yet: about ten seconds."""
    mark = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"fake_accelerator-{mark}.so"
    if not library.exists():
        own = library.with_suffix(f".{os.getpid()}")
        headers = [f"-I{path}" for path in cpp_extension.include_paths()]
        folders = [f"-L{path}" for path in cpp_extension.library_paths()]
        command = [str(compiler()), "-O0", "-g0", "-std=c++20", "-fPIC", "-shared", str(SOURCE), "-o", str(own)]
        subprocess.run([*command, *headers, *folders, "-lc10", "-ltorch_cpu", "-ltorch"], check=True)
        own.replace(library)  # at once, as another process may compile it too
    return library


class _Device(backend_registration._DummyBackendModule):
    """The functions of `torch.fakegpu`. Streams are the CPU's, as everything is done at once."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register(library: Path) -> torch.device:
    """Add the device to this process, and return it."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, _Device())
    torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    return torch.device(NAME, 0)
