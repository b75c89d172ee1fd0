"""Follows a row's text in its constraint on the host, and masks the tokens allowed next."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mpjax.constraints.kinds import Constraint
from mpjax.language_model import LanguageModel
from mpjax.text.tokenizer import Tokenizer

WORD = 32  # tokens in a word of a mask


def mask_words(columns: int) -> int:
    """The number of 32-bit words in a mask of `columns` tokens."""
    return -(-columns // WORD)


class Matcher:
    """The state of a row's text in its constraint.

    lm: the model of the row. constraint: of the row's new text. stop_ids: the tokens that end the
        row.

    The row can end only where the constraint allows an end, and then with any of its stop ids. A
    stop id that can also be part of the text ends the row wherever the text has it.

    Raises ValueError for a constraint that can't be enforced or that no text satisfies, and for a
    model without a tokenizer or a row without stop ids.
    """

    def __init__(self, lm: LanguageModel, constraint: Constraint, stop_ids: Sequence[int]) -> None:
        grammar, kind = constraint.grammar(), type(constraint).__name__
        from llguidance import LLMatcher

        self._columns, self.stop_ids = lm.model.columns, frozenset(stop_ids)
        self.ends = lm.usual_stop_ids
        if not self.ends or not self.stop_ids:
            raise ValueError("constraint: the text needs a stop id, and the model has none")
        # A tokenizer may have more tokens than the model's head has columns.
        self.size = max(self._columns, lm.require_tokenizer().backend.get_vocab_size())
        vocabulary = vocabulary_of(lm.require_tokenizer(), self.size, self.ends)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
        if is_wrong:
            raise ValueError(f"constraint: {kind} can't be enforced: {'; '.join(messages)}")
        self.inner = LLMatcher(vocabulary, grammar, log_level=0)
        self._require_no_error(kind)
        first = _filled(self.inner, self.size)
        self._require_no_error(kind)
        if _has_end(first[None], self.ends)[0] and not self.inner.is_accepting():
            raise ValueError(f"constraint: {kind} allows no text")

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Masks of the tokens allowed next, and after each draft token.

        Returns uint32 [1 + drafts, words]; bit i of word w is token 32 w + i. All tokens are
        allowed after a draft that is not allowed or that ends the row.
        """
        found = np.full((1 + len(drafts), mask_words(self._columns)), ~np.uint32(0))
        write_masks([(self, drafts, found)])
        return found

    def allowed(self, drafts: Sequence[int]) -> list[int]:
        """The draft tokens before the first that is not allowed or that ends the row."""
        # Stop ids end the row, and llguidance doesn't count them in a rollback: leave them out.
        ends = {*self.ends, *self.stop_ids}
        text = list(itertools.takewhile(lambda token: token not in ends, drafts))
        return text[: self.inner.validate_tokens(text)] if text else []

    def restart(self) -> None:
        """Goes back to the beginning of the row's new text."""
        self.inner.reset()

    def advance(self, tokens: Sequence[int]) -> None:
        """Advances by new tokens of the row.

        Raises ValueError for tokens that the constraint does not allow, and if the constraint has
        exceeded a limit of llguidance, which then allows only an end.
        """
        text = [token for token in tokens if token not in self.stop_ids]  # stop ids end the row
        if self.inner.is_error() or (text and not self.inner.consume_tokens(text)):
            raise ValueError(f"the constraint can't follow the tokens {text}: {self._error()}")

    def forced(self, least: int, most: int) -> list[int]:
        """The tokens that come next because each is the only one allowed, without stop ids.

        None for fewer than `least`, and the first `most` of more.
        """
        ends = {*self.ends, *self.stop_ids}
        known = [] if self.inner.is_error() else self.inner.compute_ff_tokens()
        run = list(itertools.takewhile(lambda token: token not in ends, known))[:most]
        if len(run) < least:
            return []
        # Stop where a step would allow more than one token: llguidance's forced bytes can have
        # several tokenizations.
        numbers = np.bitwise_count(self.masks(run)[:-1]).sum(-1)
        count = next(iter(np.flatnonzero(numbers != 1).tolist()), len(run))
        return run[:count] if count >= least else []

    def translate(self, mask: np.ndarray) -> None:
        """Replaces the tokenizer's stop ids by the row's, in a mask that allows one."""
        for ids, is_allowed in ((self.ends, False), (sorted(self.stop_ids), True)):
            words, bits = np.divmod(np.asarray(ids, np.uint32), np.uint32(WORD))
            own = np.uint32(1) << bits
            if is_allowed:
                np.bitwise_or.at(mask, words, own)
            else:
                np.bitwise_and.at(mask, words, ~own)

    def _require_no_error(self, kind: str) -> None:
        if self.inner.is_error():
            raise ValueError(f"constraint: {kind} can't be enforced: {self._error()}")

    def _error(self) -> str:
        """The error message of llguidance, without the state and the grammar that follow it."""
        return " ".join(str(self.inner.get_error()).partition("<state>")[0].split())


