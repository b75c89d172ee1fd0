"""Reads the arguments of requests: sampling, stop conditions, adapters and constraints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpjax.arguments import most_new_tokens, require_known_ids, stop_strings
from mpjax.constraints.automaton import TableMatcher
from mpjax.constraints.kinds import Constraint, read_constraints
from mpjax.constraints.matcher import Matcher
from mpjax.engine.controlled import Control, read_constraint, read_control
from mpjax.engine.handle import Handle, Scores
from mpjax.engine.row import Row
from mpjax.engine.watching import read_watches
from mpjax.kernels.checks import shown
from mpjax.language_model import LanguageModel
from mpjax.sampling.controls import changes_logits
from mpjax.sampling.processors import Processor, read_processors
from mpjax.sampling.rules import NoRepeat
from mpjax.sampling.settings import RowSettings, Sampling, Samplings, read_samplings, rows_of
from mpjax.sampling.token_lists import NO_ID
from mpjax.text.prompts import EXPECTED, encode, has_text, is_single
from mpjax.text.row_text import RowText
from mpjax.text.tokenizer import Tokenizer

AdapterNames = str | Sequence[str | None] | None  # one name for all requests of a call, or one each


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one request.

    row: RowSettings of one row, as NumPy arrays. most: the most new tokens, 0 for a request that
    only scores its prompt. stop: stop strings. control: its logits processors, or None. matcher:
    follows the text in its constraint, or None. is_forcible: whether a token that alone is allowed
    by the constraint is drawn for sure.
    """

    row: RowSettings
    most: int
    stop: list[str]
    control: Control | None = None
    matcher: Matcher | TableMatcher | None = None
    is_forcible: bool = False

    @property
    def masker(self) -> Matcher | None:
        """The matcher whose masks steps need; None if there is none, or a table is followed."""
        return self.matcher if isinstance(self.matcher, Matcher) else None

    @functools.cached_property
    def takes_likeliest(self) -> bool:
        """Whether each token is the likeliest of those that a mask of the host allows."""
        is_greedy = self.row.temperature[0] == 0 and not self.top_logprobs
        return is_greedy and (self.control is None or self.control.is_masked_alone)

    @property
    def greedy_from(self) -> int | None:
        """The number of new tokens from which the row is greedy; None for never.

        Never if top_logprobs are wanted, which programs for greedy rows don't compute.
        """
        row = self.row
        is_greedy = row.temperature[0] == 0 and self.control is None and not self.top_logprobs
        return self.min_new_tokens if is_greedy else None

    @property
    def min_new_tokens(self) -> int:
        """The number of new tokens before which no stop string ends the row."""
        return int(self.row.min_new_tokens[0])

    @property
    def top_logprobs(self) -> int:
        """How many of the likeliest tokens are wanted for each new token."""
        return int(self.row.top_logprobs[0])

    def is_stop(self, token: int) -> bool:
        """Whether a token ends the row."""
        return token != NO_ID and token in self.row.stop_ids[0]


