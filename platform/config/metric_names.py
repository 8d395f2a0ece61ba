"""The direction of metrics by their names: `rmse` is better when lower, `val_accuracy` when higher."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Literal

Mode = Literal["max", "min"]

_LOWER = """
loss losses error errors err mse rmse nrmse rmsd msd mae mape smape mase wmape msle rmsle medae rse rae deviance
deviation perplexity ppl wer cer mer ter eer der nll xent crossentropy logloss bce ce bits bpb bpc bpd bpp bpw nats
latency duration delay runtime memory cost costs regret penalty distance divergence kl kld jsd fid kid lpips emd
brier ece mce crps residual residuals violation violations mistakes misclassified misclassification mismatch
fpr fnr far frr gap drop degradation incorrect wrong
"""
_HIGHER = """
accuracy acc top f1 f2 fbeta fscore fmeasure auc auroc auprc aupr aucpr rocauc prauc roc ap map precision recall
sensitivity specificity ppv npv tpr tnr r2 bleu sacrebleu chrf meteor rouge rougel rougelsum iou miou giou jaccard dice
reward rewards return returns success successes win wins hit hits mcc kappa ndcg dcg mrr psnr ssim msssim snr sdr sisdr
similarity correlation pearson spearman spearmanr kendall likelihood elbo gain improvement reduction profit revenue
throughput speedup explained match matches correct pass
"""
LOWER = frozenset(_LOWER.split())
"""Words of metrics that are better when lower."""
HIGHER = frozenset(_HIGHER.split())
"""Words of metrics that are better when higher."""
_WEAK = frozenset({"score", "scores"})
"""Words of metrics that are better when higher unless another word says otherwise: `brier_score`."""

_TURNS = frozenset({"neg", "negative", "negated", "minus", "inverse"})
"""Words that turn the direction round: `neg_mean_squared_error`."""

_ENDS: dict[str, Mode] = {
    "loss": "min",
    "losses": "min",
    "error": "min",
    "errors": "min",
    "perplexity": "min",
    "accuracy": "max",
}
"""Directions of words that end like this: `valloss`."""


def mode_of_metric(name: str, lower_is_better: Collection[str] | None = None) -> Mode | None:
    """Return whether a metric is to be maximised or minimised, by its name; None if that does not say it.

    The words of the name count: the last one that is known decides, as in `accuracy_loss`.

    Args:
        name: name of the metric.
        lower_is_better: names that a task lists as better when lower; None: it has no list. A metric of a task with a
            list is better when higher if it is not listed and its name says nothing else.
    """
    if lower_is_better is not None and name in lower_is_better:
        return "min"
    found: Mode | None = None
    weak: Mode | None = None
    is_turned = False
    previous = ""
    for word in _words(name):
        is_turned ^= word in _TURNS
        weak = "max" if word in _WEAK else weak
        found = _mode_of_word(word, previous) or found
        previous = word
    found = found or weak
    if found is None:
        return None if lower_is_better is None else "max"
    return found if not is_turned else "min" if found == "max" else "max"


def _mode_of_word(word: str, previous: str) -> Mode | None:
    if word in LOWER or (word, previous) == ("entropy", "cross"):
        return "min"
    if word in HIGHER:
        return "max"
    return next((mode for end, mode in _ENDS.items() if word.endswith(end)), None)


def _words(name: str) -> Iterator[str]:
    """Yield the words of a name in lower case: of `valLoss_top5` these are val, loss and top."""
    for part in re.split(r"[^A-Za-z0-9]+", name):
        inside = re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+", part)
        for word in [part] if _is_known(part.lower()) else inside:
            yield word.lower() if _is_known(word.lower()) else word.lower().rstrip("0123456789")


def _is_known(word: str) -> bool:
    return word in LOWER or word in HIGHER or word in _WEAK or word in _TURNS
