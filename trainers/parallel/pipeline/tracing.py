"""A model's forward pass as a graph of module calls and operations, recorded by running it on stand-ins for tensors.

torch.fx holds the graph, but the recording is our own. torch.fx's tracer replaces `nn.Module.__call__` for the whole
process while it works, and replicas may be threads of one process. Here the modules of this one model change their
class while it is recorded, and a mode of this thread sees the operations. It also records what a tracer would compute
at once and keep: tensors made in `forward`, gradients switched off, and differences between training and evaluation.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from orchestray.platform.process import gc_control
from orchestray.trainers.core.inputs import ONE_TENSOR, InputForm, call
from orchestray.trainers.parallel.pipeline.encoders import call_layers
from orchestray.trainers.parallel.pipeline.modes import DifferentError, merge
from orchestray.trainers.parallel.pipeline.stand_ins import CONCRETE_METHODS, CONCRETE_PROPERTIES, Given, Known, Value
from orchestray.trainers.parallel.pipeline.whole_functions import Built, prepare_functions

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parent}{os.sep}"
_READERS = {"__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy"}
_TAKES_GRADIENTS = {torch.autograd.grad, torch.autograd.backward, "backward"}
_FACTORIES = {
    *("arange", "zeros", "ones", "full", "empty", "eye", "linspace", "logspace", "tensor", "as_tensor", "range"),
    *("rand", "randn", "randint", "randperm", "normal", "tril_indices", "triu_indices", "empty_strided"),
    *("hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"),
}


class UntraceableError(Exception):
    """An error: the forward pass cannot be recorded."""

    def __init__(self, reason: str, scope: str, where: str) -> None:
        super().__init__(reason)
        self.reason = reason
        """End of a sentence: "... because <reason>"."""
        self.scope = scope
        """Name of the innermost module that was being recorded; "" is the model itself."""
        self.where = where
        """Line in the user's code: `file, line n`."""

    def __str__(self) -> str:
        return f"{self.reason} ({self.where})"


@dataclass(frozen=True)
class Recording:
    graph: fx.Graph
    constants: dict[str, Tensor]
    """Tensors that the graph looks up and no module of the model holds, by name."""


def record(model: nn.Module, opened: AbstractSet[str], form: InputForm = ONE_TENSOR) -> Recording:
    """Return the graph of a call of the model in training and evaluation, for inputs of any size.

    Each node's `meta` has its origin: "scope" (the innermost recorded module) and "where" (the user's line). A constant
    that depends on the mode is chosen when the graph runs, by the attribute `training`.

    Args:
        model: the model, in any mode; not changed.
        opened: names of the modules to record part by part; all others except the model itself are called whole.
        form: form of the inputs, of which each tensor is a placeholder of the graph.

    Raises:
        UntraceableError: the control flow depends on the data, or differs between training and evaluation.
    """
    prepare_functions(model)
    with gc_control.pause():  # what a finalizer of garbage does with tensors would be recorded, too
        recorded, evaluation = [_record(model, opened, form, training=training) for training in (True, False)]
    try:
        merge(recorded.graph, evaluation.graph)
    except DifferentError as error:
        reason = "it does one thing in training and another in evaluation"
        meta = error.node.meta
        raise UntraceableError(reason, meta.get("scope", ""), meta.get("where", "its end")) from None
    return recorded


