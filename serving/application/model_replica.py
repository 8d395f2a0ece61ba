"""A replica of a model as a deployment of Ray Serve, which the ingress calls with whole batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from orchestray.serving.models.signature import Output, Sample
from orchestray.serving.replicas.batch_thread import BatchThread


class ModelReplica:
    """A model in a process of its own. Ray Serve places, restarts and scales it."""

    async def __init__(self, load: Mapping[str, Any], run_timeout_s: float | None) -> None:  # type: ignore[misc]
        """Load the model and warm it up.

        Args:
            load: arguments of `load_served_model`.
            run_timeout_s: seconds after which a batch is considered hung; None: never.

        Raises:
            OrchestrayError: it cannot be served.
        """
        from orchestray.serving.models.load import load_served_model  # torch: late

        self._run_timeout_s = run_timeout_s
        self._model = await asyncio.to_thread(load_served_model, **load)
        self._thread = BatchThread(self._model)

    async def signature(self) -> dict[str, Any]:
        """Return the model's signature, as `Signature.from_dict` takes it."""
        return self._model.signature.to_dict()

    async def run(
        self, samples: Sequence[Sample], *, slot: int | None = None
    ) -> tuple[list[Output | Exception], float]:
        """Return an answer, or an error, for each sample of a batch, and the seconds that the model took.

        Args:
            samples: the batch; batches are run in the order given.
            slot: for the router of the deployment, which has sent the batch here.
        """
        return await self._thread.run_timed(samples)

    async def check_health(self) -> None:
        """Check the replica's health for Serve, which replaces one that raises here.

        Raises:
            RuntimeError: a batch hangs.
        """
        if self._run_timeout_s is not None and self._thread.busy_s > self._run_timeout_s:
            raise RuntimeError(f"a batch has run for {self._thread.busy_s:.1f} s")
