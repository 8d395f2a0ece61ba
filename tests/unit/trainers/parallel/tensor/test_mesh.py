"""Layouts of named dimensions: the plans that they ask for, and those that contradict themselves."""

from __future__ import annotations

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.mesh import plan_of_layout

LAYERS = {"0": ("hidden1", "pixels"), "2": ("hidden2", "hidden1"), "4": ("classes", "hidden2")}


@pytest.mark.parametrize(
    ("split", "plan"),
    [
        ((), {}),
        (("hidden1",), {"0": "output", "2": "input"}),
        (("hidden2",), {"2": "output", "4": "input"}),
        (("pixels",), {"0": "input_scattered"}),
        (("classes",), {"4": "output_gathered"}),
        (("hidden1", "classes"), {"0": "output", "2": "input", "4": "output_gathered"}),
        (("pixels", "hidden2"), {"0": "input_scattered", "2": "output", "4": "input"}),
    ],
)
def test_a_dimension_stays_split_from_the_layer_that_makes_it_to_the_one_that_takes_it(
    split: tuple[str, ...], plan: dict[str, str]
) -> None:
    assert plan_of_layout(LAYERS, {"batch": "data", **dict.fromkeys(split, "tensor")}) == plan


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"hidden1": "tensor", "hidden2": "tensor"}, "the weights of 2 have the dimensions hidden2 and hidden1"),
        ({"heads": "tensor"}, "no dimension heads: it has batch, hidden1, pixels, hidden2, classes"),
        ({"hidden1": "data"}, "hidden1 can be split along tensor of the mesh only, got data"),
        ({"batch": "tensor"}, "batch can be split along data of the mesh only, got tensor"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of_layout(LAYERS, layout)
