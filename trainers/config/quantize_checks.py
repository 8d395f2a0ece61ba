"""Rules on quantization while training: schemes that could not keep the result of a single process."""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.sync.allreduce.params import AllReduce
from orchestray.trainers.sync.parameter_server import ParameterServer

_KEY = "train.quantize.type"


def _tensor(view: View) -> Iterator[Problem]:
    if view("train.quantize") is not None and view("strategy.network.tensor") > 1:
        text = "scales come from whole tensors of weights, and strategy.network.tensor gives each worker a part of them"
        yield Problem("train.quantize", f"{text}; use tensor: 1, with data, pipeline or strategy.exchange.shard")


def _precision(view: View) -> Iterator[Problem]:
    if view("train.quantize") is not None and view("train.precision") == "bfloat16":
        text = "bfloat16 would round the quantized numbers once more; use float32, or take train.quantize out"
        yield Problem("train.precision", text)


def _factors(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if (
        view("train.quantize") is not None
        and isinstance(exchange, AllReduce | ParameterServer)
        and exchange.factors != "never"
    ):
        text = "factors make gradients of plain linear layers, and train.quantize changes what those compute"
        yield Problem("strategy.exchange.factors", f"{text}; use factors: never, or take train.quantize out")


def _clipped(view: View) -> Iterator[Problem]:
    quantize, exchange, network = view("train.quantize"), view("strategy.exchange"), view("strategy.network")
    if quantize is None or not quantize.clips_weights:
        return
    reason = f"{quantize.type} clips the weights after each update"
    if isinstance(exchange, ParameterServer):
        yield Problem(_KEY, f"{reason}, which parameter servers do not; use allreduce, or another quantization")
    elif network.schedule == "pipedream" and network.pipeline > 1:
        text = f"{reason}, and pipedream's stages update at moments of their own"
        yield Problem(_KEY, f"{text}; use another schedule, or another quantization")


def _history(view: View) -> Iterator[Problem]:
    quantize, exchange, network = view("train.quantize"), view("strategy.exchange"), view("strategy.network")
    if quantize is None or not quantize.keeps_history:
        return
    reason = f"{quantize.type} predicts by the largest numbers of the whole batch, once a step"
    if not isinstance(exchange, AllReduce):
        text = f"{reason}, and with {exchange.type} no step has all of them"
        yield Problem(_KEY, f"{text}; use allreduce, or another quantization")
    elif network.schedule == "pipedream" and network.pipeline > 1:
        text = f"{reason}, and pipedream begins a step before the last one ends"
        yield Problem(_KEY, f"{text}; use another schedule, or another quantization")


def _beside(view: View) -> Iterator[Problem]:
    if view("train.quantize") is None:
        return
    if view("train.weight_norm"):
        text = "both this and train.quantize compute a layer's weight from another; take one of them out"
        yield Problem("train.weight_norm", text)
    if view("train.solver") is not None:
        text = "solvers search along true derivatives, and those of quantized weights are straight-through estimates"
        yield Problem("train.solver", f"{text}; use train.optimizer, or take train.quantize out")


QUANTIZE_RULES: tuple[Rule, ...] = (_tensor, _precision, _factors, _clipped, _history, _beside)
