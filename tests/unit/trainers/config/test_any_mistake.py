"""Whatever is written into the sections of the strategy and the faults, it is a config or a list of lines that tell."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.config.base import Section
from orchestray.platform.config.error_location import has_forms, locate, sections_of, tag_of
from orchestray.platform.config.yaml_text import read
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.faults import Distill, Fault
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.schema import Network, TrainConfig, TrainSection
from orchestray.trainers.config.sections import Aggregation, Compression, Exchange
from orchestray.trainers.sync.local.params import Edges
from support.configs import GOOD

_WORDS = ["", "end", "ring", "random", "stale", "asynchronous", "shared_memory", "worker/0", "worker/9", "nothing", "2"]
_SCALARS = (
    st.none() | st.booleans() | st.integers(-1, 5) | st.sampled_from([0.0, 0.5, 1.5, -1.0]) | st.sampled_from(_WORDS)
)
_VALUES = (
    _SCALARS
    | st.lists(_SCALARS | st.lists(st.integers(-1, 4), max_size=3), max_size=3)
    | st.fixed_dictionaries({}, optional={"type": _SCALARS, "lr": _SCALARS, "edges": _SCALARS, "x": _SCALARS})
)


def _section(*sections: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    """Return mappings with keys of these sections, of the right type or not, and any values."""
    tags = [tag for tag in map(tag_of, sections) if tag]
    keys = [*sorted({key for section in sections for key in section.model_fields} - {"type"}), "unknown"]
    chosen = st.dictionaries(st.sampled_from(keys), _VALUES, max_size=3)
    if not tags:
        return chosen
    types = st.fixed_dictionaries({}, optional={"type": st.sampled_from(tags) | _SCALARS})
    return st.tuples(types, chosen).map(lambda pair: {**pair[0], **pair[1]})


_CONFIGS = st.fixed_dictionaries(
    {
        "strategy": st.fixed_dictionaries(
            {"network": st.fixed_dictionaries({"data": st.integers(1, 5)})},
            optional={
                "exchange": _section(*sections_of(Exchange)) | _VALUES,
                "compression": _section(*sections_of(Compression)) | _VALUES,
                "aggregation": _section(*sections_of(Aggregation)) | _VALUES,
            },
        )
    },
    optional={
        "faults": st.lists(_section(Fault) | _VALUES, max_size=2) | _VALUES,
        "allow_faults": _SCALARS,
        "distill": _section(Distill) | _VALUES,
        "engine": st.sampled_from(["actors", "ray_train"]),
    },
)
_LINE = re.compile(r"^config: [a-z_]+(\.[a-z_]+|\.\d+)*: \S.*$")


@settings(deadline=None, max_examples=150)
@given(changes=_CONFIGS)
def test_any_mistake_gives_lines_in_plain_words_each_key_once_or_the_config_comes_back_from_its_dump(
    changes: dict[str, Any],
) -> None:
    try:
        config = load_train_config({**GOOD, **changes})
    except ConfigError as error:
        problems = list(error.problems)
    else:
        assert load_train_config(read(dump_yaml(config))) == config
        return
    assert problems
    assert len(problems) == len(set(problems))
    for line in problems:
        assert _LINE.match(line), line
        assert not re.search(r"constrained|literal\[|function-|of another form|Input should|ValidationError", line)


def test_the_keys_that_may_have_one_of_several_forms_are_known() -> None:
    sections = [*sections_of(Exchange), *sections_of(Compression), Network, TrainSection, TrainConfig, Fault, Edges]
    found = {
        f"{section.__name__}.{key}"
        for section in sections
        for key, entry in section.model_fields.items()
        if has_forms(entry)
    }
    assert found == {"Network.split", "Gossip.graph", "Averaging.every"}


@pytest.mark.parametrize(
    ("location", "path", "section"),
    [
        (("train", "optimizer", "adam", "betas", 1), "train.optimizer.betas.1", "Adam"),
        (
            ("strategy", "exchange", "gossip", "graph", "Edges", "edges", 0, 1),
            "strategy.exchange.graph.edges.0.1",
            "Edges",
        ),
        (
            ("strategy", "exchange", "averaging", "outer_optimizer", "sgd", "lr"),
            "strategy.exchange.outer_optimizer.lr",
            "Sgd",
        ),
        (("faults", 3, "kill"), "faults.3.kill", "Fault"),
        (("faults", 3), "faults.3", "TrainConfig"),
        (("no", "such", "place"), "no.such.place", "None"),
    ],
)
def test_a_location_of_pydantic_is_a_path_without_what_it_adds_for_unions(
    location: tuple[int | str, ...], path: str, section: str
) -> None:
    place = locate(TrainConfig, location)
    assert place.path == path
    assert getattr(place.section, "__name__", "None") == section