def tensor_names(model: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter and buffer, by its id."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return names | {id(buffer): name for name, buffer in model.named_buffers()}


class _Tracer(fx.proxy.TracerBase):
    """A recorder of what happens to values."""

    def __init__(self, model: nn.Module) -> None:
        self.graph = fx.Graph()
        self.scope = fx.proxy.Scope("", type(model))
        self.module_stack = {}  # type: ignore[assignment]
        self.node_name_to_scope = {}
        self.names = tensor_names(model)
        self.constants: dict[str, Tensor] = {}
        self.scopes = [""]
        self.blamed: str | None = None

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        if kind.startswith("call") and target in _TAKES_GRADIENTS:
            raise self.error("it takes gradients in its forward pass, and a cut would end the graph that they need")
        if kind.startswith("call") and not torch.is_grad_enabled():
            self._check_custom_function()
            kind, target, args = _without_gradients(self, kind, target, args)
        if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled():
            raise self.error("it changes autocast or inference mode in forward")
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        node.meta.update(scope=self.scopes[-1], where=_user_line())
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.known(a).node
        if isinstance(a, dict) and type(a) is not dict and type(a) in pytree.SUPPORTED_NODES:  # such as a ModelOutput
            leaves, structure = pytree.tree_flatten(a)
            return self.call(Built(structure), *leaves).node
        try:
            return super().create_arg(a)
        except NotImplementedError as error:
            kind = type(a).__name__
            hint = " (set the model's config.use_cache to False)" if kind.endswith("Cache") else ""
            raise self.error(f"a {kind} takes part in its computation{hint}") from error

    def known(self, tensor: Tensor) -> Known:
        """Return a stand-in for a tensor of the model, or for a constant."""
        name = self.names.get(id(tensor))
        if name is None:
            if tensor.requires_grad:
                raise self.error("it uses a tensor that requires gradients and is no parameter of the model")
            name = f"_constant_{len(self.constants)}"
            self.names[id(tensor)] = name
            self.constants[name] = tensor
        node = self.graph.create_node("get_attr", name)
        node.meta.update(scope=self.scopes[-1], where=_user_line(), is_constant=name in self.constants)
        return Known(node, self, tensor)

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Proxy:
        return self.create_proxy("call_function", function, args, {})

    def to_bool(self, obj: fx.Proxy) -> bool:
        file, line = _user_frame()
        if _asserts_all(linecache.getline(file, line)):
            self.create_proxy("call_function", torch._assert, (obj, f"assertion failed: {file}, line {line}"), {})
            return True
        raise self.error("which way it goes depends on the data")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        raise self.error("how often it loops, or what it unpacks, depends on the data")

    def keys(self, obj: fx.Proxy) -> Any:
        raise self.error("it unpacks a value as a dict")

    def error(self, reason: str) -> UntraceableError:
        file, line = _user_frame()
        return UntraceableError(reason, self.scopes[-1], f"{file}, line {line}")

    def _check_custom_function(self) -> None:
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith("autograd/function.py"):
                raise self.error("it calls a torch.autograd.Function of its own")


class _Mode(TorchFunctionMode):
    """A mode that sees operations on tensors of the model, and operations that make tensors."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return self._record(func, args, kwargs)
        if name == "__get__":
            name = func.__self__.__name__
            if name in CONCRETE_PROPERTIES or not any(id(leaf) in self._tracer.names for leaf in leaves):
                return func(*args, **kwargs)
            return self._tracer.create_proxy("call_function", getattr, (args[0], name), {})
        if not any(id(leaf) in self._tracer.names for leaf in leaves if isinstance(leaf, Tensor)):
            return self._record(func, args, kwargs) if name in _FACTORIES else func(*args, **kwargs)
        if name in CONCRETE_METHODS:
            return func(*args, **kwargs)
        if name in _READERS:
            raise self._tracer.error("it reads the value of a parameter or buffer")
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, type(Tensor.add)) or getattr(func, "__objclass__", None) is not None:
            return self._tracer.create_proxy("call_method", func.__name__, args, kwargs)
        return self._tracer.create_proxy("call_function", func, args, kwargs)


def _record(model: nn.Module, opened: AbstractSet[str], form: InputForm, *, training: bool) -> Recording:
    tracer = _Tracer(model)
    placeholders = [tracer.graph.create_node("placeholder", name) for name in form.names]
    given = [Given(node, tracer, dims) for node, dims in zip(placeholders, form.dims, strict=True)]
    inputs = form.filled(given)
    with _recorded_by(tracer, model, opened, training), _Mode(tracer), torch.enable_grad():
        try:
            outputs = call(model, inputs)
            tracer.create_node("output", "output", (tracer.create_arg(outputs),), {})
        except UntraceableError:
            raise
        except Exception as error:
            raise _located(error, tracer) from error
    return Recording(tracer.graph, tracer.constants)


@contextlib.contextmanager
def _recorded_by(tracer: _Tracer, model: nn.Module, opened: AbstractSet[str], training: bool) -> Iterator[None]:
    """Record calls and parameters of the model's modules inside; restore the modules afterwards."""
    before = [(module, type(module), module.training) for module in model.modules()]
    was_training = model.training  # then what is in evaluation mode stays in it
    try:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["training"] = training and not (was_training and not module.training)
                object.__setattr__(
                    module, "__class__", _recording_class(tracer, name, type(module), not name or name in opened)
                )
        yield
    finally:
        for module, kind, mode in before:
            if not isinstance(module, torch.jit.ScriptModule):
                object.__setattr__(module, "__class__", kind)
                module.__dict__["training"] = mode


def _recording_class(tracer: _Tracer, name: str, kind: type[nn.Module], is_opened: bool) -> type[nn.Module]:
    def call_whole(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_module", name, args, kwargs)

    def call_inside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tracer.scopes.append(name)
        try:
            if kind.forward is nn.TransformerEncoder.forward:
                return call_layers(tracer.call, self, *args, **kwargs)
            return kind.__call__(self, *args, **kwargs)
        except Exception:
            tracer.blamed = name if tracer.blamed is None else tracer.blamed
            raise
        finally:
            tracer.scopes.pop()

    def get(self: nn.Module, attribute: str) -> Any:
        value = kind.__getattr__(self, attribute)
        return tracer.known(value) if isinstance(value, Tensor) and id(value) in tracer.names else value

    def set_(_self: nn.Module, attribute: str, _value: Any) -> None:
        raise tracer.error(f"it sets self.{attribute} in forward")

    members = {"__call__": call_inside if is_opened else call_whole, "__getattr__": get, "__setattr__": set_}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def _located(error: Exception, tracer: _Tracer) -> UntraceableError:
    """Turn an error that the user's code raised on stand-ins into an UntraceableError."""
    lines = []
    at = error.__traceback__
    while at is not None:
        lines.append((at.tb_frame.f_code.co_filename, at.tb_lineno))
        at = at.tb_next
    file, line = next((place for place in reversed(lines) if not _is_machinery(place[0])), lines[-1])
    reason = f"its forward pass asks for values that are known only when it runs: {type(error).__name__}: {error}"
    return UntraceableError(reason, tracer.blamed or "", f"{file}, line {line}")


def _asserts_all(line: str) -> bool:
    """Return True if a line of code is an assertion of which every part must be true."""
    try:
        statements = ast.parse(line.strip()).body
    except SyntaxError:
        return False
    if not isinstance(statements[0] if statements else None, ast.Assert):
        return False
    tested = ast.walk(statements[0].test)  # type: ignore[attr-defined]
    return not any(isinstance(part, ast.Or | ast.Not | ast.IfExp | ast.Lambda) for part in tested)


def _is_machinery(file: str) -> bool:
    return file.startswith((_TORCH, _OURS, "<"))


def _user_frame() -> tuple[str, int]:
    frame = sys._getframe()
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _user_line() -> str:
    return "{}, line {}".format(*_user_frame())


# The functions that a recorded graph calls besides torch's own operations.


def without_gradients(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
    """Call a function, a module, or the first argument's method of that name, with gradients off."""
    with torch.no_grad():
        if isinstance(function, str):
            return getattr(args[0], function)(*args[1:], **kwargs)
        return function(*args, **kwargs)


def _without_gradients(tracer: _Tracer, kind: str, target: Any, args: Any) -> tuple[str, Any, Any]:
    if kind == "call_module":
        called = tracer.graph.create_node("get_attr", target)
        called.meta.update(scope=tracer.scopes[-1], where=_user_line(), is_module=True)
        target = called
    return "call_function", without_gradients, (target, *args)
