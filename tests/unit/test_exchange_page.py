"""The pages on exchanges leave none out, and what they show of configs is what a config may hold."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from orchestray.platform.config.error_location import sections_of
from orchestray.platform.config.yaml_text import read
from orchestray.trainers.config import sections
from orchestray.trainers.config.load import load_train_config
from support.pages import Block, blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "docs" / "explanation" / "exchanges.md",
    *(
        ROOT / "docs" / "how-to" / f"{name}.md"
        for name in ("average-weights", "compress-gradients", "ensembles", "robust-aggregation", "transfer-learning")
    ),
]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
SECTIONS = (sections.Exchange, sections.Compression, sections.Aggregation)
KINDS = [kind for section in SECTIONS for kind in sections_of(section)]
PARTS = [
    block
    for page in PAGES
    for block in blocks(page)
    if (block.language, block.detail) == ("yaml", "a part of a config")
]
CONFIGS = sorted(set(re.findall(r"configs/train/[\w-]+\.yaml", TEXT)))


def type_of(kind: type[BaseModel]) -> str:
    name: str = kind.model_fields["type"].annotation.__args__[0]  # type: ignore[union-attr]
    return name


@pytest.mark.parametrize("kind", KINDS, ids=type_of)
def test_every_exchange_compression_and_aggregation_is_on_the_page(kind: type[BaseModel]) -> None:
    assert re.search(rf"`(type: )?{type_of(kind)}`", TEXT) or type_of(kind) in ("none", "mean")


@pytest.mark.parametrize("block", PARTS, ids=lambda block: f"{block.heading}, line {block.line}")
def test_a_part_of_a_config_on_the_page_makes_a_config_that_validates(block: Block) -> None:
    config: dict[str, Any] = copy.deepcopy(read((ROOT / "configs" / "train" / "digits.yaml").read_text()))
    config["strategy"] = read(block.text)["strategy"]
    assert load_train_config(config).strategy.network.data > 1


def test_there_are_parts_of_configs_on_the_page() -> None:
    assert len(PARTS) > 5


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_the_page_names_is_there_and_validates(name: str) -> None:
    assert load_train_config(ROOT / name, look_at_task=False).name == Path(name).stem


def test_every_config_of_another_exchange_than_plain_lock_step_is_named_on_the_page() -> None:
    plain = {"type": "allreduce"}
    missing = set()
    for file in (ROOT / "configs" / "train").glob("*.yaml"):
        strategy = read(file.read_text()).get("strategy", {})
        exchange = {key: value for key, value in strategy.get("exchange", plain).items() if key != "shard"}
        is_plain = exchange == plain and not {"compression", "aggregation"} & set(strategy)
        if not is_plain and f"configs/train/{file.name}" not in CONFIGS:
            missing.add(file.stem)
    assert missing == set()
