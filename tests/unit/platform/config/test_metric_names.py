"""The direction of a metric follows from the words of its name."""

from __future__ import annotations

import pytest

from orchestray.platform.config.metric_names import HIGHER, LOWER, mode_of_metric

MIN = """
loss val_loss valLoss valloss bits_per_byte bitsPerByte RMSE test/rmse mae MAPE perplexity val-ppl wer
word_error_rate nll negative_log_likelihood brier_score accuracy_loss cross_entropy cross.entropy members.0.loss
absolute_error latency_ms top5_error F1_error
"""
MAX = """
accuracy ValAccuracy val_acc acc@1 top5 f1 F1Score f1-score auc AUROC roc_auc precision recall@5 r2 R2 bleu rouge1
rouge_l IoU mIoU dice reward score log_likelihood neg_mean_squared_error neg_loss loss_accuracy error_reduction mAP50
exact_match pass@1
"""


@pytest.mark.parametrize(("names", "mode"), [(MIN, "min"), (MAX, "max")])
def test_the_words_of_a_name_say_its_direction(names: str, mode: str) -> None:
    assert {name: mode_of_metric(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


@pytest.mark.parametrize("name", ["closeness", "q", "rate", "energy", "entropy", "mean_rank", "true_negative_rate", ""])
def test_a_name_without_a_known_word_says_nothing(name: str) -> None:
    assert mode_of_metric(name) is None


def test_no_word_has_both_directions() -> None:
    assert not LOWER & HIGHER


def test_the_list_of_a_task_decides_and_says_the_rest_where_names_say_nothing() -> None:
    listed = ("closeness", "accuracy")
    given = ("closeness", "accuracy", "energy", "rmse", "f1")
    assert [mode_of_metric(name, listed) for name in given] == ["min", "min", "max", "min", "max"]
