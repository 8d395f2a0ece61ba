"""From a config to the YAML it could have been read from. Light: knows none of the checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.config import yaml_text

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig


def dump_yaml(config: TrainConfig) -> str:
    """The config as YAML, every default spelled out; loading it gives an equal config."""
    return yaml_text.write(config.model_dump(mode="json"))
