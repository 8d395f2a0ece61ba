"""docs/serving.md is true and whole: every key of a serve config, with its default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from orchestray.platform.config.yaml_text import read
from orchestray.serving.config import schema

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
WITHIN = {
    "update.rollback": schema.RollbackSection,
    "models": schema.ModelSection,
    "replicas": schema.Scaling,
    "compute.network": schema.NetworkSection,
}
"""Sections that stand where another value may stand, too."""


def keys(path: str, section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield each key with its default, as a JSON text; `required` where there is none."""
    for name, field in section.model_fields.items():
        key, default = f"{path}.{name}".strip("."), field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from keys(key, type(default))
            continue
        yield key, "required" if field.is_required() else json.dumps(default)
        if key in WITHIN:
            yield from keys(key, WITHIN[key])


def test_every_key_of_a_serve_config_is_documented_with_its_default() -> None:
    config = PAGE.partition("\n## Config\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (`[^`|]*`|required) \|", config, flags=re.MULTILINE)
    documented = {key: said if said == "required" else read(said.strip("`")) for key, said in rows}
    expected = dict(keys("", schema.ServeConfig))
    assert documented == {key: said if said == "required" else json.loads(said) for key, said in expected.items()}
