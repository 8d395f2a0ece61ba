"""The file that keeps a machine's profile, and the question whether it is still that of this machine."""

from __future__ import annotations

import errno
import json
import os
import platform
import tempfile
from pathlib import Path

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.files import storage_errors, write_atomic
from orchestray.platform.run.versions import installed_versions
from orchestray.trainers.machine.profile import MachineProfile

_RECALIBRATE = "run `orchestray calibrate` (half a minute)"


def cache_directory() -> Path:
    """Return the directory of what was measured of this machine: `orchestray` in XDG_CACHE_HOME or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchestray"


def default_file() -> Path:
    """Return the place of this machine's profile."""
    return cache_directory() / "machine.json"


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on."""
    return installed_versions("torch")


def check_place(file: Path) -> None:
    """Check that a profile can be written to a file, before half a minute of measurements; makes its folder.

    Raises:
        StorageError: it cannot.
    """
    with storage_errors(f"write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.TemporaryFile(dir=file.parent):
            pass


def save(profile: MachineProfile, file: Path) -> None:
    """Write a profile.

    Raises:
        StorageError: the disk refuses it.
    """
    with storage_errors(f"write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, (json.dumps(profile.to_json(), indent=1) + "\n").encode())


def load(file: Path | None = None, *, of_any_machine: bool = False) -> MachineProfile:
    """Read a profile.

    Args:
        file: the file; default: this machine's own.
        of_any_machine: True to accept that of another machine, to plan for it.

    Raises:
        ConfigError: there is none, or it cannot be read, or it is of another machine or another version of torch.
    """
    file = file or default_file()
    try:
        profile = MachineProfile.from_json(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no profile of this machine at {file}: {_RECALIBRATE}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{file} is not a profile that can be used: {error}; {_RECALIBRATE}") from None
    if not of_any_machine and (change := _change(profile)):
        raise ConfigError(f"{file} was measured {change}: {_RECALIBRATE}")
    return profile


def _change(profile: MachineProfile) -> str | None:
    """Return how this machine differs from that of the profile; None: in nothing that counts."""
    ours, theirs = versions()["torch"], profile.versions.get("torch")
    if ours != theirs:
        return f"with torch {theirs}, and this is {ours}"
    if (profile.processor, profile.cores) != (processor(), cores()):
        was = f"{profile.processor} with {profile.cores} cores"
        return f"on another machine, {was}, and this is {processor()} with {cores()}"
    return None
