"""A stage of a cut model as a chain: its operations in order, in groups that keep only their inputs.

Unlike a sequence's layers, operations may need values from further back (skip connections). Such a value is an input of
every group that needs it, and an output of the group that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from orchestray.trainers.parallel.pipeline.stage import Stage, _Step
from orchestray.trainers.parallel.recompute.chain import calls_of, copied, group, holds_parameters, units_of
from orchestray.trainers.parallel.recompute.checkpointed import Segment

if TYPE_CHECKING:
    from orchestray.trainers.core.inputs import InputForm
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.parallel.recompute.meter import ActivationMeter

_Environment = dict[fx.Node, Any]


class StageChain:
    """A `Chain` over the operations of a stage."""

    def __init__(
        self,
        stage: Stage,
        model: nn.Module | None = None,
        *,
        form: InputForm | None = None,
        num_live: int = 1,
        draw: RngKey | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        """
        Args:
            stage: the stage whose operations are grouped.
            model: the whole model, if the chain replaces its `forward`, with the same inputs and outputs.
            form: form of the model's inputs; None: the chain is called with what the stage takes.
            num_live: see `recompute`.
            draw: see `recompute`.
            meter: see `recompute`.
        """
        self._stage = stage
        self._model = model
        self._form = form
        # Parameters, buffers and modules are looked up again in each group, and not passed between groups.
        self._fetches = {step.node: step for step in stage._program.steps if _is_fetch(step.node)}
        steps = [step for step in stage._program.steps if step.node not in self._fetches]
        units = units_of([self._begins_unit(step) for step in steps])
        last_use = _last_uses(steps, stage._program.gives.nodes)
        self.groups: list[Segment] = []
        self._plan: list[tuple[list[fx.Node], list[fx.Node], list[fx.Node]]] = []
        for start, stop in group(units, num_live) if units else []:
            inside = steps[start:stop]
            takes = self._taken(inside)
            gives = [step.node for step in inside if last_use.get(step.node, -1) >= stop]
            dead = [node for node in takes if last_use.get(node, -1) < stop]
            called = [self._function(step, {}) for step in inside if step.node.op == "call_module"]
            self.groups.append(
                Segment(
                    f"operations {inside[0].node.name!r} to {inside[-1].node.name!r}",
                    partial(self._run, self._with_fetches(inside), takes, gives),
                    [module for module in called if isinstance(module, nn.Module)],
                    draw=draw,
                    meter=meter,
                )
            )
            self._plan.append((takes, gives, dead))
        self._calls = calls_of(self.groups, num_live)
        self._returned = self._with_fetches(
            [self._fetches[n] for n in stage._program.gives.nodes if n in self._fetches]
        )

    def __call__(self, *values: Any, **named: Any) -> Any:
        stage = self._stage
        if self._form is not None:
            values = self._form.tensors(named or values)
        env = stage._program.received(values)
        for call, (takes, gives, dead) in zip(self._calls, self._plan, strict=True):
            made = call(*[env[node] for node in takes])
            env.update(zip(gives, made, strict=True))
            for node in dead:
                del env[node]
        for step in self._returned:
            env[step.node] = self._fetched(step, env)
        results = stage._program.gives.values(env)
        return results if self._model is None else results[0]

    def _run(self, steps: Sequence[_Step], takes: Sequence[fx.Node], gives: Sequence[fx.Node], *values: Any) -> Any:
        first = next(step for step in steps if step.node not in self._fetches)
        module = self._function(first, {}) if first.node.op == "call_module" else None
        env: _Environment = dict(zip(takes, values if module is None else copied(values, module), strict=True))
        for step in steps:
            try:
                env[step.node] = self._fetched(step, env) if step.node in self._fetches else step.run(self._stage, env)
            except Exception as error:
                if not step.is_module:
                    error.add_note(f"in the model's forward: {step.node.meta.get('where')}")
                raise
            for node in step.last_uses:
                env.pop(node, None)
        return tuple(env[node] for node in gives)

    def _begins_unit(self, step: _Step) -> bool:
        if step.node.op == "call_module":
            return holds_parameters(self._function(step, {}))
        return any(_is_fetch(used) for used in step.node.all_input_nodes)

    def _function(self, step: _Step, env: _Environment) -> Any:
        return step.function(self._stage, env)

    def _fetched(self, step: _Step, env: _Environment) -> Any:
        # The model's own tensors may be replaced later (by shards, for example), and the stage's would be stale.
        owner = self._model if self._model is not None and _has(self._model, step.node) else self._stage
        return step.run(owner, env)

    def _taken(self, inside: Sequence[_Step]) -> list[fx.Node]:
        """Return the values that the operations need and do not make themselves, in a fixed order."""
        own = {step.node for step in inside}
        found: dict[fx.Node, None] = {}
        for step in self._with_fetches(inside):
            found.update((used, None) for used in step.node.all_input_nodes if used not in self._fetches)
        return [node for node in found if node not in own]

    def _with_fetches(self, inside: Sequence[_Step]) -> list[_Step]:
        """Return the operations, each after the lookups it needs."""
        ordered: dict[fx.Node, _Step] = {}

        def add(step: _Step) -> None:
            for used in step.node.all_input_nodes:
                if used in self._fetches and used not in ordered:
                    add(self._fetches[used])
            ordered[step.node] = step

        for step in inside:
            add(step)
        return list(ordered.values())


def _is_fetch(node: fx.Node) -> bool:
    return node.op == "get_attr" or bool(node.meta.get("is_fetched", False))


def _has(model: nn.Module, node: fx.Node) -> bool:
    """Return True if the lookup finds its parameter, buffer or module in the model."""
    if node.op != "get_attr" or node.meta.get("is_flag"):
        return False
    *path, leaf = str(node.target).split(".")
    for atom in path:
        if atom not in model._modules:
            return False
        model = model.get_submodule(atom)
    return any(leaf in held for held in (model._parameters, model._buffers, model._modules))


def _last_uses(steps: Sequence[_Step], outputs: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the index of the last operation that needs each value; the number of operations for a returned value."""
    found = {used: index for index, step in enumerate(steps) for used in _used(step.node)}
    return {**found, **dict.fromkeys(outputs, len(steps))}


def _used(node: fx.Node) -> list[fx.Node]:
    """Return what a node needs, and what the lookups it needs do."""
    found: list[fx.Node] = []
    for used in node.all_input_nodes:
        found += [used, *(_used(used) if _is_fetch(used) else [])]
    return found
