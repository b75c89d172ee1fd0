"""Rules of generation_config.json that a Sampling holds: logits processors without arrays.

Each computes what transformers' logits processor of the same key does.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import shown
from mpjax.sampling.processors import Processor
from mpjax.sampling.token_lists import NO_ID, require_known

Class = TypeVar("Class")


@typing.dataclass_transform(frozen_default=True)
def _static(cls: type[Class]) -> type[Class]:
    """A frozen dataclass without arrays, as a pytree."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(cls, data_fields=[], meta_fields=names)


class TokenRule(Processor):
    """A rule of a Sampling, for all rows that have it; all of its fields are static."""

    def keys(self) -> dict[str, Any]:
        """The keys of generation_config.json, with their values, that ask for the rule."""
        raise NotImplementedError

    def sized(self, room: int) -> TokenRule:
        """The rule with memory for rows of up to `room` tokens."""
        return self


@_static
class Suppress(TokenRule):
    """Tokens that are never drawn, or not as the first new token.

    ids: token ids. only_first: whether they may be drawn later.
    """

    ids: tuple[int, ...]
    only_first: bool = False

    def keys(self) -> dict[str, Any]:
        """`begin_suppress_tokens` or `suppress_tokens`."""
        name = "begin_suppress_tokens" if self.only_first else "suppress_tokens"
        return {name: list(self.ids)}

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits, -inf for these tokens."""
        banned = logits.at[np.asarray(self.ids, np.int32)].set(-jnp.inf, mode="drop")
        return jnp.where(number == 0, banned, logits) if self.only_first else banned


@_static
class MinLength(TokenRule):
    """No end token before prompt and answer have `tokens` tokens. ids: the end tokens."""

    tokens: int
    ids: tuple[int, ...]

    def keys(self) -> dict[str, Any]:
        """`min_length`."""
        return {"min_length": self.tokens, "eos_token_id": list(self.ids)}

    def create(self, vocabulary: int) -> jax.Array:
        """The number of the prompt's tokens, int32."""
        return jnp.int32(0)

    def read(self, memory: Any, tokens: jax.Array, count: jax.Array) -> Any:
        """The number of the prompt's tokens."""
        return count.astype(jnp.int32)

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits, -inf for the ends of rows that are too short."""
        banned = logits.at[np.asarray(self.ids, np.int32)].set(-jnp.inf, mode="drop")
        # Where a constraint allows nothing but an end, the row ends.
        is_short = (memory + number < self.tokens) & jnp.isfinite(banned).any()
        return jnp.where(is_short, banned, logits)


@_static
class LengthDecay(TokenRule):
    """Makes ends likelier with each token: their logits grow by |logit| · (factorⁿ − 1).

    start, factor: n is the number of new tokens above `start`. ids: the tokens that end a text.
    """

    start: int
    factor: float
    ids: tuple[int, ...]

    def keys(self) -> dict[str, Any]:
        """`exponential_decay_length_penalty`."""
        found = [self.start, self.factor]
        return {"exponential_decay_length_penalty": found, "eos_token_id": list(self.ids)}

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits, with those of end tokens raised."""
        ids, over = np.asarray(self.ids, np.int32), (number - self.start).astype(jnp.float32)
        growth = jnp.float32(self.factor) ** jnp.maximum(over, 0) - 1
        own = logits.at[ids].get(mode="fill", fill_value=0)
        return logits.at[ids].add(
            jnp.where(jnp.isfinite(own), jnp.abs(own) * growth, 0), mode="drop"
        )


@_static
class NoRepeat(TokenRule):
    """No sequence of `size` tokens occurs twice in prompt and answer.

    room: the most tokens of a row, set by `sized`.
    """

    size: int
    room: int = 0

    def keys(self) -> dict[str, Any]:
        """`no_repeat_ngram_size`."""
        return {"no_repeat_ngram_size": self.size}

    def sized(self, room: int) -> NoRepeat:
        """The rule with memory for rows of up to `room` tokens."""
        return NoRepeat(self.size, room)

    def create(self, vocabulary: int) -> tuple[jax.Array, jax.Array]:
        """The tokens of a row, int32 [room], and their number."""
        return jnp.full(self.room, NO_ID), jnp.int32(0)

    def read(self, memory: Any, tokens: jax.Array, count: jax.Array) -> Any:
        """The tokens of a prompt."""
        places = jnp.arange(self.room)
        known = tokens.at[places].get(mode="fill", fill_value=NO_ID)
        return jnp.where(places < count, known, NO_ID), count.astype(jnp.int32)

    def __call__(self, logits: jax.Array, memory: Any, number: jax.Array) -> jax.Array:
        """The logits, -inf for tokens that would repeat a sequence."""
        tokens, count = memory
        before, found = self.size - 1, jnp.ones(self.room, bool)
        for place in range(before):
            newest = tokens[jnp.maximum(count - before + place, 0)]
            found &= jnp.roll(tokens, -place) == newest
        is_next = found & (jnp.arange(self.room) + before < count)
        banned = jnp.where(is_next, jnp.roll(tokens, -before), NO_ID)
        return logits.at[banned].set(-jnp.inf, mode="drop")

    def advance(self, memory: Any, token: jax.Array, is_new: jax.Array) -> Any:
        """The tokens with a new one."""
        tokens, count = memory
        place = jnp.where(is_new, count, self.room)
        return tokens.at[place].set(token, mode="drop"), count + is_new.astype(jnp.int32)


