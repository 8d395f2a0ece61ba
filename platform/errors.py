"""What can go wrong, as types that carry the exit status of the command line."""

from __future__ import annotations

from collections.abc import Sequence


class OrchestrayError(Exception):
    """An error a user can act on: its text is a full sentence, shown without a traceback."""

    exit_status = 1


class ConfigError(OrchestrayError):
    """The config or the arguments are wrong; every problem is listed, one a line."""

    exit_status = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class TaskError(OrchestrayError):
    """The user's task cannot be built: it does not import, lacks a method, or refuses its arguments."""

    exit_status = 2


class RunNameError(OrchestrayError):
    """The run's name is in use, or there is no run of that name."""

    exit_status = 2


class ClusterError(OrchestrayError):
    """The cluster does not answer, or lacks what was asked of it."""


class PlaceLostError(ClusterError):
    """A part of what the processes were given has gone with its machine, and the cluster has no other in its place."""


class DataError(OrchestrayError):
    """The data cannot be read, is empty, or has values that cannot become tensors."""


class TrainingError(OrchestrayError):
    """The training itself failed: a loss that is no number, an error in the user's model."""


class CheckpointError(OrchestrayError):
    """A checkpoint cannot be read, or does not fit the model."""


class StorageError(OrchestrayError):
    """A disk or an object store refused a read or a write."""


class Interrupted(OrchestrayError):  # noqa: N818 - not an error of anyone's: Ctrl-C
    """The run was interrupted; a checkpoint was saved."""

    exit_status = 130
