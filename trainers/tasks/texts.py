"""Texts as token ids: encoded by a tokenizer, joined into samples, or hidden for a masked language model."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from orchestray.platform.errors import TaskError
from orchestray.trainers.tasks.parquet_files import values_of

if TYPE_CHECKING:
    from pathlib import Path

    from orchestray.platform.task import Batch

IGNORED = -100
"""Target of a position that does not count."""
_INSTALL = "install it with: pip install 'orchestray[huggingface]'"


class Texts:
    """The columns of texts of a table, or its column `input_ids` of lists of token ids.

    Attributes:
        columns: names of the columns.
        max_length: most tokens of a sample.
        folder: folder of the tokenizer, or None.
    """

    def __init__(
        self, columns: str | Sequence[str], *, folder: str | None, max_length: int, mask_probability: float
    ) -> None:
        """
        Args:
            columns: column of texts, two for pairs, or `input_ids`.
            folder: folder of the tokenizer; None: the table has token ids.
            max_length: most tokens of a sample; longer texts are cut.
            mask_probability: fraction of the tokens that a masked language model predicts.
        """
        self.columns = [columns] if isinstance(columns, str) else list(columns)
        self.folder, self.max_length = folder, max_length
        self._mask_probability = mask_probability

    @property
    def are_ids(self) -> bool:
        """True if the table has token ids."""
        return "input_ids" in self.columns

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the folder, which pads.

        Raises:
            TaskError: there is none.
        """
        if self.folder is None:
            raise TaskError(
                "task.tokenizer: texts need a tokenizer: name its folder, or give a column input_ids in task.text"
            )
        try:
            found = imported("transformers").AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise TaskError(f"task.tokenizer: {self.folder} has no tokenizer: {error}") from error
        if found.pad_token is None:
            found.pad_token = found.eos_token
        return found

    def encoded(self, rows: pa.Table) -> dict[str, Tensor]:
        """Return the model's arguments for these rows, each [samples, tokens], padded on the right."""
        if "input_ids" in rows.column_names:
            found = [row[: self.max_length] for row in values_of(rows, "input_ids")]
            length = max(map(len, found))
            ids = torch.tensor([row + [self.pad_id] * (length - len(row)) for row in found])
            mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in found])
            return {"input_ids": ids, "attention_mask": mask}
        texts = [values_of(rows, name) for name in self.columns]
        cut = {"truncation": True, "max_length": self.max_length}
        encoded = self.tokenizer(*texts, **cut, padding=True, padding_side="right", return_tensors="pt")
        return {str(name): value for name, value in encoded.items()}

    def decode(self, request: Any) -> Any:
        """Return a text, or two in a list, as the model's inputs, not padded; anything else as it is.

        Args:
            request: texts, or a body of text in UTF-8.

        Raises:
            ValueError: a pair is wanted, or none.
        """
        if isinstance(request, bytes):
            request = request.decode()
        texts = [request] if isinstance(request, str) else request
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            return request
        if len(texts) != len(self.columns):
            raise ValueError(f"wanted {'a text' if len(self.columns) == 1 else 'a list of two texts'}")
        cut = {"truncation": True, "max_length": self.max_length, "return_tensors": "pt"}
        found = self.tokenizer(*([text] for text in texts), **cut)
        return {str(name): value[0] for name, value in found.items()}

    @property
    def example_request(self) -> Any:
        """A text, or two, as `decode` takes them."""
        return "a text" if len(self.columns) == 1 else ["a text", "another"]

    def masked(self, rows: pa.Table, draws: Sequence[np.random.Generator] | None = None) -> Batch:
        """Return a batch with some ids replaced by the mask token, and these as targets (Devlin et al. 2019, 3.1).

        Of the chosen tokens 80 % become the mask token, 10 % another one, 10 % stay.

        Args:
            rows: rows of the table.
            draws: random numbers of each sample; None: those of its text, so that the same tokens are hidden each time.
        """
        inputs = self.encoded(rows)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        lengths = mask.sum(1).tolist()
        if draws is None:
            samples = zip(ids, lengths, strict=True)
            draws = [np.random.default_rng(zlib.crc32(row[:length].numpy().tobytes())) for row, length in samples]
        special = set(self.tokenizer.all_special_ids)
        hidden, targets = ids.clone(), torch.full_like(ids, IGNORED)
        for row, (sample, length, rng) in enumerate(zip(ids.numpy(), lengths, draws, strict=True)):
            places = [at for at in range(length) if int(sample[at]) not in special]
            count = max(1, round(self._mask_probability * len(places))) if places else 0
            for at in rng.permutation(places)[:count]:
                targets[row, at] = ids[row, at]
                chance = rng.random()
                if chance < 0.9:
                    other = self.tokenizer.mask_token_id if chance < 0.8 else rng.integers(len(self.tokenizer))
                    hidden[row, at] = int(other)
        return {"inputs": {**inputs, "input_ids": hidden}, "targets": targets}

    def packed(self, table: pa.Table, place: str) -> pa.Table:
        """Return all texts joined, with the end-of-text token between them, in samples of `max_length` tokens.

        Args:
            table: table with one column of texts.
            place: place of the table, for the message.

        Raises:
            TaskError: there are too few tokens for a sample.
        """
        if "input_ids" in table.column_names:
            ids = table["input_ids"].combine_chunks().flatten().to_numpy()
        else:
            end = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []
            texts = self.tokenizer(values_of(table, self.columns[0]))["input_ids"]
            ids = np.array([token for row in texts for token in (*row, *end)], np.int64)
        count = len(ids) // self.max_length
        if not count:
            raise TaskError(f"task.max_length: {place} has {len(ids)} tokens, fewer than one sample of them")
        flat = pa.array(ids[: count * self.max_length].astype(np.int64))
        return pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(flat, self.max_length)})

    def example(self) -> dict[str, Tensor]:
        """Return the inputs of a sample of `max_length` tokens."""
        ids = torch.zeros(self.max_length, dtype=torch.int64)
        names = [] if self.are_ids else self.tokenizer.model_input_names
        return {**dict.fromkeys(names, ids), "input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def save(self, folder: Path) -> None:
        """Write the tokenizer, if there is one."""
        if self.folder is not None:
            self.tokenizer.save_pretrained(folder)

    @property
    def pad_id(self) -> int:
        """Token with which shorter samples are padded."""
        found = self.tokenizer.pad_token_id if self.folder is not None else None
        return int(found or 0)  # any id will do: the mask leaves it out


def imported(name: str) -> Any:
    """Return a package that only this task needs.

    Raises:
        TaskError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise TaskError(f"task.type: huggingface needs the package {name}; {_INSTALL}") from error
