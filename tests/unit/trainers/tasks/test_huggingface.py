"""Models of Hugging Face's transformers: trained as plain PyTorch does, saved as they are read."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from orchestray.platform.data.source import open_source
from orchestray.platform.errors import DataError, TaskError
from orchestray.platform.run.model_files import save_model
from orchestray.serving.models.load import load_served_model
from orchestray.trainers.core.initial_model import InitialModel
from orchestray.trainers.core.rng import building
from orchestray.trainers.saved.initial_weights import InitialisedTask
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.tasks.huggingface import HuggingFace
from support.layouts import layout_settings, train_laid_out
from support.served import written_run
from support.training import stream_of

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "runs",
    "sits",
    "eats",
    "big",
    "small",
    "red",
    "blue",
    "house",
    "tree",
    "sky",
    "over",
    "under",
]
VOCABULARY = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": len(VOCABULARY),
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 3,
    "eos_token_id": 3,
}
CONFIGS = {"sequence_classification": BERT, "masked_lm": BERT, "causal_lm": GPT2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2, accumulate 2": {"network": {"data": 2}, "accumulate": 2},
    "ZeRO-3": {"network": {"data": 2}, "exchange": {"shard": "parameters"}},
    "pipeline": {"network": {"pipeline": 2, "microbatches": 2, "split": "equal"}},
    "recompute blocks": {"network": {"data": 2}, "recompute": "blocks"},
    "recompute sqrt": {"network": {"data": 2}, "recompute": "sqrt"},
    "tensor": {"network": {"tensor": 2}},
}
STEPS = 2


def transformers() -> Any:
    """Return the package, imported late: of the processes that collect this file, most do not run it."""
    return importlib.import_module("transformers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tokenizer and a table of texts."""
    folder = tmp_path_factory.mktemp("texts")
    made = Tokenizer(models.WordLevel(VOCABULARY, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    kinds = {"pad": "PAD", "unk": "UNK", "cls": "CLS", "sep": "SEP", "mask": "MASK", "eos": "SEP"}
    names = {f"{kind}_token": f"[{name}]" for kind, name in kinds.items()}
    transformers().PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(2, 12))) for _ in range(40)]
    labels = ["yes" if "cat" in text else "no" for text in texts]
    pq.write_table(pa.table({"text": texts, "label": labels}), folder / "texts.parquet")
    return folder


def task_of(place: Path, kind: str, **arguments: Any) -> HuggingFace:
    given = {"model": CONFIGS[kind], "tokenizer": str(place / "tokenizer"), "max_length": 16, **arguments}
    return HuggingFace(path=str(place / "texts.parquet"), kind=kind, **given)