def write_masks(jobs: Sequence[tuple[Matcher, Sequence[int], np.ndarray]]) -> None:
    """Writes the masks of several rows, each in a thread of its own.

    jobs: a row's matcher, its draft tokens, and where its masks go: uint32 [1 + drafts, words] as
    `Matcher.masks` returns them, all bits set before. The matchers are of one model.
    """
    from llguidance import numpy as llnumpy

    if not jobs:
        return
    first, texts = jobs[0][0], [matcher.allowed(drafts) for matcher, drafts, _ in jobs]
    places = [0, *itertools.accumulate(1 + len(text) for text in texts)]
    masks = np.full((places.pop(), mask_words(first.size)), -1, np.int32)
    inner = [matcher.inner for matcher, *_ in jobs]
    rows = [*zip(inner, places, texts, strict=True)]
    alone = [(one, place) for one, place, text in rows if not text]
    if len(alone) == 1:
        llnumpy.fill_next_token_bitmask(alone[0][0], masks, alone[0][1])
    elif alone:
        llnumpy.fill_next_token_bitmask_par(_executor(), alone, masks)
    if len(alone) < len(rows):
        followed = [row for row in rows if row[-1]]
        llnumpy.fill_next_token_bitmask_par_with_draft_tokens(_executor(), followed, masks)
    found, ends = masks.view(np.uint32), _has_end(masks.view(np.uint32), first.ends)
    for (matcher, _, target), place, text in zip(jobs, places, texts, strict=True):
        for number in range(1 + len(text)):
            if ends[place + number]:
                matcher.translate(found[place + number])
            target[number] = found[place + number, : target.shape[1]]


def _has_end(masks: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Whether each mask, uint32 [masks, words], allows one of the ids `ends`; bool [masks]."""
    words, bits = np.divmod(np.asarray(ends, np.uint32), np.uint32(WORD))
    found: np.ndarray = (masks[:, words] >> bits & 1).any(1)
    return found


@functools.cache
def _executor() -> Any:
    """The threads of llguidance, for 80 % of the cores."""
    from llguidance import LLExecutor

    return LLExecutor()


def _filled(matcher: Any, size: int) -> np.ndarray:
    """The mask of an llguidance matcher, uint32 words for `size` tokens."""
    from llguidance import numpy as llnumpy

    found = np.zeros((1, mask_words(size)), np.int32)
    llnumpy.fill_next_token_bitmask(matcher, found, 0)
    return found.view(np.uint32)[0]


class Follower(NamedTuple):
    """An llguidance matcher in one state, for making a table.

    size: the number of tokens in its masks.
    """

    matcher: Any
    size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, columns: int, ends: tuple[int, ...], grammar: str) -> Self:
        """The follower at the beginning of a text of the grammar."""
        from llguidance import LLMatcher

        size = max(columns, tokenizer.backend.get_vocab_size())
        return cls(LLMatcher(vocabulary_of(tokenizer, size, ends), grammar, log_level=0), size)

    def after(self, token: int) -> Self:
        """A copy of the follower, advanced by a token."""
        matcher = self.matcher.deep_copy()
        matcher.consume_token(token)
        return type(self)(matcher, self.size)

    def only_token(self) -> int | None:
        """The token if exactly one is allowed next, else None."""
        bits = np.unpackbits(_filled(self.matcher, self.size).view(np.uint8), bitorder="little")
        found = np.flatnonzero(bits)
        return int(found[0]) if len(found) == 1 and not self.matcher.is_error() else None


@functools.lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Tokenizer, size: int, ends: tuple[int, ...]) -> Any:
    """A tokenizer's vocabulary for llguidance. size: token ids. ends: the ids that end a text."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=list(ends))
