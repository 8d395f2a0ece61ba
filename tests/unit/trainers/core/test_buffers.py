"""Copies of buffers put back what a pass has changed in any way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.core.buffers import BufferCopies, ModuleTree, untouched


class Stateful(nn.Module):
    one: Tensor
    two: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.arange(3.0))
        self.register_buffer("two", torch.tensor([1, 2]), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("wide", torch.ones(1).expand(4))  # cannot be written to
        self.register_buffer("graph", torch.eye(2).to_sparse())


def in_place(model: Stateful) -> None:
    model.one.add_(1)


def hidden(model: Stateful) -> None:
    model.one.data.add_(1)


def assigned(model: Stateful) -> None:
    model.one = model.one + 1


def resized(model: Stateful) -> None:
    model.two.resize_(5).fill_(7)


def other_kind(model: Stateful) -> None:
    model.two = torch.ones(2, 2)


def registered(model: Stateful) -> None:
    model.register_buffer("late", torch.ones(1))


def filled(model: Stateful) -> None:
    model.none = torch.ones(1)


def emptied(model: Stateful) -> None:
    model.one = None  # type: ignore[assignment]


CHANGES = [in_place, hidden, assigned, resized, other_kind, registered, filled, emptied]


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_put_back_as_the_same_objects_with_their_values(change: Callable[[Stateful], None]) -> None:
    model = Stateful()
    objects, copies = dict(model._buffers), BufferCopies(model)
    values = {name: tensor.clone() for name, tensor in objects.items() if tensor is not None}
    for _ in range(2):  # the second time the copies are in memory that is there
        copies.take()
        change(model)
        copies.put_back()
        assert list(model._buffers) == list(objects)
        for name, tensor in model._buffers.items():
            assert tensor is objects[name]
            assert tensor is None or torch.equal(tensor.to_dense(), values[name].to_dense())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_however_it_was_made(change: Callable[[Stateful], None]) -> None:
    model = nn.Sequential(Stateful(), Stateful())
    copies = BufferCopies(model)
    copies.take()
    assert copies.changed(lambda module: ()) == []
    change(model[1])  # type: ignore[arg-type]
    changed = [(number, module, name) for number, module, name in copies.changed(lambda module: ())]
    name = {resized: "two", other_kind: "two", registered: "late", filled: "none"}.get(change, "one")
    assert changed == ([] if change is emptied else [(2, model[1], name)])
    assert copies.changed(lambda module: ("one", "two", "late", "none")) == []


@pytest.mark.parametrize("change", [in_place, hidden, assigned, registered, filled])
def test_a_model_is_untouched_after_the_context(change: Callable[[Stateful], None]) -> None:
    model = Stateful()
    before, values = dict(model._buffers), {name: b.clone() for name, b in model.named_buffers()}
    with untouched(model):
        change(model)
    assert list(model._buffers) == list(before)
    assert all(tensor is before[name] for name, tensor in model._buffers.items())
    assert all(torch.equal(tensor.to_dense(), values[name].to_dense()) for name, tensor in model.named_buffers())


def test_numbers_that_a_module_counts_are_untouched_and_what_else_it_notes_stays() -> None:
    model = nn.Sequential(nn.Identity())
    inner = cast(Any, model[0])
    inner.num_passes, inner.rate, inner.is_warm = 3, 0.5, False
    with untouched(model):
        inner.num_passes, inner.rate, inner.is_warm = 4, 0.25, True
        inner.eval()
    assert (inner.num_passes, inner.rate, inner.is_warm, inner.training) == (3, 0.5, True, False)


def test_numbers_that_a_task_counts_are_untouched_where_it_is_wrapped_and_where_they_begin_in_its_class() -> None:
    class Counting:
        calls = 0

        def __init__(self) -> None:
            self.rate = 0.5

    task = Counting()
    with untouched(nn.Identity(), SimpleNamespace(task=task)):
        task.calls += 1
        task.rate = 0.25
    assert (task.calls, task.rate) == (0, 0.5)


def test_an_assigned_buffer_moves_back_into_its_memory_and_one_of_another_size_is_named() -> None:
    model = Stateful()
    held, copies = model.one, BufferCopies(model)
    copies.take()
    assigned(model)
    assert copies.move_back() is None
    assert model.one is held
    assert held.tolist() == [1.0, 2.0, 3.0]
    other_kind(model)
    assert copies.move_back() == (model, "two")


@pytest.mark.parametrize("deep", [False, True])
def test_the_modules_are_the_present_ones_and_the_same_list_as_long_as_none_has_changed(deep: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    tree = ModuleTree(model)
    before = tree.modules()
    assert before == list(model.modules())
    assert tree.modules() is before
    (model[0] if deep else model).append(nn.ReLU())  # type: ignore[operator]
    assert tree.modules() == list(model.modules()) != before
    model[0][0] = nn.Identity()  # type: ignore[index, operator]
    assert tree.modules() == list(model.modules())
