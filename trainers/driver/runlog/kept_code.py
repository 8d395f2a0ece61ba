"""The user's code that a run was begun with: kept in `code.json`, and compared when the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestray.platform.run.files import load_json
from orchestray.platform.usercode.own_names import digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.run.directory import RunDirectory
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.run_log import RunLog


def keep_code(directory: RunDirectory, settings: ReplicaSettings, run_log: RunLog) -> None:
    """Write the user's files of a run into its directory, and tell of those that have changed since it began.

    Args:
        directory: directory of the run.
        settings: settings of the replicas.
        run_log: log of the run.
    """
    if changed := changed_code(directory, settings):
        run_log.writer.event("code_changed", files=changed)
        run_log.progress.warn(
            f"the run goes on with other code than it was begun with: {names_of(changed)} changed since"
        )


def changed_code(directory: RunDirectory, settings: ReplicaSettings) -> list[str]:
    """Write the user's files into a run's or a search's directory; return the paths of those it had otherwise."""
    digests = {path: digest_of({"": text}) for path, text in sorted(settings.texts.items())}
    before: dict[str, str] = load_json(directory.paths.code)["files"] if directory.paths.code.exists() else digests
    directory.write_code({"task": settings.task.to_json(), "files": digests})
    return [path for path in {**before, **digests} if before.get(path) != digests.get(path)]


def names_of(paths: Sequence[str]) -> str:
    """Return the names of files, for a sentence."""
    return ", ".join(Path(path).name for path in paths)
