"""8-bit integer weights for devices with little memory: the linear layers of a model are quantized after training.

B. Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR
2018, section 2: integers times a scale, products summed as 32-bit integers; here symmetric. Weights have a scale for
each output, found once. Inputs have one for each row, found at run time. So the answer to a request does not depend on
the other requests in its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orchestray.platform.errors import CheckpointError

_MOST = 127.0
_MOST_INPUTS = 2**31 // 127**2
"""Largest number of products of two 8-bit integers whose sum certainly fits into 32 bits."""


class Int8Linear(nn.Module):
    """A linear layer that computes with 8-bit integers: [..., in_features] to [..., out_features].

    Args:
        linear: the layer; it is not changed.
    """

    weight: Tensor
    """int8 [out_features, in_features]"""
    weight_scale: Tensor
    """[out_features]"""
    bias: Tensor | None
    in_features: int
    out_features: int

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = _scale(weight)
        self.register_buffer("weight", _integers(weight, scale))
        self.register_buffer("weight_scale", scale.squeeze(-1))
        bias = dict(linear.named_parameters()).get("bias")
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._bytes_before = num_bytes(linear)

    def run_report(self) -> dict[str, int]:
        """Return the `bytes` of this layer, and those of the layer in floating-point numbers, `bytes_before`."""
        return {"bytes": num_bytes(self), "bytes_before": self._bytes_before}

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        scale = _scale(rows)
        # The only integer product that torch has for both CPUs and GPUs; torch is pinned.
        sums = torch._int_mm(_integers(rows, scale), self.weight.t())
        outputs = sums.to(inputs.dtype) * scale * self.weight_scale
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.reshape(*inputs.shape[:-1], len(self.weight))


def quantize_int8(model: nn.Module) -> nn.Module:
    """Replace the linear layers of a model by `Int8Linear`, in place; everything else is unchanged.

    A layer whose weights another shares (tied weights), or that other code reads, keeps them.

    Args:
        model: trained model on the CPU.

    Returns:
        the model, or an `Int8Linear` if the model is itself a linear layer.

    Raises:
        CheckpointError: it has no linear layer to replace.
    """
    if _is_replaced(model):
        return Int8Linear(model)  # type: ignore[arg-type]
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_replaced(child) and owners[id(child.weight)] == 1:
                setattr(parent, name, Int8Linear(child))  # type: ignore[arg-type]
                num_replaced += 1
    if not num_replaced:
        raise CheckpointError(
            "the model has no linear layer of its own to make integers of: leave out compute.quantize"
        )
    return model


def num_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, counting each tensor once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _is_replaced(module: nn.Module) -> bool:
    """Return True for a plain linear layer; subclasses may compute differently, or have their weights read."""
    return type(module) is nn.Linear and module.in_features <= _MOST_INPUTS


def _scale(values: Tensor) -> Tensor:
    """Return the scale of each row, [rows, 1]: the value that the integer 1 stands for."""
    return values.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny * _MOST) / _MOST


def _integers(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).round_().clamp_(-_MOST, _MOST).to(torch.int8)
