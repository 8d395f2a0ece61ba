"""The conversion of a config to YAML, in a module that does not import the checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.config import yaml_text

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig


def dump_yaml(config: TrainConfig) -> str:
    """Return the config as YAML with every default written out; loading it gives an equal config."""
    return yaml_text.write(config.model_dump(mode="json"))
