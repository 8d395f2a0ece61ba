"""A model divided over the processes of a gang that answers batches. Imports Ray."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import ray
from ray.exceptions import RayError

from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.platform.actors.member import Failure
from orchestray.platform.actors.placement import Shape
from orchestray.platform.cluster.cluster import connect
from orchestray.platform.comm.collective import PeerLostError
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.directory import RunPaths
from orchestray.serving.batching.errors import RunnerLostError
from orchestray.serving.batching.runner import RunFunction
from orchestray.serving.models.content import content_of, served_directory, served_name
from orchestray.serving.models.served import example_values, input_specs
from orchestray.serving.models.signature import Output, Sample, Signature, TensorSpec, with_interface
from orchestray.serving.sharded.forward_worker import Arrays, StageFailedError
from orchestray.serving.sharded.partition import ServedNetwork
from orchestray.trainers.saved.interface import saved_interface
from orchestray.trainers.saved.run import load_run

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster

_log = logging.getLogger("orchestray.serving")

_WORKER = "orchestray.serving.sharded.forward_worker:ForwardWorker"
_MOST_ATTEMPTS = 5
_FREE_S = 10.0
"""Seconds in which a process must abort its batch; one that does not is considered hung."""


class ModelParallel:
    """A runner on a gang, each of whose members holds a part of the model.

    Made by `start`. `run` is a runner of a `Batcher`, and may be called again while it runs. Add it `num_in_flight`
    times, so that the first stage has a batch while the last one has another.
    """

    def __init__(self, signature: Signature, network: ServedNetwork, gang: Gang) -> None:
        self.signature = signature
        self.num_in_flight = network.pipeline
        """Number of batches that keep all stages busy."""
        self.held: list[dict[str, Any]] = []
        """Size (`bytes`) of each process's part, and the names of its tensors."""
        self._network = network
        self._gang = gang
        self._lost = False
        self._mending: asyncio.Task[None] | None = None
        self._reported = ""

    @classmethod
    async def start(
        cls,
        run: str | os.PathLike[str],
        network: ServedNetwork | None = None,
        *,
        name: str | None = None,
        version: str = "1",
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        precision: str = "float32",
        max_batch_size: int = 32,
        address: str | None = None,
    ) -> Self:
        """Start the processes, and have each load its part of a run's trained model.

        Args:
            run: directory of a training run, or of a search, whose best run is then loaded.
            network: division of the model; default: `strategy.network` of the run's config.
            name, version: name and version in requests.
            cpus_per_worker, gpus_per_worker: resources of each process.
            precision: see `ForwardWorker`.
            max_batch_size: largest batch of the warm-up.
            address: address of a Ray cluster; default: the one this process is connected to, or one of its own.

        Raises:
            RunNameError, CheckpointError, TaskError: the run cannot be served.
            ConfigError: its model cannot be divided like that.
            ClusterError: the cluster lacks the resources.
        """
        directory = served_directory(run)
        found = load_run(directory)
        divided = network or ServedNetwork.from_config(found.config.strategy.network)
        content = content_of(directory)
        known = saved_interface(directory / "model", found.load_task)
        specs, values = input_specs(known.example), example_values(known.example)
        signature = Signature(name or served_name(run), version, specs, (), values)
        signature = with_interface(signature, known)

        def begin() -> Gang:
            cluster: Cluster = connect(address)
            shape = Shape("model", divided.size, cpus_per_worker, gpus_per_worker, neighbours=divided.tensor)
            gang = Gang(cluster, shape)
            try:
                model = str(RunPaths(directory.absolute()).model)
                gang.host(_WORKER, model, divided, gpus_per_worker > 0, precision, content)
            except BaseException:
                gang.close()
                raise
            return gang

        parallel = cls(signature, divided, await asyncio.to_thread(begin))
        try:
            parallel.held = await asyncio.to_thread(parallel._meet)
            await parallel._warm_up(max_batch_size)
        except BaseException:
            await parallel.close()
            raise
        return parallel

    async def _warm_up(self, max_batch_size: int) -> None:
        sample = self.signature.parse(self.signature.example)
        answered = await self.run([sample])
        if isinstance(answered[0], Exception):
            raise answered[0]
        outputs = tuple(TensorSpec(name, str(array.dtype), array.shape) for name, array in answered[0].items())
        self.signature = replace(self.signature, outputs=outputs)
        await self.run([sample] * max_batch_size)

    async def run(self, samples: Sequence[Sample]) -> list[Output | Exception]:
        """Return an answer for each sample; a failing batch is halved until the failing samples are alone.

        Raises:
            RunnerLostError: a process died, or was taken away; the next call starts it again.
        """
        if self._lost:
            await self._mend()
        try:
            outputs = await self._compute(samples)
        except RunnerLostError:
            self._lost = True
            raise
        except OrchestrayError as error:
            if len(samples) == 1:
                return [error]
            middle = len(samples) // 2
            return [*await self.run(samples[:middle]), *await self.run(samples[middle:])]
        return [{name: array[row] for name, array in outputs.items()} for row in range(len(samples))]

    def runner(self) -> RunFunction[Sample, Output]:
        """Return `run` as its own replacement in `Batcher.add_runner`: its next call restarts lost or hung processes.

        A runner is replaced if one of its processes was lost, or a batch took too long.
        """
        self._lost = True
        return self.run

    async def _compute(self, samples: Sequence[Sample]) -> Arrays:
        inputs = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        # All calls are made without waiting in between: every process gets them in the order of the batches.
        references = [
            self._gang.call_one(rank, "run", len(samples), inputs if rank < self._network.tensor else None)
            for rank in range(self._network.size)
        ]
        answers = await asyncio.gather(
            *(asyncio.wrap_future(reference.future()) for reference in references), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, RayError) or (
                isinstance(answer, Failure) and isinstance(answer.error, PeerLostError)
            ):
                cause = answer.error if isinstance(answer, Failure) else answer
                raise RunnerLostError(f"A process of the model {self.signature.name} is gone.") from cause
        failures = [answer.error for answer in answers if isinstance(answer, Failure)]
        if failures:
            raise next((error for error in failures if not isinstance(error, StageFailedError)), failures[0])
        outputs: Any = answers[(self._network.pipeline - 1) * self._network.tensor]
        return cast(Arrays, outputs)

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of ranks."""
        return [identity.pid for role, _, identity in self._gang.identify() if role == "model"]

    async def _mend(self) -> None:
        """Replace the processes that are gone or hang, and connect all again; the others keep their parts of the model.

        That may take longer than a batch may. It goes on after the batch that waits for it has been given up.
        """
        if self._mending is None:
            self._mending = asyncio.create_task(self._renew())
            self._mending.add_done_callback(lambda task: task.cancelled() or task.exception())  # retrieves the error
        await asyncio.shield(self._mending)

    async def _renew(self) -> None:
        try:
            await asyncio.to_thread(self._free)
            self.held = await asyncio.to_thread(self._meet)
            self._lost = False
        except OrchestrayError as error:
            if str(error) != self._reported:  # every batch tries again: report it once
                self._reported = str(error)
                _log.warning("the processes of %s could not be started anew: %s", self.signature.name, error)
            raise
        finally:
            self._mending = None

    def _free(self) -> None:
        """Abort the waits of the processes for each other, and replace those that hang."""
        gang = self._gang
        answers = [*gang.control("abort"), *gang.call("rest")]
        _, silent = ray.wait(answers, num_returns=len(answers), timeout=_FREE_S)  # the dead have answered: see `_meet`
        for rank in {answers.index(answer) % self._network.size for answer in silent}:
            gang.replace(rank)

    def _meet(self) -> list[dict[str, Any]]:
        gang = self._gang
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                gang.meet()
                held: list[dict[str, Any]] = gang.gather(gang.call("connect"))
            except MemberLostError as error:
                if attempt == _MOST_ATTEMPTS:
                    raise
                for rank in error.lost:
                    gang.replace(rank)
            else:
                return held
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the processes."""
        await asyncio.to_thread(self._gang.close)
