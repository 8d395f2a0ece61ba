"""GPT-3 (Brown et al. 2020): its sizes, for a model that no machine here could hold."""

from __future__ import annotations

from torch import nn

from orchestray.trainers.tasks.python_source import PythonSource
from orchestray.trainers.tasks.transformer import Block, Embedding

_WIDTH, _DEPTH, _HEADS, _VOCABULARY, _CONTEXT = 12_288, 96, 96, 50_257, 2048
"""Brown et al., "Language Models are Few-Shot Learners", table 2.1; its tokens are those of GPT-2."""


class Gpt3(PythonSource):
    """A task whose model has the layers of GPT-3 175B; build it on the device `meta`, or have 700 GB."""

    def build_model(self) -> nn.Module:
        blocks = (Block(_WIDTH, _HEADS, 0.0) for _ in range(_DEPTH))
        head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        return nn.Sequential(Embedding(_VOCABULARY, _CONTEXT, _WIDTH, 0.0), *blocks, nn.LayerNorm(_WIDTH), head)
