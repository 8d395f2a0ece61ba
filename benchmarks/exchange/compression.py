"""Cost and size of a 16 MB gradient under each compressor on one thread, against sending it as it is over 1 Gbit/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness import benchmark

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.trainers.compression.base import Compressor

_LINK_BITS_PER_S = 1e9
# A residual network's layers, in order; 4.2 million weights.
_SHAPES = (
    *((64, 3, 7, 7), (64,), (128, 64, 3, 3), (128,), (256, 128, 3, 3), (256,)),
    *((512, 256, 3, 3), (512,), (512, 512, 3, 3), (512,), (1000, 274), (1000,)),
)
_SETTINGS: dict[str, dict[str, Any]] = {
    "float16": {"type": "float16"},
    "float16, stochastic": {"type": "float16", "rounding": "stochastic"},
    "bfloat16": {"type": "bfloat16"},
    "bfloat16, stochastic": {"type": "bfloat16", "rounding": "stochastic"},
    "qsgd, 8 bits": {"type": "qsgd", "bits": 8},
    "qsgd, 4 bits": {"type": "qsgd"},
    "qsgd, 4 bits, error feedback": {"type": "qsgd", "error_feedback": True},
    "qsgd, 4 bits, Huffman": {"type": "qsgd", "huffman": True},
    "terngrad": {"type": "terngrad"},
    "terngrad, error feedback": {"type": "terngrad", "error_feedback": True},
    "terngrad, Huffman": {"type": "terngrad", "huffman": True},
    "onebit": {"type": "onebit"},
    "onebit, by row": {"type": "onebit", "scale": "row"},
    "topk 1 %": {"type": "topk", "ratio": 0.01},
    "threshold, about 1 %": {"type": "threshold", "threshold": 0.02},
    "adaptive_threshold 1 %": {"type": "adaptive_threshold", "ratio": 0.01},
    "dgc 0.1 %": {"type": "dgc", "ratio": 0.001},
    "dgc in its warm-up, 25 %": {"type": "dgc", "ratio": 0.001, "warmup_steps": 1000},
    "powersgd, rank 2": {"type": "powersgd"},
}
_WIRE_GOALS = {"onebit": 30, "onebit, by row": 30, "terngrad": 15, "qsgd, 4 bits": 7, "dgc 0.1 %": 270}


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    import torch

    from orchestray.trainers.compression.registry import make_compressor

    torch.set_num_threads(1)
    rounds = options.rounds(15, quick=2)
    gradients = [_gradient(seed) for seed in range(2)]
    dense_bytes = sum(tensor.nbytes for tensor in gradients[0])
    limit_ms = dense_bytes * 8 / _LINK_BITS_PER_S * 1e3
    report.settings = {"rounds": rounds, "threads": 1, "bytes": dense_bytes, "tensors": len(_SHAPES), "type": "float32"}
    sides = {}
    for name, settings in _SETTINGS.items():
        sender, reader = (make_compressor(**settings, worker=worker, num_workers=2) for worker in range(2))
        sender.init(gradients[0])
        reader.init(gradients[0])
        sides[name] = _Side(sender, reader, gradients)
        sides[name].turn()  # the first one fills the caches
        sides[name].forget()
    turns: dict[str, Callable[[], None]] = {name: side.turn for name, side in sides.items()}
    benchmark.alternate(turns, rounds, benchmark.say)
    rows = []
    for name, side in sides.items():
        both = [a + b for a, b in zip(side.encode_ms, side.decode_ms, strict=True)]
        encode = report.add(f"{name}: encode", "ms", side.encode_ms)
        decode = report.add(f"{name}: decode", "ms", side.decode_ms)
        total = report.add(f"{name}: encode + decode", "ms", both)
        ratio = dense_bytes / side.message_bytes
        rows.append(
            [
                name,
                f"{side.message_bytes:,}",
                f"{ratio:.3g}",
                f"{encode.median:.1f}",
                f"{decode.median:.1f}",
                f"{total.median:.1f}",
                f"{total.median + limit_ms / ratio:.1f}",
            ]
        )
        report.goal(f"{name}: encode + decode, one thread", total.median, limit_ms, "ms")
        if name in _WIRE_GOALS:
            report.goal(f"{name}: bytes / dense bytes", 1 / ratio, 1 / _WIRE_GOALS[name])
    report.table(
        ["compressor", "bytes", "dense / bytes", "encode ms", "decode ms", "both ms", "with 1 Gbit/s, ms"], rows
    )
    report.notes += [
        f"Dense, the gradient is {dense_bytes:,} bytes long, {limit_ms:.0f} ms on a link of 1 Gbit/s: the limit above.",
        "With 1 Gbit/s: encoding, sending the message at that rate, decoding, one after the other.",
        (
            "Values are normal, of a size drawn for every weight and every layer (heavy tails, as gradients have). "
            "Compressors of few values send what error feedback has added up by then."
        ),
    ]


class _Side:
    """A compressor at work: one sends, another reads."""

    def __init__(self, sender: Compressor, reader: Compressor, gradients: list[list[Tensor]]) -> None:
        self._sender, self._reader, self._gradients = sender, reader, gradients
        self._step = 0
        self.encode_ms: list[float] = []
        self.decode_ms: list[float] = []
        self.message_bytes = 0

    def turn(self) -> None:
        self._step += 1
        gradient = self._gradients[self._step % len(self._gradients)]
        began_s = time.perf_counter()
        message = self._sender.compress(gradient, step=self._step)
        encoded_s = time.perf_counter()
        self._reader.decompress(message)
        decoded_s = time.perf_counter()
        self.encode_ms.append((encoded_s - began_s) * 1e3)
        self.decode_ms.append((decoded_s - encoded_s) * 1e3)
        self.message_bytes = message.numel()

    def forget(self) -> None:
        self.encode_ms, self.decode_ms = [], []


def _gradient(seed: int) -> list[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [drawn(*shape) * drawn(*shape).exp() * 1e-3 * drawn().exp() for shape in _SHAPES]


if __name__ == "__main__":
    benchmark.run("compression", __doc__, measure)
