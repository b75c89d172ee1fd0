"""The logits processors of a Sampling: penalties, biases, allowed tokens and bad words.

They are applied before the temperature in vLLM's order: allowed tokens, bad words, biases, and
penalties, the repetition penalty first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import is_known
from mpjax.sampling.processors import Processor
from mpjax.sampling.rules import require_rules
from mpjax.sampling.settings import Sampling, by_row
from mpjax.sampling.token_lists import (
    LONGEST_BAD_WORD,
    MOST_BAD_WORDS,
    MOST_BIASES,
    NO_ID,
    require_known,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Allowed(Processor):
    """Allows only the tokens of a mask, bool [vocabulary]."""

    of_sampling = True
    names: ClassVar[tuple[str, ...]] = ("allowed_ids",)
    mask: Any

    @classmethod
    def of(cls, samplings: Sequence[Sampling], rows: int, columns: int) -> Self:
        """The processor of all rows, with masks [rows, columns]."""

        def mask(ids: Any) -> Any:
            if ids is None:
                return np.ones(columns, bool)
            if not is_known(ids):
                return jnp.zeros(columns, bool).at[ids].set(True, mode="drop")
            found = np.zeros(columns, bool)
            found[np.asarray(ids)] = True
            return found

        return cls(_stacked([mask(one.allowed_ids) for one in samplings], rows))

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits, -inf for tokens that are not allowed."""
        return jnp.where(self.mask, logits, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BadWords(Processor):
    """Prevents sequences of token ids, counting a row's prompt and new tokens.

    words: int32 [number, LONGEST_BAD_WORD], padded in front with NO_ID.
    """

    of_sampling = True
    names: ClassVar[tuple[str, ...]] = ("bad_words",)
    words: Any

    @classmethod
    def of(cls, samplings: Sequence[Sampling], rows: int, columns: int) -> Self:
        """The processor of all rows, with words [rows, MOST_BAD_WORDS, LONGEST_BAD_WORD]."""
        none = np.zeros((0, LONGEST_BAD_WORD), np.int32)
        words = [none if one.bad_words is None else one.bad_words for one in samplings]
        return cls(_stacked([_padded(each, MOST_BAD_WORDS) for each in words], rows))

    def create(self, vocabulary: int) -> jax.Array:
        """The initial memory of a row, its last tokens: int32 [LONGEST_BAD_WORD - 1], all −1."""
        return jnp.full(LONGEST_BAD_WORD - 1, -1, jnp.int32)

    def read(self, memory: Any, tokens: jax.Array, count: jax.Array) -> Any:
        """The last tokens of a prompt."""
        places = count - len(memory) + jnp.arange(len(memory))
        return jnp.where(places < 0, memory, tokens[jnp.maximum(places, 0)])

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits, -inf for tokens that would complete a bad word."""
        begins, last = self.words[:, :-1], self.words[:, -1]
        is_next = ((begins == memory[None]) | (begins == NO_ID)).all(-1)
        return logits.at[jnp.where(is_next, last, NO_ID)].set(-jnp.inf, mode="drop")

    def advance(self, memory: Any, token: jax.Array, is_new: jax.Array) -> Any:
        """The last tokens after a new one."""
        return jnp.where(is_new, jnp.append(memory[1:], token), memory)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Biases(Processor):
    """Adds biases to logits. ids: int32 [number], padded. values: float32 [number], the biases."""

    of_sampling = True
    names: ClassVar[tuple[str, ...]] = ("logit_bias",)
    ids: Any
    values: Any

    @classmethod
    def of(cls, samplings: Sequence[Sampling], rows: int, columns: int) -> Self:
        """The processor of all rows, with arrays [rows, MOST_BIASES]."""
        none = np.zeros(0, np.int32), np.zeros(0, np.float32)
        pairs = [none if one.logit_bias is None else one.logit_bias for one in samplings]
        ids = [_padded(ids, MOST_BIASES) for ids, _ in pairs]
        return cls(
            _stacked(ids, rows), _stacked([_padded(v, MOST_BIASES, 0) for _, v in pairs], rows)
        )

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits with the biases."""
        return logits.at[self.ids].add(self.values, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Penalties(Processor):
    """Penalties for tokens that occurred before; float32 scalars.

    repetition: divides positive logits and multiplies negative ones, for tokens of the prompt and
        new tokens (Keskar et al., 2019). presence: subtracted from the logits of new tokens.
        frequency: subtracted once for each time the token was drawn (OpenAI).
    """

    of_sampling = True
    names: ClassVar[tuple[str, ...]] = (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    repetition: Any
    presence: Any
    frequency: Any

    @classmethod
    def of(cls, samplings: Sequence[Sampling], rows: int, columns: int) -> Self:
        """The processor of all rows, with arrays [rows]."""

        def values(name: str, neutral: float) -> Any:
            found = [getattr(one, name) for one in samplings]
            return by_row(name, [neutral if it is None else it for it in found], rows, np.float32)

        return cls(*map(values, cls.names, (1.0, 0.0, 0.0)))

    def create(self, vocabulary: int) -> jax.Array:
        """int32 [vocabulary]: 2 · (how often the token was drawn) + (1 if it is in the prompt)."""
        return jnp.zeros(vocabulary, jnp.int32)

    def read(self, memory: Any, tokens: jax.Array, count: jax.Array) -> Any:
        """The memory after a prompt."""
        ids = jnp.where(jnp.arange(len(tokens)) < count, tokens, NO_ID)
        return memory.at[ids].set(memory[ids] | 1, mode="drop")

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits with the penalties, the repetition penalty first."""
        repeated = jnp.where(logits < 0, logits * self.repetition, logits / self.repetition)
        logits = jnp.where(memory > 0, repeated, logits)
        drawn = (memory >> 1).astype(jnp.float32)
        return logits - self.frequency * drawn - jnp.where(drawn > 0, self.presence, 0)

    def advance(self, memory: Any, token: jax.Array, is_new: jax.Array) -> Any:
        """The memory after a new token."""
        return memory.at[token].add(2 * is_new.astype(jnp.int32))


KINDS: tuple[type[Any], ...] = (Allowed, BadWords, Biases, Penalties)


def controls(
    samplings: Sequence[Sampling], rows: int, vocabulary: int, columns: int, *, every: bool = False
) -> tuple[Any, ...]:
    """The processors that Samplings need, with arrays [rows, …].

    samplings: one for all rows, whose fields may be arrays [rows]; or one for each row.
    vocabulary: the model's vocabulary size, against which ids are checked. columns: width of its
    logits. every: whether to return all kinds of processors, with neutral values where not needed.

    Raises ValueError for ids outside the vocabulary, and for arrays of another shape than [rows].
    """
    for one in samplings:
        require_known("allowed_ids", one.allowed_ids, vocabulary)
        require_known("bad_words", one.bad_words, vocabulary)
        require_known("logit_bias", one.logit_bias and one.logit_bias[0], vocabulary)
        require_rules(one.rules, vocabulary)
    return tuple(
        kind.of(samplings, rows, columns)
        for kind in KINDS
        if every or any(getattr(one, name) is not None for one in samplings for name in kind.names)
    )


def changes_logits(sampling: Sampling) -> bool:
    """Whether a Sampling without traced fields needs one of the processors in any row."""
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    names = ("rules", *(name for kind in KINDS for name in kind.names))
    values = ((name, getattr(sampling, name)) for name in names)
    return any(
        value is not None and (name not in neutral or bool(np.any(value != neutral[name])))
        for name, value in values
    )


def _padded(array: Any, number: int, pad: Any = NO_ID) -> Any:
    xp: Any = np if is_known(array) else jnp
    missing = [(0, number - len(array))] + [(0, 0)] * (array.ndim - 1)
    return xp.pad(array, missing, constant_values=pad)


def _stacked(arrays: Sequence[Any], rows: int) -> Any:
    xp: Any = np if all(map(is_known, arrays)) else jnp
    found = xp.stack(arrays)
    return xp.broadcast_to(found, (rows, *found.shape[1:]))
