"""Keys of `train` for programs that obey some of them: a key that is set and not obeyed is found."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from orchestray.trainers.config.schema import TrainSection

_ALWAYS = frozenset({"deterministic", "float32_matmul_precision", "cudnn_benchmark"})
"""Keys of the process's arithmetic, which every program sets before it builds a task."""


def not_obeyed(train: TrainSection, obeyed: Collection[str], reasons: Mapping[str, str], otherwise: str) -> list[str]:
    """Return a sentence for each key that is set, and that a program does not obey.

    Args:
        train: the section.
        obeyed: keys that the program obeys, beside those of its arithmetic.
        reasons: reasons why it does not obey others, by key.
        otherwise: reason for keys without one.
    """
    fields = type(train).model_fields
    others = [key for key in fields if key not in _ALWAYS and key not in obeyed]
    wrong = [key for key in others if getattr(train, key) != fields[key].get_default()]
    return [f"train.{key}: {reasons.get(key, otherwise)}" for key in wrong]
