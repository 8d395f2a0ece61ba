"""Saving and loading of checkpoints without stopping the training loop. torch is imported only for tensors."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from orchestray.platform.errors import CheckpointError, OrchestrayError
from orchestray.platform.run.checkpoint_files import (
    BEST_STEP,
    EXCHANGE_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RESUME_FILE,
    STATE_FILE,
    Found,
    checkpoint_name,
    checkpoint_steps,
    encode_state,
    latest_good,
    list_checkpoints,
    read_checked,
)
from orchestray.platform.run.files import dump_json
from orchestray.platform.run.model_files import load_model_json, load_model_tensors, save_model
from orchestray.platform.run.store import open_store
from orchestray.platform.run.summed_file import write_staged, write_streamed

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping

    import torch

    from orchestray.platform.run.staging import Staging
    from orchestray.platform.run.tensor_file import TensorLayout

__all__ = [
    "CheckpointWriter",
    "Found",
    "Pending",
    "latest_good",
    "list_checkpoints",
    "load_checkpoint",
    "load_model_json",
    "load_model_tensors",
    "load_tensors",
    "save_model",
    "stream_checkpoint",
]


@dataclass
class Pending:
    """A checkpoint that is being written."""

    step: int
    _copied: threading.Event = field(default_factory=threading.Event, repr=False)
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _failure: BaseException | None = field(default=None, repr=False)

    @property
    def is_done(self) -> bool:
        """True if it is on the disk, or failed."""
        return self._done.is_set()

    def wait_copied(self) -> None:
        """Return when the tensors may be changed."""
        self._copied.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when the checkpoint is on the disk; False if that takes longer than `timeout_s` seconds.

        Raises:
            StorageError: it could not be written (a full disk); older checkpoints are unchanged.
            CheckpointError: a tensor cannot be saved.
        """
        if not self._done.wait(timeout_s):
            return False
        if isinstance(self._failure, OrchestrayError):
            raise self._failure
        if self._failure is not None:
            raise CheckpointError(
                f"could not save the checkpoint of step {self.step}: {self._failure}"
            ) from self._failure
        return True


@dataclass(frozen=True)
class _Job:
    pending: Pending
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    early: Mapping[str, Collection[str]]
    state_json: str
    best_step: int | None
    ready: Mapping[torch.device, Any]
    """A CUDA event on each GPU that holds tensors, after which they have their values."""


