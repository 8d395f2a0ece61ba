"""The importance of each searched key for the objective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from orchestray.search.methods.conditions import ABSENT
from orchestray.search.results.figures import Goal, Line, cell, values_of
from orchestray.search.results.schema import is_untrained

_MIN_TRIALS = 8
_MAX_TRIALS = 1000
_NUM_TREES = 64
_NUM_REPEATS = 10
_LARGEST_TARGET = 1e100
"""Largest objective that the forest sees: larger ones, which some report for a failure, overflow when squared."""
_LARGEST_INPUT = float(np.finfo(np.float32).max)
"""Largest value of a key that it sees: scikit-learn's trees compare in float32."""


def importance(lines: Sequence[Line], goal: Goal, log_keys: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the importance of each key, the most important first: [{"key", "importance", "spread"}]; they sum to 1.

    A random forest (Breiman, 2001) is fitted to predict the objective from the values. The importance of a key is the
    loss in accuracy when its values are shuffled among the trials (permutation importance; section 10 there). Empty for
    fewer than 8 trials, or where nothing differs. Trials that were not trained do not count. Of more than 1,000 trials,
    only the last 1,000 count.

    Args:
        lines: lines of `trials.jsonl`.
        goal: the objective.
        log_keys: keys searched on a logarithmic scale.
    """
    judged = [line for line in lines if line.get("objective") is not None and not is_untrained(line)][-_MAX_TRIALS:]
    target = np.array([goal.sign * float(line["objective"]) for line in judged])
    target = np.clip(target, -_LARGEST_TARGET, _LARGEST_TARGET)
    chosen = [values_of(line) for line in judged]
    logs = set(log_keys)
    columns = {
        key: _column([values.get(key, ABSENT) for values in chosen], key in logs)
        for key in dict.fromkeys(key for values in chosen for key in values)
    }
    columns = {key: column for key, column in columns.items() if np.ptp(column) > 0}
    if len(judged) < _MIN_TRIALS or not columns or np.ptp(target) == 0:
        return []
    inputs = np.clip(np.column_stack(list(columns.values())), -_LARGEST_INPUT, _LARGEST_INPUT)
    means, spreads = _permuted(inputs, target)
    total = float(means.sum())
    if total <= 0:
        return []
    found = [
        {"key": key, "importance": float(mean) / total, "spread": float(spread) / total}
        for key, mean, spread in zip(columns, means, spreads, strict=True)
    ]
    return sorted(found, key=lambda entry: -entry["importance"])


def _permuted(inputs: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each column's importance; inputs: [trials, keys], target: [trials]."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    forest = RandomForestRegressor(n_estimators=_NUM_TREES, min_samples_leaf=2, random_state=0).fit(inputs, target)
    found = permutation_importance(forest, inputs, target, n_repeats=_NUM_REPEATS, random_state=0)
    return np.maximum(found.importances_mean, 0.0), found.importances_std


def _column(values: Sequence[Any], is_log: bool) -> np.ndarray:
    """Return values as numbers: themselves, or their ranks among the distinct values.

    Trials that do not have the key (`ABSENT`) get the median of the others: among them it makes no difference.
    """
    there = [value for value in values if value is not ABSENT]
    are_flags = {isinstance(value, bool) for value in there}
    if len(are_flags) == 1 and all(isinstance(value, int | float) for value in there):
        numbers = [math.log(value) if is_log and value > 0 else float(value) for value in there]
        usual, rest = float(np.median(numbers)), iter(numbers)
        return np.array([usual if value is ABSENT else next(rest) for value in values])
    texts = ["-" if value is ABSENT else str(cell(value)) for value in values]
    order: Mapping[str, int] = {text: place for place, text in enumerate(sorted(set(texts)))}
    return np.array([float(order[text]) for text in texts])
