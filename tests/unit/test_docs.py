"""The pages of docs/ are true and whole: keys and defaults, links, and commands as they can be typed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from orchestray.cli.app import app
from orchestray.platform.config.error_location import sections_of
from orchestray.platform.config.yaml_text import read
from orchestray.trainers.config import faults, schema, sections
from orchestray.trainers.ensemble.params import EnsembleLoss
from orchestray.trainers.optim import params as optimizers
from orchestray.trainers.optim.batch_params import LrScaling, NoiseScale
from orchestray.trainers.optim.registry import AVERAGES as AVERAGE_REGISTRY
from orchestray.trainers.optim.registry import BATCH_SCHEDULES as BATCH_REGISTRY
from orchestray.trainers.optim.registry import OPTIMIZERS as OPTIMIZER_REGISTRY
from orchestray.trainers.optim.registry import SCHEDULES as SCHEDULE_REGISTRY
from orchestray.trainers.solvers.params import SolverSection
from orchestray.trainers.solvers.registry import SOLVERS as SOLVER_REGISTRY
from orchestray.trainers.sync.local.params import Edges
from orchestray.trainers.tasks.registry import TASKS
from support import pages
from support.pages import blocks, name_of

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
TRAINING = "\n".join([TRAIN, *(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "how-to").glob("*.md"))])
"""The keys of a config, and the pages that have the types of a section."""
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *pages.PAGES]
OPTIMIZERS = [OPTIMIZER_REGISTRY.params(name) for name in OPTIMIZER_REGISTRY]
AVERAGES = [AVERAGE_REGISTRY.params(name) for name in AVERAGE_REGISTRY]
BATCH_SCHEDULES = [BATCH_REGISTRY.params(name) for name in BATCH_REGISTRY]
SCHEDULES = [SCHEDULE_REGISTRY.params(name) for name in SCHEDULE_REGISTRY]
SOLVERS = [SOLVER_REGISTRY.params(name) for name in SOLVER_REGISTRY]
EXCHANGES = sections_of(sections.Exchange)
COMPRESSIONS = sections_of(sections.Compression)
AGGREGATIONS = sections_of(sections.Aggregation)
QUANTIZATIONS = sections_of(sections.Quantize)
SECTIONS: dict[str, type[BaseModel]] = {
    "train": schema.TrainSection,
    "train.noise_scale": NoiseScale,
    "train.lr_scaling": LrScaling,
    "train.until": schema.Until,
    "train.early_stopping": schema.EarlyStopping,
    "train.ensemble": EnsembleLoss,
    "strategy.network": schema.Network,
    "strategy.exchange.graph": Edges,
    "checkpoint": schema.CheckpointSection,
    "checkpoint.best": schema.BestCheckpoint,
    "resources": schema.Resources,
    "distill": faults.Distill,
    "faults": faults.Fault,
}
TYPES = {"exchange": "allreduce", "compression": "none", "aggregation": "mean"}
"""Types of parts of the strategy where their `type` is not given."""
PARTS = {"strategy", "checkpoint", "resources"}
"""Sections that are documented by their keys alone."""


def keys(path: str, section: type[BaseModel], skip: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key of a section with its default, as a JSON text; `required` where there is none."""
    for name, field in section.model_fields.items():
        if name == skip:
            continue
        default = field.get_default()
        if isinstance(default, BaseModel):
            default = default.model_dump(mode="json", exclude_unset=not isinstance(default, optimizers.Schedule))
            default = {"type": default["type"]} if "type" in default else default
        yield f"{path}.{name}".strip("."), "required" if field.is_required() else json.dumps(default)


def expected() -> list[tuple[str, str]]:
    plain = [pair for path, section in SECTIONS.items() for pair in keys(path, section)]
    tasks = [pair for task in map(TASKS.params, TASKS) for pair in keys("task", task, skip="type")]
    exchanging = [pair for kind in EXCHANGES for pair in keys("strategy.exchange", kind, skip="type")]
    types = [(f"strategy.{part}.type", json.dumps(default)) for part, default in TYPES.items()]
    top = [pair for pair in keys("", schema.TrainConfig) if pair[0] not in {"task", "train", *PARTS}]
    return [*top, *tasks, *plain, *exchanging, *types]


def documented() -> list[tuple[str, str]]:
    """Return the keys of the tables, with their defaults as JSON texts."""
    rows = re.findall(r"^\| `([\w.]+)` \| (`[^`|]*`|required) \|", TRAIN, flags=re.MULTILINE)
    return [(key, default if default == "required" else json.dumps(read(default.strip("`")))) for key, default in rows]


def test_every_key_of_a_config_is_documented_with_its_default() -> None:
    assert sorted(documented()) == sorted(expected())


@pytest.mark.parametrize("part", TYPES)
def test_the_type_of_a_part_of_the_strategy_that_is_not_given_is_the_documented_one(part: str) -> None:
    assert getattr(schema.Strategy(), part).type == TYPES[part]


@pytest.mark.parametrize(
    "kind",
    [*OPTIMIZERS, *SOLVERS, *AVERAGES, *SCHEDULES, *BATCH_SCHEDULES, *COMPRESSIONS, *AGGREGATIONS, *QUANTIZATIONS],
    ids=lambda kind: kind.__name__,
)
def test_every_type_of_a_section_is_documented_with_its_keys(kind: type[BaseModel]) -> None:
    told_above = {"type", "lr", "groups"} | ({"warmup_steps"} if issubclass(kind, optimizers.Schedule) else set())
    told_above |= {"weight_decay"} if issubclass(kind, SolverSection) else set()
    own = {name: field for name, field in kind.model_fields.items() if name not in told_above}
    name = kind.model_fields["type"].annotation.__args__[0]  # type: ignore[union-attr]
    row = re.search(rf"^\| `{name}` \| (.*) \|$", TRAINING, flags=re.MULTILINE)
    assert row is not None
    given: dict[str, Any] = {}
    for code in re.findall(r"`(\w+: [^`]+)`", row[1]):
        given |= read(code)
    required = {name for name, field in own.items() if field.is_required()}
    assert all(f"`{name}` (required)" in row[1] for name in required)
    defaults = {name: json.loads(json.dumps(field.default)) for name, field in own.items() if name not in required}
    assert given == defaults


def anchors(page: Path) -> set[str]:
    """Return GitHub's names for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        file = (page.parent / place) if place else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}"


def typed() -> list[list[str]]:
    """Return the words of every line of a shell block that calls orchestray."""
    lines = [
        line for page in PAGES for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()
    ]
    found = [re.search(r"(?:^|\$\()orchestray ([^)]*)", line) for line in lines]
    words = [shlex.split(match[1], comments=True) for match in found if match]
    return [line[: line.index("|")] if "|" in line else line for line in words]


@pytest.mark.parametrize("words", typed(), ids=" ".join)
def test_a_command_of_the_pages_parses(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    parent, rest = typer.Context(group, info_name="orchestray"), words
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(parent, rest)
        parent = typer.Context(group, info_name=name, parent=parent)
    group.make_context(name, rest)


def test_no_page_names_a_place_of_the_machine_it_was_written_on() -> None:
    for page in PAGES:
        assert not re.search(r"/(?:root|home|work|tmp)/", page.read_text(encoding="utf-8")), name_of(page)