class CheckpointWriter:
    """A writer that saves checkpoints in the background; a context manager.

    The copy to the staging buffers runs during the next forward and backward pass, which only read the parameters. The
    loop calls `wait_copied` before it changes them. Then the buffers are written, synced and renamed during training.
    Only one checkpoint is written at a time: a second `save_async` waits for the first.
    """

    def __init__(self, location: str | os.PathLike[str], keep: int) -> None:
        """Write to `location` (a directory, or a URI of pyarrow.fs), keeping the newest `keep` >= 1 checkpoints.

        The checkpoint of the step `BEST_STEP` of the newest one's state is kept besides them.

        Raises:
            StorageError: the URI is invalid, or its filesystem does not answer.
        """
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self._store = open_store(location)
        self._keep = keep
        self._staging: dict[str, Staging] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._last: Pending | None = None
        self._saved: deque[int] = deque()
        self._thread: threading.Thread | None = None
        self._store.clean()

    @property
    def is_busy(self) -> bool:
        """True if a checkpoint is being written, so that `save_async` would wait."""
        return not self._idle.is_set()

    def prepare(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        """Allocate staging buffers for tensors like these, in the background, so that the first save is fast too."""
        self._make_staging({MODEL_FILE: model, OPTIMIZER_FILE: optimizer})
        self._idle.clear()
        self._start(_Job(Pending(-1), {}, {}, "", None, {}))

    def save_async(
        self,
        step: int,
        model: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        *,
        buffers: Collection[str] = (),
        exchange: Mapping[str, torch.Tensor] | None = None,
        resume: Mapping[str, torch.Tensor] | None = None,
    ) -> Pending:
        """Start to save the current values of the tensors, after `step` steps.

        The large tensors are read until `wait_copied` returns, and must not change before. Those that the forward pass
        itself changes (batch normalisation's running statistics) are named in `buffers` and copied before this returns.

        Args:
            step: number of completed steps.
            model: the plain model's tensors by name, on any device; tied ones only once.
            optimizer: the optimizer's tensors by name.
            state: JSON values; encoded before this returns.
            buffers: names of the tensors of `model` that a forward pass changes.
            exchange: tensors that belong to single replicas; None if there are none.
            resume: tensors of the model that only going on needs; None if there are none.

        Raises:
            StorageError: the previous checkpoint failed.
            CheckpointError: the previous checkpoint failed.
        """
        self.wait()
        tensors = {MODEL_FILE: dict(model), OPTIMIZER_FILE: dict(optimizer)}
        if exchange is not None:
            tensors[EXCHANGE_FILE] = dict(exchange)
        if resume:
            tensors[RESUME_FILE] = dict(resume)
        self._make_staging(tensors)
        early = {}
        for file, named in tensors.items():
            early[file] = self._staging[file].early_names(named, buffers)
            self._staging[file].copy(named, early[file])
        pending = Pending(step)
        self._last = pending
        self._idle.clear()
        self._start(_Job(pending, tensors, early, dump_json(dict(state)), state.get(BEST_STEP), _events(tensors)))
        return pending

    def save_streamed(
        self,
        step: int,
        files: Mapping[str, tuple[TensorLayout, Callable[[Callable[[str, torch.Tensor], None]], None]]],
        state: Mapping[str, Any],
    ) -> None:
        """Save tensors one at a time, each written before the next is produced; return when all are on the disk.

        Args:
            step: number of completed steps.
            files: for MODEL_FILE, OPTIMIZER_FILE and optionally EXCHANGE_FILE and RESUME_FILE, the layout and a
                producer of the tensors. The producer gets a function, and calls it with name and tensor (CPU) of each,
                in the order of the layout.
            state: JSON values.

        Raises:
            StorageError: the checkpoint could not be written; older ones are unchanged.
            CheckpointError: a tensor cannot be saved; older checkpoints are unchanged.
        """
        self.wait()
        with self._store.create(checkpoint_name(step)) as open_file:
            sums = {}
            for file, (layout, produce) in files.items():
                with open_file(file) as write:
                    sums[file] = write_streamed(write, layout, produce)
            with open_file(STATE_FILE) as write:
                write(encode_state(step, dump_json(dict(state)), sums))
        self._saved.append(step)
        self._prune(step, state.get(BEST_STEP))

    def wait_copied(self) -> None:
        """Return when the tensors of the last `save_async` may be changed; at once if no copy is in progress."""
        if self._last is not None:
            self._last.wait_copied()

    def wait(self) -> None:
        """Return when no checkpoint is being written any more.

        Raises:
            StorageError: the last checkpoint could not be written; raised once.
            CheckpointError: the last checkpoint could not be saved; raised once.
        """
        self._idle.wait()
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def raise_if_failed(self) -> None:
        """Raise the errors of `wait`, but do not wait for a checkpoint that is being written."""
        if not self.is_busy:
            self.wait()

    def saved(self) -> list[int]:
        """Return the steps whose checkpoints were finished since the last call."""
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def close(self) -> None:
        """Finish the current checkpoint and end the thread; may be called again.

        Raises:
            StorageError: the last checkpoint could not be written.
            CheckpointError: the last checkpoint could not be saved.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._staging.clear()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except OrchestrayError:
            if kind is None:  # it must not hide another error that is being raised
                raise

    def _make_staging(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        from orchestray.platform.run.staging import Staging

        self._idle.wait()
        for file, named in tensors.items():
            if file not in self._staging or not self._staging[file].fits(named):
                self._staging.pop(file, None)  # free the old one's memory first
                self._staging[file] = Staging(named)

    def _start(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.tensors:
                    self._save(job)
                else:
                    for staging in self._staging.values():
                        staging.prefault()
            except Exception as error:  # noqa: BLE001 - wait() raises it in the loop
                job.pending._failure = error
            finally:
                job.pending._copied.set()
                job.pending._done.set()
                self._idle.set()
            del job  # an idle writer holds no tensors

    def _save(self, job: _Job) -> None:
        self._copy_late(job)
        job.pending._copied.set()
        step = job.pending.step
        with self._store.create(checkpoint_name(step)) as open_file:
            sums = {}
            for file in job.tensors:
                with open_file(file) as write:
                    sums[file] = write_staged(write, self._staging[file])
            with open_file(STATE_FILE) as write:
                write(encode_state(step, job.state_json, sums))
        self._saved.append(step)
        self._prune(step, job.best_step)

    def _copy_late(self, job: _Job) -> None:
        def copy() -> None:
            for file, named in job.tensors.items():
                late = [name for name in named if name not in set(job.early[file])]
                self._staging[file].copy(named, late)

        if not job.ready:
            copy()
            return
        import torch

        # A stream without a device would be one of GPU 0: that is the current one of a thread that has chosen none.
        streams = [torch.cuda.Stream(gpu) for gpu in job.ready]  # type: ignore[no-untyped-call]
        with contextlib.ExitStack() as beside:
            for stream, event in zip(streams, job.ready.values(), strict=True):
                stream.wait_event(event)
                beside.enter_context(torch.cuda.stream(stream))
            copy()
        for stream in streams:
            stream.synchronize()

    def _prune(self, step: int, best_step: int | None) -> None:
        """Remove all but the newest `keep` and the best, and those of later steps, which training went back from."""
        names = checkpoint_steps(self._store)
        past = [(number, name) for number, name in names if number <= step]
        future = [name for number, name in names if number > step]
        for name in [*future, *(name for number, name in past[: -self._keep] if number != best_step)]:
            self._store.remove(name)


def load_checkpoint(found: Found) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the model's tensors, the optimizer's tensors (all on the CPU) and the state of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged.
        StorageError: the checkpoint cannot be read.
    """
    return load_tensors(found, MODEL_FILE), load_tensors(found, OPTIMIZER_FILE), found.state


def load_tensors(found: Found, file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one file of a checkpoint, by name, on the CPU.

    Raises:
        CheckpointError: the checkpoint is damaged.
        StorageError: the checkpoint cannot be read.
    """
    from orchestray.platform.run.tensor_file import unpack

    store = open_store(found.location)
    data = read_checked(store, found.name, file, found.files[file])
    return unpack(data, f"{store.shown}/{found.name}/{file}")


def stream_checkpoint(found: Found, file: str) -> tuple[list[list[Any]], Iterator[torch.Tensor]]:
    """Read the tensors of one file of a checkpoint one at a time.

    Returns:
        Name, dtype name and shape of each, in the order of the file; and the tensors in that order.

    Raises:
        CheckpointError: the checkpoint is damaged (raised when the last tensor has been read).
        StorageError: the checkpoint cannot be read.
    """
    from orchestray.platform.run.tensor_file import stream

    return stream(open_store(found.location), found.name, file, found.files[file])


def _events(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[torch.device, Any]:
    """Return an event of the current stream of each GPU that holds tensors: it follows all work enqueued before."""
    gpus = {tensor.device: None for named in tensors.values() for tensor in named.values() if tensor.is_cuda}
    if not gpus:
        return {}
    import torch

    events: dict[torch.device, Any] = {gpu: torch.cuda.Event() for gpu in gpus}  # type: ignore[no-untyped-call]
    for gpu, event in events.items():
        event.record(torch.cuda.current_stream(gpu))
    return events