@_static
class Typical(TokenRule):
    """Draws the tokens whose information, −ln p, is nearest to the entropy (Meister et al., 2023).

    mass: the probability that they have together, above 0 and below 1.
    """

    filters = True
    mass: float

    def keys(self) -> dict[str, Any]:
        """`typical_p`."""
        return {"typical_p": self.mass}

    def filter(self, logits: jax.Array) -> jax.Array:
        """The logits, -inf for tokens that are not among the nearest with that mass."""
        logprobs = jax.nn.log_softmax(logits)
        away = jnp.abs(-logprobs - _entropy(logprobs))
        order = jnp.argsort(away)
        sums = jnp.cumsum(jnp.exp(logprobs)[order])
        last = jnp.minimum((sums < self.mass).sum(), len(logits) - 1)
        return jnp.where(away <= away[order][last], logits, -jnp.inf)


@_static
class Cutoff(TokenRule):
    """Draws the tokens above a probability, and the likeliest (Hewitt et al., 2022).

    epsilon: the probability, above 0 and below 1. by_entropy: whether it is at most √epsilon ·
        exp(−entropy), too (eta sampling).
    """

    filters = True
    epsilon: float
    by_entropy: bool = False

    def keys(self) -> dict[str, Any]:
        """`epsilon_cutoff` or `eta_cutoff`."""
        return {"eta_cutoff" if self.by_entropy else "epsilon_cutoff": self.epsilon}

    def filter(self, logits: jax.Array) -> jax.Array:
        """The logits, -inf for tokens of lower probability."""
        logprobs, least = jax.nn.log_softmax(logits), jnp.float32(self.epsilon)
        if self.by_entropy:
            least = jnp.minimum(least, jnp.sqrt(least) * jnp.exp(-_entropy(logprobs)))
        is_kept = (jnp.exp(logprobs) >= least) | (logits >= logits.max())
        return jnp.where(is_kept, logits, -jnp.inf)


def _entropy(logprobs: jax.Array) -> jax.Array:
    """The entropy in nats of a distribution, from its log-probabilities."""
    return -jnp.where(jnp.isfinite(logprobs), jnp.exp(logprobs) * logprobs, 0).sum()


def read_rules(rules: Any) -> tuple[TokenRule, ...] | None:
    """The checked field `rules` of a Sampling; None for none. Raises ValueError."""
    found = () if rules is None else rules
    if not isinstance(found, Sequence) or not all(isinstance(one, TokenRule) for one in found):
        raise ValueError(f"rules are {shown(rules)}: expected a tuple of rules, such as NoRepeat")
    return tuple(found) or None


def require_rules(rules: Sequence[TokenRule] | None, vocabulary: int) -> None:
    """Raises ValueError for token ids in rules that are outside the vocabulary."""
    for one in rules or ():
        require_known("rules", np.asarray(getattr(one, "ids", ()), np.int64), vocabulary)


# Keys of generation_config.json, and their rules by the key's value and the ids that end a text.
Reader = Callable[[Any, tuple[int, ...]], TokenRule]


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _is_decay(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2 or type(value[1]) not in (int, float):
        return False
    return _is_whole(value[0]) and bool(value[1] > 0)


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1


_IDS, _WHOLE = "a list of token ids", "a whole number"
_SHARE = "a number above 0 and below 1"
KEYS: dict[str, tuple[Callable[[Any], bool], str, Reader]] = {
    "suppress_tokens": (_are_ids, _IDS, lambda ids, _: Suppress(tuple(ids))),
    "begin_suppress_tokens": (_are_ids, _IDS, lambda ids, _: Suppress(tuple(ids), True)),
    "min_length": (_is_whole, _WHOLE, MinLength),
    "no_repeat_ngram_size": (_is_whole, _WHOLE, lambda size, _: NoRepeat(size)),
    "exponential_decay_length_penalty": (
        _is_decay,
        "[start, factor]",
        lambda pair, ids: LengthDecay(pair[0], float(pair[1]), ids),
    ),
    # In the order in which transformers applies them.
    "typical_p": (_is_share, _SHARE, lambda mass, _: Typical(float(mass))),
    "epsilon_cutoff": (_is_share, _SHARE, lambda least, _: Cutoff(float(least))),
    "eta_cutoff": (_is_share, _SHARE, lambda least, _: Cutoff(float(least), True)),
}
NEED_ENDS = ("min_length", "exponential_decay_length_penalty")


@functools.cache
def sized(rules: tuple[TokenRule, ...], room: int) -> tuple[TokenRule, ...]:
    """The rules with memory for rows of up to `room` tokens."""
    return tuple(one.sized(room) for one in rules)


def read_rows_rules(samplings: Sequence[Any], room: int) -> tuple[TokenRule, ...]:
    """The rules of a batch, with memory for `room` tokens. Raises ValueError if rows differ."""
    first, *others = (one.rules for one in samplings)
    if any(one != first for one in others):
        raise ValueError("sampling has rows with different rules: expected the same for all rows")
    return sized(first or (), room)
