"""A student that was trained on another run's outputs is served as any run, its teacher there or not."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import orchestray
from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.config.load import load_serve_config

if TYPE_CHECKING:
    from orchestray.platform.cluster.cluster import Cluster


def config_of(hidden: int, **more: Any) -> dict[str, Any]:
    train = {"batch_size": 64, "steps": 5, "optimizer": {"type": "sgd", "lr": 0.1}}
    return {"name": f"hidden-{hidden}", "task": {"type": "digits", "hidden": [hidden]}, "train": train, **more}


def test_a_distilled_student_is_served_by_its_own_weights_where_its_teacher_is_gone(
    cluster: Cluster, tmp_path: Path
) -> None:
    teacher = orchestray.train(config_of(32), runs_dir=tmp_path)
    distill = {"teacher": str(teacher.path), "temperature": 2.0, "weight": 0.5}
    student = orchestray.train(config_of(8, distill=distill), runs_dir=tmp_path)
    shutil.rmtree(teacher.path)

    async def scenario() -> None:
        live = LiveEndpoint(load_serve_config(str(student.path)))
        await live.start()
        try:
            served = live.registry["hidden-8"]
            sample = served.signature.parse(served.signature.example)
            with torch.no_grad():
                wanted = student.load_model()(torch.from_numpy(sample["inputs"])[None])[0].numpy()
            np.testing.assert_allclose((await served.predict(sample))["outputs"], wanted, atol=1e-6)
        finally:
            live.prepare_to_end()
            await live.close()

    asyncio.run(scenario())
