"""Boolean expressions as trees."""

from __future__ import annotations

import pytest

from orchestray.trainers.survey.message_driven.trees import OPERATORS, Tree, drawn, parsed


def value(tree: Tree, place: int) -> bool:
    """Return the value of a place from its definition."""
    operands = [value(tree, child) for child in tree.children[place]]
    match tree.words[place]:
        case "not":
            return not operands[0]
        case "and":
            return all(operands)
        case "or":
            return any(operands)
        case "xor":
            return operands[0] != operands[1]
    return tree.words[place] == "true"


def test_each_place_has_its_operands_its_operator_and_its_value() -> None:
    tree = parsed("true false xor not true and")
    assert tree.children == ((), (), (0, 1), (2,), (), (3, 4))
    assert tree.parents == (2, 2, 3, 5, 5, -1)
    assert tree.values == (1, 0, 1, 0, 1, 0)
    for each in drawn(50, seed=1):
        assert [*map(bool, each.values)] == [value(each, place) for place in range(len(each.words))]


def test_random_trees_have_many_shapes_and_are_the_same_for_a_seed() -> None:
    trees = drawn(200, seed=2, depth=4)
    assert len({tree.children for tree in trees}) > 80
    assert {word for tree in trees for word in tree.words} == {*OPERATORS, "true", "false"}
    assert max(len(tree.words) for tree in trees) <= 2**5 - 1
    assert trees == drawn(200, seed=2, depth=4) != drawn(200, seed=3, depth=4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("true and", "'and', word 2 of 'true and', has not 2 operands before it"),
        ("true false", "'true false' is 2 expressions, not one"),
        ("true maybe or", "'maybe' is not a word of expressions, which are false, true, not, and, or, xor"),
    ],
)
def test_a_text_that_is_no_expression_is_an_error(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parsed(text)