@cache
def plain(place: Path, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train by plain PyTorch, with the loss that the model of transformers computes itself."""
    task = task_of(place, kind)
    settings = layout_settings({"microbatches": None}, steps=STEPS, batch_size=8)
    with building(settings.seed):
        model: Any = task.build_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with stream_of(task, settings)("train", 0).epoch(0) as shares:
        for share in list(shares)[:STEPS]:
            batch = share.micro_batches[0].batch
            inputs, labels = batch["inputs"], batch["targets"]
            if kind == "causal_lm":  # transformers moves labels by itself
                labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            loss = model(**inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


# The two kinds of BERT differ in their last layers alone, which matters where a layout divides layers.
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("sequence_classification", layout) for layout in LAYOUTS if layout != "tensor"),
        *(("masked_lm", layout) for layout in ("ZeRO-3", "pipeline", "tensor")),
        *(("causal_lm", layout) for layout in LAYOUTS),
    ],
)
def test_a_model_of_transformers_trains_as_in_a_single_process(place: Path, kind: str, layout: str) -> None:
    config = dict(LAYOUTS[layout])
    network = {"microbatches": None, **config.pop("network")}
    settings = layout_settings(network, config.pop("exchange", None), steps=STEPS, batch_size=8, **config)
    found = train_laid_out(lambda: task_of(place, kind), settings)
    losses, weights = plain(place, kind)
    # The loss of transformers' causal language models is computed in float32 whatever the model's precision.
    tolerance = 1e-6 if kind == "causal_lm" else 1e-10
    assert found.losses == pytest.approx(losses, rel=tolerance)
    assert all(torch.allclose(found.weights[name], weights[name], atol=tolerance) for name in found.weights)


def saved(task: HuggingFace, folder: Path) -> torch.nn.Module:
    """Save a model with the files beside it, as a run does at its end; return the model."""
    with building(1):
        model = task.build_model()
    tensors = dict(model.state_dict())
    save_model(folder, tensors, {"task": {}}, beside=task.export_files(tensors))
    return model.eval()


def test_a_trained_folder_is_read_by_from_pretrained_and_starts_another_run(place: Path, tmp_path: Path) -> None:
    model = saved(task_of(place, "sequence_classification"), tmp_path / "model")
    tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path / "model")
    inputs = tokenizer(["the cat runs", "a dog"], padding=True, return_tensors="pt")
    read = transformers().AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert read.config.id2label == {0: "no", 1: "yes"}
    assert torch.equal(read(**inputs).logits, model(**inputs).logits)
    again = task_of(place, "sequence_classification", model=str(tmp_path / "model"), tokenizer=None)
    assert torch.equal(again.build_model().eval()(**inputs).logits, model(**inputs).logits)


def test_a_model_is_float32_when_built_and_rebuilt_whatever_its_config_says(place: Path, tmp_path: Path) -> None:
    model: Any = saved(task_of(place, "sequence_classification"), tmp_path / "model")
    model.config.dtype = torch.bfloat16
    model.bfloat16().save_pretrained(tmp_path / "half")
    for given in (str(tmp_path / "half"), {**BERT, "dtype": "bfloat16"}):
        task = task_of(place, "sequence_classification", model=given)
        built: Any = task.build_model()
        again = task_of(place, "sequence_classification", **json.loads(json.dumps(task.rebuild_arguments())))
        assert {p.dtype for each in (built, again.build_model()) for p in each.parameters()} == {torch.float32}
        config = json.loads(task.export_files(built.state_dict())["config.json"])
        assert config["dtype"] == "float32"


def test_a_tokenizer_with_several_chat_templates_is_saved_with_all_of_them(place: Path, tmp_path: Path) -> None:
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer = transformers().AutoTokenizer.from_pretrained(place / "tokenizer", chat_template=templates)
    tokenizer.save_pretrained(tmp_path / "chat")
    assert (tmp_path / "chat" / "additional_chat_templates").is_dir()
    saved(task_of(place, "causal_lm", tokenizer=str(tmp_path / "chat")), tmp_path / "model")
    assert transformers().AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == templates


def test_gpt2_classifies_batches_of_texts_of_different_lengths(place: Path) -> None:
    task = task_of(place, "sequence_classification", model=GPT2)
    model = task.build_model().eval()
    rows = task.dataset("train")
    together = model(**task.to_batch(rows.slice(0, 4))["inputs"]).logits
    alone = [model(**task.to_batch(rows.slice(row, 1))["inputs"]).logits for row in range(4)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-6)
    rebuilt = task_of(place, "sequence_classification", **task.rebuild_arguments()).build_model()
    assert rebuilt.config.pad_token_id == VOCABULARY["[PAD]"]


def test_labels_may_be_encoded_as_a_dictionary(place: Path, tmp_path: Path) -> None:
    labels = pa.array(["yes", "no"] * 6)
    pq.write_table(pa.table({"text": ["a cat"] * 12, "label": labels.dictionary_encode()}), tmp_path / "t.parquet")
    task = HuggingFace(BERT, str(tmp_path / "t.parquet"), tokenizer=str(place / "tokenizer"))
    rows = task.dataset("train")
    assert task.classes == ["no", "yes"]
    assert task.to_batch(rows)["targets"].tolist() == [int(label == "yes") for label in rows["label"].to_pylist()]


@pytest.mark.parametrize(
    ("column", "values"), [("label", ["yes", None]), ("label", [0.5, None]), ("text", ["a cat", None])]
)
def test_nulls_are_refused_by_name(place: Path, tmp_path: Path, column: str, values: list[Any]) -> None:
    whole = {"text": ["a cat", "a dog"], "label": ["yes", "no"]}
    pq.write_table(pa.table({**whole, column: values}), tmp_path / "t.parquet")
    task = HuggingFace(BERT, str(tmp_path / "t.parquet"), tokenizer=str(place / "tokenizer"))
    task.build_model()
    with pytest.raises(DataError, match=rf"column '{column}' has 1 null\(s\)"):
        task.to_batch(pq.read_table(tmp_path / "t.parquet"))


def test_tied_weights_are_saved_and_read(place: Path, tmp_path: Path) -> None:
    model = saved(task_of(place, "causal_lm"), tmp_path / "model")
    ids = torch.tensor([[5, 6, 7]])
    read = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(read(ids).logits, model(ids).logits)
    started = InitialisedTask(
        task_of(place, "causal_lm"), InitialModel(init_from=str(tmp_path / "model"))
    ).build_model()
    assert torch.equal(started.eval()(ids).logits, model(ids).logits)


def test_an_adapter_trains_alone_and_is_saved_as_peft_reads_it(place: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    base = saved(task_of(place, "sequence_classification"), tmp_path / "base")
    lora = {"r": 4, "target_modules": ["query", "value"]}
    task = task_of(place, "sequence_classification", model=str(tmp_path / "base"), lora=lora)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    settings = layout_settings({"data": 2, "microbatches": None}, steps=2, batch_size=8, precision="float32")
    found = train_laid_out(lambda: task, settings).weights
    kept = [name for name in before if f"base_model.model.{name}" in found and not name.startswith("classifier")]
    assert len(kept) > 20
    assert all(torch.equal(found[f"base_model.model.{name}"], before[name]) for name in kept)
    files = task.export_files(found)
    assert any("classifier" in name for name in load(files["adapter_model.safetensors"]))
    save_model(tmp_path / "adapter", found, {"task": {}}, beside=files)
    trained: Any = task.build_model()
    trained.load_state_dict(found)
    assert "classifier" in {name.split(".")[2] for name, p in trained.named_parameters() if p.requires_grad}
    inputs = {"input_ids": torch.tensor([[2, 7, 9, 3]])}
    read = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(read(**inputs).logits, trained.eval()(**inputs).logits)


@pytest.mark.parametrize("lora", [{"rank": 4}, {"target_modules": ["nosuch"]}], ids=str)
def test_an_adapter_that_peft_refuses_is_said(place: Path, lora: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=rf"task\.lora: .*{next(iter(lora))}"):
        task_of(place, "sequence_classification", lora=lora).build_model()


@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm"])
def test_texts_are_padded_on_the_right_whatever_the_tokenizer_does_by_itself(
    place: Path, tmp_path: Path, kind: str
) -> None:
    left = transformers().AutoTokenizer.from_pretrained(place / "tokenizer", padding_side="left")
    left.save_pretrained(tmp_path / "left")
    assert transformers().AutoTokenizer.from_pretrained(tmp_path / "left").padding_side == "left"
    batches = [
        task.to_batch(task.dataset("train").slice(0, 6))
        for task in (task_of(place, kind), task_of(place, kind, tokenizer=str(tmp_path / "left")))
    ]
    assert torch.equal(batches[0]["targets"], batches[1]["targets"])
    assert torch.equal(batches[0]["inputs"]["attention_mask"], batches[1]["inputs"]["attention_mask"])


def test_a_decoded_text_gives_the_logits_of_its_batch_and_its_class_is_named(place: Path) -> None:
    task = task_of(place, "sequence_classification")
    texts = ["the cat runs", "a big red house"]
    rows = pa.table({"text": texts, "label": pa.array([task.classes[0]] * 2)})
    model = task.build_model().eval()
    assert task.decode is not None
    with torch.no_grad():
        together = model(**task.to_batch(rows)["inputs"]).logits
        for text, wanted in zip(texts, together, strict=True):
            sample = task.decode(text)
            assert {len(value) for value in sample.values()} == {len(text.split()) + 2}
            logits = model(**{name: value[None] for name, value in sample.items()}).logits[0]
            torch.testing.assert_close(logits, wanted)
            assert task.encode is not None
            answer = task.encode(logits)
            assert answer["class"] == str(task.classes[int(wanted.argmax())])
            assert sum(answer["probabilities"].values()) == pytest.approx(1.0)
            assert all(torch.equal(task.decode(text.encode())[name], value) for name, value in sample.items())
    assert task.decode({"input_ids": [1]}) == {"input_ids": [1]}
    with pytest.raises(ValueError, match="wanted a text"):
        task.decode(["a", "b"])


@pytest.mark.parametrize("kind", ["sequence_classification", "causal_lm"])
def test_an_endpoint_answers_texts_of_any_length_in_one_batch_as_each_alone(
    place: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"model": CONFIGS[kind], "tokenizer": str(place / "tokenizer"), "max_length": 16, "kind": kind}
    task = {"type": "huggingface", "path": str(place / "texts.parquet"), **given}
    run = load_run(written_run(tmp_path, "texts", task=task))
    served = load_served_model(run.path)
    assert "though it takes the mask" not in caplog.text
    decode: Any = run.load_task().decode  # type: ignore[attr-defined]
    samples = [
        served.signature.parse({name: value.numpy() for name, value in decode(text).items()})
        for text in ("the cat", "a big red house", "sits", "the small blue dog runs over the tree under the sky")
    ]
    assert len({len(sample["input_ids"]) for sample in samples}) == 4
    for answer, sample in zip(served.run(samples), samples, strict=True):
        (alone,) = served.run([sample])
        assert isinstance(answer, dict)
        assert isinstance(alone, dict)
        np.testing.assert_allclose(answer["logits"], alone["logits"], atol=1e-5)
        assert alone["logits"].shape[:-1] == (() if kind == "sequence_classification" else sample["input_ids"].shape)


def test_packing_joins_all_texts_and_loses_only_the_end(place: Path) -> None:
    task = task_of(place, "causal_lm", packing=True, max_length=8)
    rows = open_source(task.dataset("train"), split="train").num_rows
    texts = task_of(place, "causal_lm").dataset("train")["text"].to_pylist()
    tokenizer = transformers().AutoTokenizer.from_pretrained(place / "tokenizer")
    assert rows == sum(len(ids) + 1 for ids in tokenizer(texts)["input_ids"]) // 8
    batch = task.to_batch(task.dataset("train").slice(0, 3))
    assert batch["inputs"]["input_ids"].shape == (3, 8)
    assert torch.equal(batch["targets"][:, :-1], batch["inputs"]["input_ids"][:, 1:])


def test_the_perplexity_of_a_model_that_knows_nothing_is_infinite(place: Path) -> None:
    totals = {"loss": torch.tensor(4000.0), "hits": torch.tensor(1), "tokens": torch.tensor(4)}
    assert task_of(place, "causal_lm")._judge(totals) == {"perplexity": float("inf"), "accuracy": 0.25}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_example_has_the_form_of_the_longest_sample(place: Path, kind: str) -> None:
    task = task_of(place, kind)
    example, made = task.example_inputs(), task.to_batch(pa.table({"text": ["cat " * 20], "label": ["yes"]}))["inputs"]
    assert {name: (value.shape, value.dtype) for name, value in example.items()} == {
        name: (value.shape[1:], value.dtype) for name, value in made.items()
    }
    ids = task_of(place, kind, text="input_ids", tokenizer=None).example_inputs()
    assert {name: list(value.shape) for name, value in ids.items()} == {"input_ids": [16], "attention_mask": [16]}


def test_frozen_parameters_stay_and_a_pattern_without_a_parameter_is_refused(place: Path) -> None:
    model = task_of(place, "sequence_classification", freeze=["bert.*"]).build_model()
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"classifier"}
    with pytest.raises(TaskError, match=r"task\.freeze: no parameter is called 'encoder"):
        task_of(place, "sequence_classification", freeze=["encoder.*"]).build_model()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": "bert-base-uncased"}, "nothing is fetched"),
        ({"model": {"hidden_size": 8}}, "needs model_type"),
        ({"text": "words"}, "no column 'words' in .*; it has text, label"),
        ({"tokenizer": None}, "texts need a tokenizer"),
        ({"packing": True}, "task.kind: causal_lm"),
        ({"packing": True, "kind": "causal_lm", "text": ["text", "label"]}, "joins the texts of one column"),
    ],
)
def test_what_is_missing_is_said(place: Path, arguments: dict[str, Any], text: str) -> None:
    def use() -> None:
        task = task_of(place, **{"kind": "sequence_classification", **arguments})
        task.build_model()
        task.to_batch(task.dataset("train").slice(0, 2))

    with pytest.raises(TaskError, match=text):
        use()
