"""Requests to change the number of replicas of a live run, their check against the config, and the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.platform.run.control_files import Asked, Inbox, Request
from orchestray.platform.run.directory import RunPaths
from orchestray.trainers.config.load import dump_yaml, load_train_config

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.platform.run.directory import RunDirectory
    from orchestray.trainers.config.schema import TrainConfig


@dataclass(frozen=True)
class Change:
    """A change of the degree of the data axis."""

    before: int
    after: int
    config: TrainConfig
    """Config of the run after the change."""

    @property
    def grows(self) -> bool:
        return self.after > self.before


class RefusedError(OrchestrayError):
    """The run was not scaled: it continues as it was, or has ended."""

    def __init__(self, text: str, exit_status: int = 1) -> None:
        super().__init__(text)
        self.exit_status = exit_status


def find_change(path: Path, data: int) -> Change:
    """Return the change that gives the run in the directory `path` `data` replicas.

    Args:
        path: run directory.
        data: wanted degree of the data axis.

    Raises:
        ConfigError: the run cannot have this number; every reason is listed.
    """
    name, file = path.name, RunPaths(path).config
    if data < 1:
        raise ConfigError(f"orchestray runs scale: --data must be 1 or more, got {data}")
    now = load_train_config(file, look_at_task=False)
    before = now.strategy.network.data
    if now.engine != "actors":
        raise ConfigError(
            f"Run '{name}' cannot be scaled while it runs: Ray Train's workers (engine: {now.engine}) start and end "
            f"together. Stop it, and go on with strategy.network.data={data} and --resume; or use engine: actors."
        )
    if before == data:
        raise ConfigError(f"Run '{name}' has data: {data} already; nothing was changed.")
    config = load_train_config(file, [f"strategy.network.data={data}"], look_at_task=False)
    return Change(before, data, config)


def ask_to_scale(path: Path, data: int, timeout_s: float) -> dict[str, Any]:
    """Have the live run in the directory `path` continue with `data` replicas; return once it does.

    Args:
        path: run directory.
        data: wanted degree of the data axis.
        timeout_s: longest wait in seconds.

    Returns:
        `before`, `after` (degrees of the data axis), `workers_before`, `workers_after`, and `step`: the last step
            before the change.

    Raises:
        ConfigError: the run cannot have this number.
        RefusedError: the run refused, with the reason.
        NotAnsweredError: the run has ended, or time was up.
    """
    find_change(path, data)
    asked = Asked(path, {"scale": {"data": data}})
    try:
        answer = asked.wait(timeout_s)
    except KeyboardInterrupt:
        asked.withdraw()
        raise
    if answer.get("error"):
        raise RefusedError(str(answer["error"]), int(answer.get("exit_status", 1)))
    return answer


class ScaleRequests:
    """A queue of requests on the driver's side: one change at a time, in the order of the requests.

    Attributes:
        change: change in progress, or None.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.change: Change | None = None
        self._directory = directory
        self._inbox = Inbox(directory.path)
        self._request: Request | None = None

    def look(self) -> Change | None:
        """Return the change to make now: the one in progress, or the next possible one in the queue."""
        if self.change is None and (request := self._inbox.take()) is not None:
            self._request = request
            try:
                self.change = find_change(self._directory.path, _wanted(request))
            except OrchestrayError as error:
                self.refuse(error)
        return self.change

    def refuse(self, error: OrchestrayError) -> None:
        """Answer that the change is not made, with the reason."""
        self._answer({"error": str(error), "exit_status": error.exit_status})

    def done(self, step: int) -> Change:
        """Write the changed config to `config.yaml`, and answer that the change is made.

        Args:
            step: last step before the change.
        """
        change = self.change
        assert change is not None
        self._directory.write_config(dump_yaml(change.config))
        network = change.config.strategy.network
        whole = network.tensor * network.pipeline
        self._answer(
            {
                "before": change.before,
                "after": change.after,
                "workers_before": change.before * whole,
                "workers_after": change.after * whole,
                "step": step,
            }
        )
        return change

    def close(self, step: int) -> None:
        """Refuse all open requests, because the run has ended after `step`."""
        error = RefusedError(f"Run '{self._directory.name}' ended at step {step}, before it could be scaled.")
        self.refuse(error)
        self._inbox.close({"error": str(error), "exit_status": error.exit_status})

    def _answer(self, answer: dict[str, Any]) -> None:
        request, self._request, self.change = self._request, None, None
        if request is not None:
            self._inbox.answer(request, answer)


def _wanted(request: Request) -> int:
    asked = request.content.get("scale")
    data = asked.get("data") if isinstance(asked, dict) else None
    if isinstance(data, bool) or not isinstance(data, int):
        raise RefusedError(f"The request says {dict(request.content)!r}; this run can only be asked to scale.", 2)
    return data