@dataclasses.dataclass(frozen=True)
class Options:
    """Unchecked arguments of `generate`, each for all requests of a call or one for each."""

    max_new_tokens: Any = 128
    sampling: Samplings = None
    stop: str | Sequence[str] | None = ()
    seeds: Any = None
    adapter: AdapterNames = None
    processors: Any = ()
    constraint: Any = None
    capture: Any = dataclasses.field(default_factory=dict)
    steer: Any = None

    def read(self, lm: LanguageModel, rows: int, *, scores: bool = False) -> RowsOptions:
        """Checks the options for `rows` requests.

        scores: whether max_new_tokens may be 0, because prompts are scored.

        Raises ValueError for invalid arguments.
        """
        strings = stop_strings(self.stop)
        samplings = rows_of(read_samplings(self.sampling, rows, lm.sampling), rows)
        least, most = 0 if scores else 1, 0
        samplings = [_limited(one, lm.sampling, self.max_new_tokens) for one in samplings]
        for one in samplings:
            most = most_new_tokens(self.max_new_tokens, one.min_new_tokens, least=least)
        if lm.tokenizer is None and strings:
            lm.require_tokenizer()
        usual, constraints = lm.usual_stop_ids, read_constraints(self.constraint, rows)
        for row, one in enumerate(samplings):
            # A constrained text can end only by a stop id, so an empty list gets the usual ones.
            if constraints[row] is not None and one.stop_ids is not None and not len(one.stop_ids):
                samplings[row] = dataclasses.replace(one, stop_ids=usual)
        named = special_ids(lm.tokenizer, strings) if lm.tokenizer else []
        samplings = [
            dataclasses.replace(
                one, stop_ids=_joined(usual if one.stop_ids is None else one.stop_ids, named)
            )
            for one in samplings
        ]
        settings = RowSettings.of(
            samplings,
            rows,
            max_new_tokens=max(most, 1),
            seeds=self.seeds,
            vocabulary=lm.config.vocab_size,
        )
        return RowsOptions(
            jax.tree.map(np.asarray, settings),
            most,
            strings,
            read_adapters(lm, self.adapter, rows),
            samplings,
            read_processors(self.processors),
            constraints,
            read_watches(lm.model, self.capture, self.steer, rows),
        )


@dataclasses.dataclass(frozen=True)
class RowsOptions:
    """The checked options of several requests. rows: RowSettings of NumPy arrays.

    most, stop: as in Settings. adapters: the name of each row's adapter, or None.
    samplings: one for each row.
    processors: of all rows, after those of the samplings. constraints: one for each row, or None.
    watches: what is captured and changed of each row, as `Watches.read` takes it.
    """

    rows: RowSettings
    most: int
    stop: list[str]
    adapters: Sequence[str | None]
    samplings: Sequence[Sampling] = (Sampling(),)
    processors: tuple[Processor, ...] = ()
    constraints: Sequence[Constraint | None] = (None,)
    watches: Sequence[tuple[Any, Any]] = (({}, ()),)

    @property
    def places(self) -> tuple[Processor, ...]:
        """The processors that an engine of these requests needs places for."""
        rules = dict.fromkeys(rule for one in self.samplings for rule in one.rules or ())
        return (*rules, *self.processors)

    @property
    def stop_ids(self) -> int:
        """The most stop ids of a row: the padded width."""
        return int(self.rows.stop_ids.shape[1])

    def settings(self, row: int, stop_ids: int, top_logprobs: int = 0) -> Settings:
        """The settings of one request.

        stop_ids: the engine's most stop ids. Raises ValueError for a row with more.
        """
        own = jax.tree.map(lambda each: each[row : row + 1], self.rows)
        found = int((own.stop_ids != NO_ID).sum())
        if found > stop_ids:
            raise ValueError(
                f"there are {found} stop ids: an engine's requests have at most {stop_ids}"
            )
        own = dataclasses.replace(
            own,
            stop_ids=own.stop_ids[:, :stop_ids],
            top_logprobs=np.full(1, top_logprobs, np.int32),
        )
        return Settings(own.filled(stop_ids), self.most, self.stop)

    def controlled(
        self, row: int, settings: Settings, lm: LanguageModel, processors: Sequence[Processor]
    ) -> Settings:
        """The settings of one request with its processors and its constraint's matcher.

        processors: the engine's own. Raises the ValueErrors of `read_control` and
        `read_constraint`.
        """
        sampling, constraint = self.samplings[row], self.constraints[row]
        rooms = {one.size: one.room for one in processors if isinstance(one, NoRepeat)}
        rules = tuple(
            one.sized(rooms.get(one.size, 0)) if isinstance(one, NoRepeat) else one
            for one in sampling.rules or ()
        )
        wanted = (*rules, *self.processors)
        if constraint is not None:
            ids = settings.row.stop_ids[0]
            ids = ids[ids != NO_ID].tolist()
            own, matcher = read_constraint(lm, constraint, ids, processors)
            # Nothing else may draw another token, or forbid the allowed one, which is an error.
            is_free = not wanted and sampling.allowed_ids is None and sampling.bad_words is None
            is_free &= sampling.logit_bias is None  # rules are in `wanted`
            settings = dataclasses.replace(settings, matcher=matcher, is_forcible=is_free)
            wanted = own, *wanted
        if not changes_logits(sampling) and not wanted:
            return settings
        control = read_control(lm, sampling, wanted, processors)
        return dataclasses.replace(settings, control=control)


