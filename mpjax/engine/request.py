"""Reads the arguments of a request: the settings of its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.arguments import most_new_tokens, require_known_ids, stop_strings
from mpjax.batch import special_ids
from mpjax.engine.handle import Handle, Scores
from mpjax.engine.row import Row
from mpjax.engine.state import STOP_IDS, RowSettings
from mpjax.language_model import LanguageModel
from mpjax.prompts import EXPECTED, encode, is_single
from mpjax.random_keys import key_words
from mpjax.row_text import RowText
from mpjax.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a request is generated.

    row: its RowSettings, of one row. most: the most new tokens, of which the row has no more than
    an int32. stop: strings that end it. stop_ids: tokens that end it.
    """

    row: RowSettings
    most: int
    stop: list[str]
    stop_ids: tuple[int, ...]

    @classmethod
    def of(
        cls, lm: LanguageModel, max_new_tokens: Any, sampling: Any, stop: Any, seed: Any
    ) -> Settings:
        """The settings that a request asks for. Raises ValueError for arguments that don't fit."""
        strings, sampling = stop_strings(stop), Sampling.of(sampling, lm.sampling)
        most = most_new_tokens(max_new_tokens, sampling.min_new_tokens)
        if lm.tokenizer is None and strings:
            lm.require_tokenizer()
        usual = (lm.tokenizer and lm.tokenizer.stop_ids) or lm.config.stop_ids
        sampling, ids = sampling.split(usual, lm.config.vocab_size)
        named = special_ids(lm.tokenizer, strings) if lm.tokenizer else []
        stop_ids = (*dict.fromkeys([*(int(i) for i in np.asarray(ids)), *named]),)
        if len(stop_ids) > STOP_IDS:
            raise ValueError(
                f"there are {len(stop_ids)} stop ids: an engine's requests have at most {STOP_IDS}"
            )
        row = RowSettings.usual(1)
        for field, name in _FIELDS.items():
            if (value := getattr(sampling, field)) is not None:
                getattr(row, name)[0] = _one(field, value)
        row.most[0] = min(most, np.iinfo(np.int32).max)  # more than any request may have
        row.stop_ids[0, : len(stop_ids)] = stop_ids
        row.key_words[:] = np.asarray(key_words([seed]))
        return cls(row, most, strings, stop_ids)

    @property
    def greedy_from(self) -> int | None:
        """The number of new tokens from which the row takes its likeliest ones; None for never.

        Also never where candidates are told, which programs of greedy rows don't look for.
        """
        row = self.row
        is_greedy = row.temperature[0] == 0 and row.penalty[0] == 1 and row.candidates[0] == 0
        return int(row.least[0]) if is_greedy else None

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens are told beside each token."""
        return int(self.row.candidates[0])

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that were seen are less likely."""
        return bool(self.row.penalty[0] != 1)


_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty",
    "min_new_tokens": "least",
}


def _one(field: str, value: Any) -> Any:
    if np.ndim(value):
        raise ValueError(
            f"{field} has shape {np.shape(value)}: a request is one row, give a number"
        )
    return value


@dataclasses.dataclass(eq=False)
class Request:
    """A request inside an engine: its handle, settings and row, and the scores of its prompt."""

    handle: Handle
    settings: Settings
    row: Row
    scores: list[Scores] = dataclasses.field(default_factory=list)


def encode_one(lm: LanguageModel, prompt: Any, chat_template: str | None) -> list[int]:
    """The ids of a single prompt. Raises ValueError for anything else, as `generate` does."""
    if isinstance(prompt, list | tuple) and not prompt:
        raise ValueError("the prompt is empty: expected at least one token")
    if not is_single(prompt):
        raise ValueError(f"prompt is not a single prompt: expected {EXPECTED}")
    if lm.tokenizer is None and isinstance(prompt, str):
        lm.require_tokenizer()
    tokenizer: Any = lm.tokenizer
    [ids] = encode(tokenizer, [prompt], lm.config.vocab_size, chat_template)
    require_known_ids([ids], lm.config.vocab_size)
    return ids


def row_text(lm: LanguageModel, ids: Sequence[int], settings: Settings) -> RowText | None:
    """The text of a request; None for a model without a tokenizer."""
    if lm.tokenizer is None:
        return None
    return RowText(lm.tokenizer, ids, settings.stop, int(settings.row.least[0]))


def split_sampling(sampling: Sampling, batch: int) -> list[Sampling]:
    """The sampling of each row of a batch. Raises ValueError for an array of another length."""
    names = [field.name for field in dataclasses.fields(Sampling) if field.name != "stop_ids"]
    for name in names:
        shape = np.shape(getattr(sampling, name))
        if shape not in ((), (batch,)):
            raise ValueError(
                f"{name} has shape {shape}: a batch of {batch} needs a number or an array of shape "
                f"({batch},)"
            )

    def of_row(name: str, row: int) -> Any:
        value = getattr(sampling, name)
        return value[row] if np.ndim(value) else value

    rows = []
    for row in range(batch):
        fields = {name: of_row(name, row) for name in names}
        if not fields["temperature"]:
            fields |= dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
        rows.append(Sampling(**fields, stop_ids=sampling.stop_ids))
    return rows
