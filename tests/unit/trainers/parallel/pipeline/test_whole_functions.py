"""Models of transformers are cut between their blocks, and the stages are the whole model bit for bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.pipeline.cutting import layers_of

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "AutoModelForCausalLM",
        {"n_inner": 32, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "llama": ("AutoModelForCausalLM", {}),
    "bert": (
        "AutoModelForSequenceClassification",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}


def built(kind: str, **more: Any) -> nn.Module:
    import transformers  # late: of the processes that collect this file, most do not run it

    auto, given = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **given, **more})
    model: nn.Module = getattr(transformers, auto).from_config(config).double().train()
    return model


def inputs_of(*, padded: bool) -> dict[str, Tensor]:
    ids = torch.arange(3, 24).reshape(3, 7)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", MODELS)
def test_stages_between_the_blocks_are_the_whole_model_with_and_without_padding(kind: str) -> None:
    model = built(kind)
    layers = layers_of(None, model, 6, inputs=inputs_of(padded=False))
    blocks = [name for name in layers.names if name.split(".")[-1] in "012"]
    assert len(blocks) == 3
    stages = [layers.stage(start, stop) for start, stop in pairwise(range(len(layers) + 1))]
    for padded in (False, True, False):
        inputs = inputs_of(padded=padded)
        whole = model(**inputs)
        wanted = torch.autograd.grad(whole["logits"].square().mean(), list(model.parameters()), allow_unused=True)
        values: Any = layers.form.tensors(inputs)
        for stage in stages:
            values = stage(*values)
        assert type(values[0]) is type(whole)
        assert torch.equal(values[0].logits, whole.logits)
        found = torch.autograd.grad(values[0].logits.square().mean(), list(model.parameters()), allow_unused=True)
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)


def test_a_cache_of_keys_and_values_is_named_as_the_reason() -> None:
    layers = layers_of(None, built("gpt2", use_cache=True), 6, inputs=inputs_of(padded=False))
    with pytest.raises(
        ConfigError, match=r"a DynamicCache takes part in its computation \(set the model's config\.use_cache"
    ):
        layers.check_count(9)


def test_other_models_make_their_masks_as_before() -> None:
    model = built("bert")
    before = model(**inputs_of(padded=True)).logits
    layers_of(None, model, 6, inputs=inputs_of(padded=True))
    assert torch.equal(model(**inputs_of(padded=True)).logits, before)