def _limited(sampling: Any, usual: Any, most: Any) -> Sampling:
    """A Sampling, with no more of the model's own min_new_tokens, in `usual`, than `most`."""
    own, least = sampling.min_new_tokens, None if usual is None else usual.min_new_tokens
    if own is None or least is None or own != least or not isinstance(most, int) or own <= most:
        return sampling
    return dataclasses.replace(sampling, min_new_tokens=max(most, 0))


def read_adapters(lm: LanguageModel, adapter: AdapterNames, rows: int) -> list[str | None]:
    """The name of each row's adapter, or None.

    adapter: a name for all rows, or a list with one for each. Raises ValueError for other values,
    and for names of adapters that are not loaded.
    """
    names = [adapter] * rows if adapter is None or isinstance(adapter, str) else adapter
    if not isinstance(names, list | tuple) or len(names) != rows:
        raise ValueError(
            f"adapter is {shown(adapter)}: expected the name of an adapter, or a list of {rows}, "
            "one for each prompt"
        )
    for name in names:
        if name is not None:
            lm.adapters[name]
    return list(names)


def special_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> list[int]:
    """Ids of special tokens among the stop strings: they have no text, so they stop by id."""
    named = (tokenizer.backend.token_to_id(text) for text in stop)
    return [i for i in named if i is not None and i in tokenizer.special_ids]


def _joined(ids: Any, more: Sequence[int]) -> list[int]:
    """Both lists of ids joined, without duplicates."""
    return list(dict.fromkeys([*(int(i) for i in np.asarray(ids)), *more]))


@dataclasses.dataclass(eq=False)
class Request:
    """A request inside an engine: its handle, settings and row, and the scores of its prompt."""

    handle: Handle
    settings: Settings
    row: Row
    scores: list[Scores] = dataclasses.field(default_factory=list)

    def restart(self) -> None:
        """Forgets all drawn tokens and scores, and makes the row wait; no effect on a new row."""
        if self.row.runs:
            self.row.restart()
            self.handle.restart()
            self.scores.clear()
            if self.settings.matcher is not None:
                self.settings.matcher.restart()


def encode_batch(
    lm: LanguageModel, prompts: Any, chat_template: str | None = None
) -> list[list[int]]:
    """The token ids of each prompt. Raises ValueError for invalid prompts.

    prompts, chat_template: as for `generate`. Strings and chats need a tokenizer.
    """
    if lm.tokenizer is None and has_text(prompts):
        lm.require_tokenizer()
    tokenizer: Any = lm.tokenizer
    encoded = encode(tokenizer, prompts, lm.config.vocab_size, chat_template)
    require_known_ids(encoded, lm.config.vocab_size)
    return encoded


def encode_one(lm: LanguageModel, prompt: Any, chat_template: str | None) -> list[int]:
    """The token ids of a single prompt. Raises ValueError as `generate` does."""
    if isinstance(prompt, list | tuple) and not prompt:
        raise ValueError("the prompt is empty: expected at least one token")
    if not is_single(prompt):
        raise ValueError(f"prompt is not a single prompt: expected {EXPECTED}")
    [ids] = encode_batch(lm, [prompt], chat_template)
    return ids


def row_text(lm: LanguageModel, ids: Sequence[int], settings: Settings) -> RowText | None:
    """The text of a request; None for a model without a tokenizer."""
    if lm.tokenizer is None:
        return None
    return RowText(lm.tokenizer, ids, settings.stop, settings.min_new_tokens)
