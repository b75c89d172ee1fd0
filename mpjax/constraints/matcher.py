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
        self._ends = lm.usual_stop_ids
        if not self._ends or not self.stop_ids:
            raise ValueError("constraint: the text needs a stop id, and the model has none")
        # A tokenizer may have more tokens than the model's head has columns.
        self._size = max(self._columns, lm.require_tokenizer().backend.get_vocab_size())
        vocabulary = vocabulary_of(lm.require_tokenizer(), self._size, self._ends)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
        if is_wrong:
            raise ValueError(f"constraint: {kind} can't be enforced: {'; '.join(messages)}")
        self._matcher = LLMatcher(vocabulary, grammar, log_level=0)
        self._require_no_error(kind)
        first = self._fill()
        self._require_no_error(kind)
        if self._has_end(first) and not self._matcher.is_accepting():
            raise ValueError(f"constraint: {kind} allows no text")

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Masks of the tokens allowed next, and after each draft token.

        Returns uint32 [1 + drafts, words]; bit i of word w is token 32 w + i. All tokens are
        allowed after a draft that is not allowed or that ends the row.
        """
        # Stop ids end the row, and llguidance doesn't count them in a rollback: leave them out.
        ends = {*self._ends, *self.stop_ids}
        text = list(itertools.takewhile(lambda token: token not in ends, drafts))
        allowed = self._matcher.validate_tokens(text) if text else 0
        found = np.full((1 + len(drafts), mask_words(self._columns)), ~np.uint32(0))
        for place in range(1 + allowed):
            found[place] = self._translated(self._fill())
            if place < allowed:
                self._matcher.consume_token(drafts[place])
        if allowed:
            self._matcher.rollback(allowed)
        return found

    def restart(self) -> None:
        """Goes back to the beginning of the row's new text."""
        self._matcher.reset()

    def advance(self, tokens: Sequence[int]) -> None:
        """Advances by new tokens of the row.

        Raises ValueError for tokens that the constraint does not allow, and if the constraint has
        exceeded a limit of llguidance, which then allows only an end.
        """
        text = [token for token in tokens if token not in self.stop_ids]  # stop ids end the row
        if self._matcher.is_error() or (text and not self._matcher.consume_tokens(text)):
            raise ValueError(f"the constraint can't follow the tokens {text}: {self._error()}")

    def forced(self, least: int, most: int) -> list[int]:
        """The tokens that come next because each is the only one allowed, without stop ids.

        None for fewer than `least`, and the first `most` of more.
        """
        ends = {*self._ends, *self.stop_ids}
        known = [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()
        run = list(itertools.takewhile(lambda token: token not in ends, known))[:most]
        if len(run) < least:
            return []
        # Stop where a step would allow more than one token: llguidance's forced bytes can have
        # several tokenizations.
        numbers = np.bitwise_count(self.masks(run)[:-1]).sum(-1)
        count = next(iter(np.flatnonzero(numbers != 1).tolist()), len(run))
        return run[:count] if count >= least else []

    def _fill(self) -> np.ndarray:
        """The mask of tokens allowed next; the tokenizer's stop ids stand for an end."""
        return _filled(self._matcher, self._size)

    def _has_end(self, mask: np.ndarray) -> bool:
        """Whether a mask allows one of the tokenizer's stop ids."""
        words, bits = np.divmod(np.asarray(self._ends, np.uint32), np.uint32(WORD))
        return bool((mask[words] >> bits & 1).any())

    def _translated(self, mask: np.ndarray) -> np.ndarray:
        """A mask with the tokenizer's stop ids replaced by the row's."""
        if not self._has_end(mask):
            return mask[: mask_words(self._columns)]
        found = mask.copy()
        for ids, is_allowed in ((self._ends, False), (sorted(self.stop_ids), True)):
            words, bits = np.divmod(np.asarray(ids, np.uint32), np.uint32(WORD))
            own = np.uint32(1) << bits
            if is_allowed:
                np.bitwise_or.at(found, words, own)
            else:
                np.bitwise_and.at(found, words, ~own)
        return found[: mask_words(self._columns)]

    def _require_no_error(self, kind: str) -> None:
        if self._matcher.is_error():
            raise ValueError(f"constraint: {kind} can't be enforced: {self._error()}")

    def _error(self) -> str:
        """The error message of llguidance, without the state and the grammar that follow it."""
        return " ".join(str(self._matcher.get_error()).partition("<state>")[0].split())


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
