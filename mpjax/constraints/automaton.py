"""Constraints as transition tables on the device, so that decoding doesn't need the host."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.constraints.byte_automaton import MOST_STATES
from mpjax.constraints.kinds import Constraint
from mpjax.constraints.token_table import TokenTable, Words, token_table
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.sampling.processors import Processor

# Limit of state transitions over token bytes while a table is made.
MOST_WORK = 1 << 31
# Limits of the tables that an engine makes by itself (`SmallTable`), so that they stay fast.
SMALL_WORK, SMALL_STATES, SMALL_CLASSES = 1 << 21, 512, 256
# Syntax that Python and Rust may parse differently: flags, and sets within brackets.
UNSURE = re.compile(r"\(\?[^:]|\[\[|&&|--|~~")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Automaton(Processor):
    """A constraint as tables: for `generate_tokens`, or a processor of `generate` and `Engine`.

        automaton = mpjax.Automaton.of(lm, mpjax.Regex("[0-9]{4}-[0-9]{2}"))
        mpjax.generate_tokens(lm.model, ..., constraint=automaton)

    Tokens with the same next state from every state form a class.

    token_class: int16 [vocabulary]. step: int16 [states, classes], the next state; -1 if the class
    is not allowed. State 0 is the initial state. A stop id leads to a last state, and from there to
    itself. The numbers of states and classes are rounded up to powers of two, at least 64, so that
    small tables share compiled programs.
    """

    token_class: Any
    step: Any

    @classmethod
    def of(cls, lm: LanguageModel, constraint: Constraint) -> Self:
        """The tables of a constraint for a model's tokens. A text ends with the model's stop ids.

        Raises ValueError for a constraint without a table (a Grammar, a regular expression with
        look-around, a JSON schema with recursion or additional properties) and for a table that
        is too large. `constraint=` of `generate` and of an `Engine` accepts those too.
        """
        require_type("constraint", constraint, Constraint, hint=", such as mpjax.Regex(...)")
        name = type(constraint).__name__
        try:
            words = Words(lm.require_tokenizer(), lm.model.columns, lm.usual_stop_ids)
            pattern = constraint.pattern_of_text()
            found = token_table(words, pattern, constraint.grammar(), MOST_STATES, MOST_WORK)
        except ValueError as error:
            raise ValueError(
                f"Automaton: {name} has no table: {error}. `constraint=` of generate and of an "
                "Engine needs none"
            ) from None
        return cls(*found.rounded())

    def create(self, vocabulary: int) -> jax.Array:
        """The initial state, int32."""
        return jnp.int32(0)

    def __call__(self, logits: jax.Array, memory: jax.Array, number: jax.Array) -> jax.Array:
        """The logits, with -inf for tokens that the state does not allow."""
        is_allowed = (self.step[memory] >= 0)[self.token_class]
        return jnp.where(is_allowed, logits, -jnp.inf)

    def advance(self, memory: jax.Array, token: jax.Array, is_new: jax.Array) -> jax.Array:
        """The next state, int32; unchanged if the token is not new or not allowed."""
        after = self.step[memory, self.token_class[token]].astype(jnp.int32)
        return jnp.where(is_new & (after >= 0), after, memory)


def read_constraint(constraint: Any) -> tuple[Automaton, ...]:
    """The processors of the `constraint` argument of array functions. Raises ValueError."""
    if isinstance(constraint, Constraint):
        name = type(constraint).__name__
        raise ValueError(
            f"constraint is a {name}, which needs a tokenizer: make its tables by "
            f"mpjax.Automaton.of(lm, {name}(...)), or give it to `generate`"
        )
    if constraint is not None:
        require_type("constraint", constraint, Automaton, hint=", as mpjax.Automaton.of makes it")
    return () if constraint is None else (constraint,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmallTable(Automaton):
    """A table of fixed size that an engine makes for a constraint by itself, if one fits."""

    @classmethod
    def place(cls, columns: int, states: int) -> Self:
        """An empty table with room for `states` states: nothing is allowed."""
        step = np.full((states, SMALL_CLASSES), -1, np.int16)
        return cls(np.zeros(columns, np.int16), step)

    def of_constraint(
        self, lm: LanguageModel, constraint: Constraint, stop_ids: Sequence[int]
    ) -> Self | None:
        """The table of a constraint, padded to this one's size.

        None if the constraint has no table, if the table is too large or takes too long to make, or
        if a stop id is not a special token, since it could then be part of the text.
        """
        tokenizer = lm.require_tokenizer()
        if not stop_ids or not tokenizer.special_ids.issuperset(stop_ids):
            return None
        try:
            pattern, grammar = constraint.pattern_of_text(), constraint.grammar()
        except ValueError:
            return None  # a matcher will report the error
        words = Words(tokenizer, lm.model.columns, tuple(sorted(stop_ids)))
        found = None if UNSURE.search(pattern) else _small(words, pattern, grammar, len(self.step))
        if found is None:
            return None
        room = [
            (0, most - own) for most, own in zip(self.step.shape, found.step.shape, strict=True)
        ]
        return type(self)(found.token_class, np.pad(found.step, room, constant_values=-1))


class TableMatcher:
    """Follows a row's text in a table, on the host.

    table: with NumPy arrays. stop_ids: the tokens that end the row.
    """

    def __init__(self, table: Automaton, stop_ids: Sequence[int]) -> None:
        self._table, self._stop_ids = table, frozenset(stop_ids)
        self.restart()

    def restart(self) -> None:
        """Goes back to the beginning of the row's new text."""
        self._state = 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Follows new tokens of the row. Raises ValueError for tokens that are not allowed."""
        text = [token for token in tokens if token not in self._stop_ids]  # stop ids end the row
        for token in text:
            after = int(self._table.step[self._state, self._table.token_class[token]])
            if after < 0:
                raise ValueError(
                    f"the constraint can't follow the tokens {text}: its table does not allow "
                    f"token {token} there"
                )
            self._state = after

    def forced(self, least: int, most: int) -> list[int]:
        """The tokens that come next because each is the only one allowed; see Matcher."""
        found: list[int] = []
        state = self._state
        while len(found) < most and (only := self._only(state)) is not None:
            found.append(only[0])
            state = only[1]
        return found if len(found) >= least else []

    def _only(self, state: int) -> tuple[int, int] | None:
        """The token that alone may follow a state, and the next state; None for a stop id."""
        classes = np.flatnonzero(self._table.step[state] >= 0)
        if len(classes) != 1:
            return None
        tokens = np.flatnonzero(self._table.token_class == classes[0])
        if len(tokens) != 1 or int(tokens[0]) in self._stop_ids:
            return None
        return int(tokens[0]), int(self._table.step[state, classes[0]])


@functools.lru_cache(maxsize=256)
def _small(words: Words, pattern: str, grammar: str, states: int) -> TokenTable | None:
    """The table of a pattern; None if it is not regular, too large or takes too long."""
    try:
        found = token_table(words, pattern, grammar, states - 1, SMALL_WORK)
    except ValueError:
        return None
    return found if found.step.shape[1] <= SMALL_CLASSES else None
