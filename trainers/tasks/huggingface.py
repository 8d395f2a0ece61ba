"""Models of Hugging Face's `transformers` on a table of texts: classification, causal and masked language models.

Nothing is fetched: a model is a folder on this machine, or a configuration with fresh weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.data.by_length import ByLength
from orchestray.platform.data.retries import read_patiently
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import TaskError
from orchestray.trainers.tasks.classification import named_classes
from orchestray.trainers.tasks.parquet_files import check_columns, class_indices, open_files, part
from orchestray.trainers.tasks.texts import IGNORED, Texts, imported

if TYPE_CHECKING:
    from orchestray.platform.task import Batch

_CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
}
_TASK_TYPES = {"sequence_classification": "SEQ_CLS", "causal_lm": "CAUSAL_LM"}
"""Names that peft has for some of them."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


class HuggingFace:
    """A model of `transformers` with its tokenizer, on a Parquet table of texts or of token ids.

    Args:
        model: folder with `config.json`, and weights if it is to start from them; or a configuration
            (`{model_type: bert, hidden_size: 64, ...}`) with fresh weights.
        path: file, directory or `pyarrow.fs` URI of the training table.
        kind: "sequence_classification", "causal_lm" or "masked_lm".
        text: column of texts, or two for pairs; or a column `input_ids` of lists of token ids, without a tokenizer.
        label: column of classes (whole numbers or text), or of floating-point numbers for regression.
        tokenizer: folder of the tokenizer; None: that of the model, if `model` is a folder.
        max_length: most tokens of a sample; longer texts are cut.
        packing: join all texts and cut them into samples of `max_length` tokens, for a causal language model.
        group_by_length: train on batches of texts that are about as long as each other, so that little is padded.
        mask_probability: fraction of the tokens that a masked language model predicts, other ones in every epoch.
        lora: arguments of `peft.LoraConfig`; None: all parameters are trained.
        freeze: patterns of names of parameters that are not trained.
        validation_path: table to validate on; None: a part of the training table.
        validation_fraction: fraction of the training table in that part.
        classes: values of the classes, if already known.
    """

    lower_is_better = ("absolute_error", "perplexity")
    padding_mask = "attention_mask"

    def __init__(
        self,
        model: str | Mapping[str, Any],
        path: str,
        kind: str = "sequence_classification",
        text: str | Sequence[str] = "text",
        label: str = "label",
        tokenizer: str | None = None,
        max_length: int = 128,
        packing: bool = False,
        group_by_length: bool = False,
        mask_probability: float = 0.15,
        lora: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        validation_path: str | None = None,
        validation_fraction: float = 0.1,
        classes: Sequence[Any] | None = None,
    ) -> None:
        if kind not in _CLASSES:
            raise TaskError(f"task.kind must be one of {', '.join(_CLASSES)}, got {kind!r}")
        if packing and kind != "causal_lm":
            raise TaskError("task.packing: joins texts for a causal language model; set task.kind: causal_lm")
        if packing and group_by_length:
            raise TaskError("task.group_by_length: packing makes all samples equally long; set one of them to false")
        if isinstance(model, str) and not Path(model).is_dir():
            raise TaskError(
                f"task.model: there is no folder {model}: nothing is fetched while training. Download the model first "
                f"(hf download {Path(model).name} --local-dir FOLDER), or give a configuration"
            )
        self._model, self._kind = model, kind
        self._path, self._validation_path, self._validation_fraction = path, validation_path, validation_fraction
        self._texts = Texts(
            text,
            folder=tokenizer or (model if isinstance(model, str) else None),
            max_length=max_length,
            mask_probability=mask_probability,
        )
        if packing and len(self._texts.columns) > 1:
            raise TaskError("task.packing: joins the texts of one column; name one column in task.text")
        self._label, self._packing = label, packing
        self._group_by_length = group_by_length
        self._lora, self._freeze = lora, list(freeze)
        self._known_classes = None if classes is None else list(classes)
        speaks = kind != "sequence_classification"
        self.weight = self._count_targets if speaks else None
        self.final_metrics = self._judge if speaks else None
        self.decode = None if self._texts.are_ids else self._texts.decode
        self.example_request = None if self._texts.are_ids else self._texts.example_request
        self.encode = None if speaks else self._encode_class
        self.to_training_batch = self._texts.masked if kind == "masked_lm" else None

    # -- the model -----------------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Return the model, in training mode.

        Raises:
            TaskError: the folder has no model of this kind, or a package is missing.
        """
        transformers, config = imported("transformers"), self._config
        auto = getattr(transformers, _CLASSES[self._kind])
        try:
            if isinstance(self._model, str) and any((Path(self._model) / name).is_file() for name in _WEIGHTS):
                model = auto.from_pretrained(self._model, config=config, local_files_only=True, dtype=torch.float32)
            else:
                model = auto.from_config(config)
        except (OSError, ValueError) as error:
            raise TaskError(f"task.model: no model for {self._kind} can be made of it: {error}") from error
        model.config.use_cache = False  # a cache of keys and values is for writing texts
        if any("drop" in name and "att" in name and value for name, value in config.to_dict().items()):
            for module in model.modules():
                if type(module).__name__.endswith("Attention"):
                    module.draws_random = True  # by functions, so that it is seeded as nn.Dropout is
        if self._lora is not None:
            peft = imported("peft")
            try:  # by the type of the task peft knows the head, which is trained and saved too
                lora = peft.LoraConfig(**{"task_type": _TASK_TYPES.get(self._kind), **self._lora})
                model = peft.get_peft_model(model, lora)
            except (TypeError, ValueError) as error:
                raise TaskError(f"task.lora: {error}") from error
        self._freeze_parameters(model)
        trained: nn.Module = model.train()
        return trained

    @property
    def _config(self) -> Any:
        transformers = imported("transformers")
        more = {} if self._kind != "sequence_classification" else self._label_arguments()
        try:
            if isinstance(self._model, str):
                config = transformers.AutoConfig.from_pretrained(self._model, local_files_only=True, **more)
            else:
                given = dict(self._model)
                config = transformers.AutoConfig.for_model(given.pop("model_type"), **{**given, **more})
        except KeyError:
            raise TaskError("task.model: a configuration needs model_type, like bert or gpt2") from None
        except (OSError, ValueError) as error:
            raise TaskError(f"task.model: {error}") from error
        if more and self._texts.folder is not None and getattr(config, "pad_token_id", None) is None:
            # GPT-2 classifies by the last token before the padding.
            config.pad_token_id = self._texts.tokenizer.pad_token_id
        config.dtype = torch.float32  # whatever the folder's: `train.precision` says in what it is trained
        return config

    def _label_arguments(self) -> dict[str, Any]:
        classes = self.classes
        if classes is None:
            return {"num_labels": 1, "problem_type": "regression"}
        names = {index: str(value) for index, value in enumerate(classes)}
        return {"id2label": names, "label2id": {name: index for index, name in names.items()}}

    def _freeze_parameters(self, model: nn.Module) -> None:
        for pattern in self._freeze:
            found = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
            if not found:
                names = ", ".join(name for name, _ in list(model.named_parameters())[:4])
                raise TaskError(f"task.freeze: no parameter is called {pattern!r}; the first are {names}")
            for parameter in found:
                parameter.requires_grad_(False)

    # -- the data ------------------------------------------------------------------------------------------------------

    def dataset(self, split: str) -> pa.Table | ds.Dataset | ByLength:
        """Return the columns of a split, or samples of `max_length` joined tokens as `input_ids`.

        Raises:
            TaskError: a file or a column is missing.
            DataError: a file is damaged.
        """
        validation = split == "validation"
        columns = [*self._texts.columns, *([self._label] if self._kind == "sequence_classification" else [])]
        if self._validation_path is None:
            check_columns(columns, self._data.schema, self._path)
            rows = part(self._data, self._path, columns, self._validation_fraction, validation=validation)
        else:
            place = self._validation_path if validation else self._path
            data = open_files(self._validation_path, "task.validation_path") if validation else self._data
            check_columns(columns, data.schema, place)
            rows = data.replace_schema(pa.schema([data.schema.field(name) for name in columns]))
        if self._packing:
            return self._texts.packed(rows if isinstance(rows, pa.Table) else rows.to_table(), self._path)
        return ByLength(rows, self._texts.columns[0]) if self._group_by_length and not validation else rows

    def to_batch(self, columns: pa.Table) -> Batch:
        """Return `inputs`, a mapping of the model's arguments [samples, tokens], and the `targets`."""
        if self._kind == "masked_lm":
            return self._texts.masked(columns)
        inputs = self._texts.encoded(columns)
        if self._kind == "sequence_classification":
            return {"inputs": inputs, "targets": self._labels(columns[self._label])}
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        following = functional.pad(ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED), (0, 1), value=IGNORED)
        return {"inputs": inputs, "targets": following}

    def _labels(self, column: pa.ChunkedArray) -> Tensor:
        if self.classes is None:
            return to_tensor(column, self._label).to(torch.float32)
        return class_indices(column, self.classes, self._label)

    @cached_property
    def _data(self) -> ds.FileSystemDataset:
        return open_files(self._path, "task.path")

    @cached_property
    def classes(self) -> list[Any] | None:
        """Values of the classes, sorted; None: the label is a number to predict."""
        if self._known_classes is not None:
            return self._known_classes or None
        check_columns([self._label], self._data.schema, self._path)
        if pa.types.is_floating(self._data.schema.field(self._label).type):
            return None
        column = read_patiently(lambda: self._data.to_table(columns=[self._label]), self._path)[self._label]
        return sorted(pc.unique(column).drop_null().to_pylist())

    # -- loss and metrics ----------------------------------------------------------------------------------------------

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the cross-entropy (over the positions that count), or the mean squared error for regression."""
        logits, targets = outputs["logits"], batch["targets"]
        if self._kind != "sequence_classification":
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        if targets.is_floating_point():
            return functional.mse_loss(logits.squeeze(1), targets)
        return functional.cross_entropy(logits, targets)

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return the accuracy, the mean absolute error of a regression, or totals over the tokens that count."""
        logits, targets = outputs["logits"], batch["targets"]
        if self._kind != "sequence_classification":
            counts = targets != IGNORED
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            hits = (logits.argmax(-1) == targets)[counts].sum()
            return {"loss": loss, "hits": hits, "tokens": counts.sum()}
        if targets.is_floating_point():
            return {"absolute_error": (logits.squeeze(1) - targets).abs().mean()}
        return {"accuracy": (logits.argmax(-1) == targets).float().mean()}

    def _judge(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        tokens = max(1.0, float(totals["tokens"]))
        perplexity = (totals["loss"].double() / tokens).exp()  # inf if it is larger than any number
        return {"perplexity": float(perplexity), "accuracy": float(totals["hits"]) / tokens}

    @staticmethod
    def _count_targets(batch: Batch) -> float:
        return float((batch["targets"] != IGNORED).sum())

    def example_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of a sample of `max_length` tokens."""
        return self._texts.example()

    @property
    def padding(self) -> dict[str, int]:
        """Values with which the inputs of shorter texts are padded."""
        return {**dict.fromkeys(self.example_inputs(), 0), "input_ids": self._texts.pad_id}

    @property
    def max_length(self) -> int:
        """Most tokens of a sample."""
        return self._texts.max_length

    def _encode_class(self, logits: Tensor) -> Any:
        """Return the likeliest class and probabilities; of a regression the value."""
        return named_classes(logits, self.class_names) if self.class_names else logits[0]

    @property
    def class_names(self) -> list[Any]:
        """Values of the classes, in the order of the outputs; empty without classes."""
        return (self.classes or []) if self._kind == "sequence_classification" else []

    # -- what is kept --------------------------------------------------------------------------------------------------

    def rebuild_arguments(self) -> dict[str, Any]:
        """Return additional arguments with which the model is built without its folder and the data."""
        config = {k: v for k, v in self._config.to_diff_dict().items() if k not in ("transformers_version", "dtype")}
        model = {**config, "model_type": self._config.model_type}
        found = {"model": model, "tokenizer": self._texts.folder}
        return {**found, "classes": self.classes or []} if self._kind == "sequence_classification" else found

    def export_files(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Return the files beside the weights with which `from_pretrained` reads the folder of a trained model.

        With LoRA they are the adapter alone: its base is the folder that the run started from.
        """
        with tempfile.TemporaryDirectory() as place:
            if self._lora is not None:
                self._write_adapter(place, tensors)
            else:
                config = self._config
                config.architectures = [self._architecture]
                config.save_pretrained(place)
            self._texts.save(Path(place))
            files = [file for file in sorted(Path(place).rglob("*")) if file.is_file() and file.name != "README.md"]
            return {str(file.relative_to(place)): file.read_bytes() for file in files}

    @property
    def _architecture(self) -> str:
        auto = getattr(imported("transformers"), _CLASSES[self._kind])
        return str(auto._model_mapping[type(self._config)].__name__)

    def _write_adapter(self, place: str, tensors: Mapping[str, Tensor]) -> None:
        peft = imported("peft")
        model = self.build_model()
        model.load_state_dict(dict(tensors))
        base: Any = model
        base.peft_config["default"].base_model_name_or_path = self._model if isinstance(self._model, str) else None
        assert isinstance(base, peft.PeftModel)
        base.save_pretrained(place, save_embedding_layers=False)
