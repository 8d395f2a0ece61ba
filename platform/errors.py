"""Error types that carry the exit status of the command line."""

from __future__ import annotations

import signal
from collections.abc import Sequence


class OrchestrayError(Exception):
    """An error that a user can act on: its text is a full sentence, shown without a traceback."""

    exit_status = 1


class ConfigError(OrchestrayError):
    """Raised when the config or the arguments are wrong; lists every problem, one per line."""

    exit_status = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class TaskError(OrchestrayError):
    """Raised when the user's task cannot be built: it does not import, lacks a method, or refuses its arguments."""

    exit_status = 2


class RunNameError(OrchestrayError):
    """Raised when the name of a new run is in use, or when no run has the given name."""

    exit_status = 2


class ClusterError(OrchestrayError):
    """Raised when the cluster does not answer, or lacks requested resources."""


class PlaceLostError(ClusterError):
    """Raised when a machine with places of some processes is gone, and the cluster has no other place for them."""


class NodeLeavesError(PlaceLostError):
    """Raised by a process that has saved its state, as its machine is announced to leave the cluster."""


class DataError(OrchestrayError):
    """Raised when data cannot be read, is empty, or has values that cannot become tensors."""


class TrainingError(OrchestrayError):
    """Raised when training itself failed: the loss is not a number, or the user's model raised an error."""


class CheckpointError(OrchestrayError):
    """Raised when a checkpoint cannot be read, or does not fit the model."""


class StorageError(OrchestrayError):
    """Raised when a disk or an object store refused a read or a write."""


class Interrupted(OrchestrayError):  # noqa: N818 - not an error: the user pressed Ctrl-C
    """Raised when the run was interrupted; a checkpoint was saved. The exit status is a shell's for the signal."""

    def __init__(self, text: str, signal_number: int = signal.SIGINT) -> None:
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number
        super().__init__(text)

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int]]:
        return type(self), (str(self), self.signal_number)
