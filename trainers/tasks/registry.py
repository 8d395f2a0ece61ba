"""The built-in tasks, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.config.registry import Registry

if TYPE_CHECKING:
    from orchestray.trainers.tasks.params import TaskConfig

_HERE = "orchestray.trainers.tasks"

TASKS: Registry[TaskConfig] = Registry(
    "task",
    {
        "digits": (f"{_HERE}.params:DigitsTask", f"{_HERE}.digits:Digits"),
        "python_source": (f"{_HERE}.params:PythonSourceTask", f"{_HERE}.python_source:PythonSource"),
        "parquet": (f"{_HERE}.params:ParquetTask", f"{_HERE}.parquet:ParquetTable"),
        "images": (f"{_HERE}.params:ImagesTask", f"{_HERE}.images:Images"),
        "mnist": (f"{_HERE}.params:MnistTask", f"{_HERE}.mnist:Mnist"),
        "huggingface": (f"{_HERE}.params:HuggingFaceTask", f"{_HERE}.huggingface:HuggingFace"),
    },
    noun="a task",
)
