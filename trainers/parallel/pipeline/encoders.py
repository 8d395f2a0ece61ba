"""torch's stack of transformer layers, called layer by layer: its own `forward`
reads values that tracing does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules import transformer


def call_layers(
    record: Callable[..., fx.Proxy],
    encoder: nn.Module,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Do what `nn.TransformerEncoder.forward` does without padding and without its fast path.

    Args:
        record: adds a call of a function with arguments to the graph.
        encoder: the encoder whose layers are called.
        src: input, like the other arguments the same as for `nn.TransformerEncoder.forward`.

    Raises:
        NotImplementedError: there is padding; the result would depend on its position.
    """
    if src_key_padding_mask is not None:
        raise NotImplementedError("an nn.TransformerEncoder with padding is not called layer by layer")
    layers = cast(Any, encoder).layers
    causal: Any = is_causal is True
    if mask is not None:
        mask = record(float_mask, mask, src)
        causal = record(causal_hint, mask, is_causal, src, layers[0].self_attn.batch_first)
    for layer in layers:
        src = layer(src, src_mask=mask, is_causal=causal, src_key_padding_mask=None)
    norm = cast(Any, encoder).norm
    return src if norm is None else norm(src)


def float_mask(mask: Tensor, src: Tensor) -> Tensor:
    """Return the mask in the form that is added to the attention's logits."""
    found = functional._canonical_mask(
        mask=mask, mask_name="mask", other_type=None, other_name="", target_type=src.dtype, check_other=False
    )
    return cast(Tensor, found)


def causal_hint(mask: Tensor, is_causal: bool | None, src: Tensor, batch_first: bool) -> bool:
    """Return True if the mask is causal, by the test that the encoder itself uses."""
    size = transformer._get_seq_len(src, batch_first)
    return bool(transformer._detect_is_causal_mask(mask, is_causal, size))
