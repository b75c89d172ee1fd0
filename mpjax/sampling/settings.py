"""Sampling settings: `Sampling` for users, and `RowSettings` as arrays for programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import did_you_mean, is_known, nearest, shown
from mpjax.sampling.random_keys import key_words
from mpjax.sampling.rules import TokenRule, read_rules
from mpjax.sampling.token_lists import (
    NO_ID,
    read_allowed,
    read_bad_words,
    read_biases,
    read_ids,
    require_known,
)

FILTERS = ("top_k", "top_p", "min_p")
STOP_IDS_MULTIPLE = 8  # the width of stop ids in programs is a multiple of this
UNLIMITED = np.iinfo(np.int32).max  # as top_k: keeps all tokens; as max_new_tokens: no limit


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token, and stop ids; `None` switches a field off.

    Each field except the lists of ids is a number, or an array [batch] with one for each row.
    `None` is pytree structure and a number is a leaf, so `jit` traces again when a field is
    switched on or off, but not for another value.

    Attributes:
      temperature: divides the logits; `None` or 0 is greedy, and in an array, 0 makes its row
        greedy. If all rows are greedy, temperature and the three filters become `None`.
      top_k: keep the k most likely tokens, at least 1 (and those that tie with the last of them).
      top_p: keep the smallest set of most likely tokens whose probabilities sum to top_p, in
        (0, 1], and those that tie with the last of them (Holtzman et al., 2019). Probabilities are
        rounded to multiples of 2⁻³⁰ for the sum.
      min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1)
        (Nguyen et al., 2024).
      repetition_penalty: a seen token's logit is divided by it when positive and multiplied by it
        when negative; above 0, 1 changes nothing (Keskar et al., 2019, section 4.1).
      presence_penalty: subtracted from the logit of each new token that was drawn before (OpenAI).
      frequency_penalty: subtracted once for each time that the token was drawn before (OpenAI).
      min_new_tokens: the number of new tokens, 0 or above, before which no stop token is drawn and
        no stop string ends the row.
      logit_bias: biases added to the logits of token ids, such as {13: -2.5}, up to 300.
      allowed_ids: ids of the only tokens that may be drawn.
      bad_words: sequences of token ids that are never completed by a new token, such as [[13], [5,
        7]]: up to 64, of up to 8 ids each. A sequence may begin in the prompt.
      rules: what generation_config.json asks for beside these: `Suppress`, `MinLength`,
        `NoRepeat`, `LengthDecay`, `Typical` and `Cutoff` of `mpjax.sampling.rules`.
      stop_ids: ids of the tokens that end a row, a list of any length; `None` for the tokenizer's
        stop ids or, without a tokenizer, those of config.json.

    Raises:
      ValueError: for values outside these ranges, arrays of other shapes than [batch], and a filter
        without a temperature. The values of tracers are not checked.
    """

    temperature: jax.typing.ArrayLike | None = None
    top_k: jax.typing.ArrayLike | None = None
    top_p: jax.typing.ArrayLike | None = None
    min_p: jax.typing.ArrayLike | None = None
    repetition_penalty: jax.typing.ArrayLike | None = None
    min_new_tokens: jax.typing.ArrayLike | None = None
    stop_ids: Sequence[int] | None = None
    presence_penalty: jax.typing.ArrayLike | None = None
    frequency_penalty: jax.typing.ArrayLike | None = None
    logit_bias: Mapping[int, float] | Any = None
    allowed_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] | Any = None
    rules: Sequence[TokenRule] | None = None

    def __post_init__(self) -> None:
        for name, read in _LISTS.items():
            object.__setattr__(self, name, read(getattr(self, name)))
        for name, (accepts, expected) in _RANGES.items():
            value = _canonical(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if _concrete(value) and not bool(np.all(accepts(np.asarray(value)))):
                raise ValueError(f"{name} is {value}: expected a number {expected}")
        if _concrete(self.temperature) and not np.any(np.asarray(self.temperature)):
            for name in ("temperature", *FILTERS):
                object.__setattr__(self, name, None)
        elif self.temperature is None:
            for name in FILTERS:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is set but temperature is not, and greedy decoding ignores it: "
                        "pass a temperature too (1.0 leaves the distribution unchanged)"
                    )

    @classmethod
    def of(
        cls, sampling: Sampling | Mapping[str, Any] | None, usual: Sampling | None = None
    ) -> Sampling:
        """Converts a Sampling, a mapping of its fields, or None (gives `usual`) to a Sampling.

        Functions with an argument `sampling` accept all three. Raises ValueError for other types.

        usual: the model's own Sampling, for fields that a mapping leaves out; None is greedy. A
            mapping with temperature None also switches the filters of `usual` off.
        """
        usual = cls() if usual is None else usual
        if sampling is None:
            return usual
        if isinstance(sampling, Sampling):
            return sampling
        if not isinstance(sampling, Mapping):
            raise ValueError(
                f"sampling is {shown(sampling)}: expected a Sampling, or a mapping such as "
                "{'temperature': 0.7}"
            )
        for name in sampling:
            if name not in _NAMES:
                hint = did_you_mean(nearest(str(name), _NAMES))
                raise ValueError(f"sampling has {name!r}{hint}: expected {', '.join(_NAMES)}")
        fields = {name: getattr(usual, name) for name in _NAMES}
        if sampling.get("temperature", 1) is None:
            fields |= dict.fromkeys(FILTERS)
        return cls(**fields | dict(sampling))

    def __str__(self) -> str:
        """The settings in words, such as `temperature 0.6, top_p 0.95`, or `greedy`."""
        fields = {name: getattr(self, name) for name in _NAMES}
        texts = [f"{name} {shown(it)}" for name, it in fields.items() if it is not None]
        return ", ".join((["greedy"] if self.greedy else []) + texts)

    @property
    def greedy(self) -> bool:
        """Whether every row takes its most likely token."""
        return self.temperature is None


_RANGES: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "temperature": (lambda value: (value >= 0) & np.isfinite(value), "that is finite, 0 or above"),
    "top_k": (lambda value: value >= 1, "of 1 or above, or None to switch it off"),
    "top_p": (lambda value: (value > 0) & (value <= 1), "above 0 and at most 1"),
    "min_p": (lambda value: (value >= 0) & (value < 1), "of 0 or above and below 1"),
    "repetition_penalty": (
        lambda value: (value > 0) & np.isfinite(value),
        "that is finite and above 0",
    ),
    "min_new_tokens": (lambda value: value >= 0, "of 0 or above"),
    "presence_penalty": (np.isfinite, "that is finite"),
    "frequency_penalty": (np.isfinite, "that is finite"),
}
_LISTS: dict[str, Callable[[Any], Any]] = {
    "stop_ids": functools.partial(read_ids, "stop_ids"),
    "logit_bias": read_biases,
    "allowed_ids": read_allowed,
    "bad_words": read_bad_words,
    "rules": read_rules,
}
_WHOLE = ("top_k", "min_new_tokens")
_NAMES = (*_RANGES, *_LISTS)


def _concrete(value: Any) -> bool:
    return value is not None and not isinstance(value, jax.core.Tracer)


def _canonical(name: str, value: Any) -> Any:
    """Converts a field to one type, so that 1 and 1.0 share a trace.

    Returns a Python int (top_k, min_new_tokens) or float, or an array [batch] of int32 or float32.
    """
    if value is None:
        return None
    dtype = np.dtype(np.int32 if name in _WHOLE else np.float32)
    if not isinstance(value, jax.Array) or np.iscomplexobj(value):
        value = _read(name, value)
    if np.ndim(value) > 1:
        raise ValueError(
            f"{name} has shape {np.shape(value)}: expected a number or an array [batch]"
        )
    if name in _WHOLE and _concrete(value):
        found = np.asarray(value)
        if not np.all(np.isfinite(found)) or np.any(found != np.floor(found)):
            raise ValueError(f"{name} is {value}: expected a whole number")
        # Clip to int32: no vocabulary and no text is larger.
        most = np.iinfo(np.int32).max
        bounded = np.clip(found, -most, most)
        value = jnp.asarray(bounded, dtype) if isinstance(value, jax.Array) else bounded
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    if np.ndim(value):
        return np.asarray(value, dtype)
    return int(value) if name in _WHOLE else float(value)


def _read(name: str, value: Any) -> np.ndarray:
    """A field's numbers, which may be nested lists, as a float64 array.

    Raises ValueError for anything but real numbers.
    """
    try:
        if isinstance(value, str | bytes) or np.iscomplexobj(value):
            raise TypeError("NumPy would convert it, but it is not a real number")
        return np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{name} is {shown(value)}: expected a number or an array [batch]"
        ) from error


def _flatten(sampling: Sampling) -> tuple[tuple[Any, ...], None]:
    return tuple(getattr(sampling, name) for name in _NAMES), None


def _flatten_with_keys(sampling: Sampling) -> tuple[tuple[tuple[Any, Any], ...], None]:
    key = jax.tree_util.GetAttrKey
    return tuple((key(name), getattr(sampling, name)) for name in _NAMES), None


def _unflatten(_: None, leaves: Any) -> Sampling:
    # The constructor is not called, as `register_dataclass` would do: leaves may be tracers, axes
    # or bare objects, and a temperature that becomes 0 must stay a leaf.
    sampling = object.__new__(Sampling)
    for name, leaf in zip(_NAMES, leaves, strict=True):
        object.__setattr__(sampling, name, leaf)
    return sampling


jax.tree_util.register_pytree_with_keys(Sampling, _flatten_with_keys, _unflatten, _flatten)


# Neutral values, for rows without a setting beside rows with it.
_NEUTRAL: dict[str, int | float] = {
    "temperature": 0.0,
    "top_k": UNLIMITED,
    "top_p": 1.0,
    "min_p": 0.0,
    "min_new_tokens": 0,
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[*_NEUTRAL, "max_new_tokens", "stop_ids", "key_words", "top_logprobs"],
    meta_fields=["varied"],
)
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """Sampling settings and stop conditions of a program's rows, as arrays with an entry per row.

    A field that is None is off for all rows; None is pytree structure, so `jit` compiles a program
    without it. Otherwise each row has a value, which may be neutral.

    temperature (0 is greedy), top_p (1 keeps all tokens), min_p (0 keeps all): float32 [rows], or
        None. top_k: int32 [rows] (UNLIMITED keeps all), or None. Their meaning is as in Sampling.
        Penalties, biases and lists of tokens are processors (`controls`).
    min_new_tokens: int32 [rows], number of new tokens before which no stop id is drawn; or None.
    max_new_tokens: int32 [rows], number of new tokens at which a row ends.
    stop_ids: int32 [rows, number], stop ids of each row, padded with NO_ID.
    key_words: uint32 [rows, 2], the row's PRNG key.
    top_logprobs: int32 [rows], how many of the likeliest tokens to return for each new token; or
        None.
    varied: whether filters and top_logprobs are computed only if a row of the batch uses them
        (static). The check makes the device wait for the host.
    """

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    min_new_tokens: Any = None
    max_new_tokens: Any = None
    stop_ids: Any = None
    key_words: Any = None
    top_logprobs: Any = None
    varied: bool = False

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        rows: int,
        *,
        max_new_tokens: Any = UNLIMITED,
        stop_ids: Sequence[int] = (),
        seeds: Any = None,
        vocabulary: int = UNLIMITED,
    ) -> RowSettings:
        """The settings of rows.

        samplings: one for all rows, whose fields may be arrays [rows]; or one for each row.
        max_new_tokens: a number for all rows, or an array [rows]. stop_ids: for rows whose Sampling
        has none. seeds: of each row, as for `key_words`; row indices by default. vocabulary: the
        model's vocabulary size, against which stop ids are checked.

        min_new_tokens is never None here but 0, so that one program serves both.

        Raises ValueError for arrays of another shape than [rows], and for a stop id outside the
        vocabulary.
        """
        fields: dict[str, Any] = {}
        for name, neutral in _NEUTRAL.items():
            values = [getattr(one, name) for one in samplings]
            if name == "min_new_tokens" or any(value is not None for value in values):
                values = [neutral if value is None else value for value in values]
                fields[name] = by_row(name, values, rows, _dtype(name))
        ids = [stop_ids if one.stop_ids is None else one.stop_ids for one in samplings]
        for found in ids:
            require_known("stop_ids", found, vocabulary)
        words = key_words(np.arange(rows) if seeds is None else seeds, rows)
        return cls(
            **fields,
            max_new_tokens=by_row("max_new_tokens", [max_new_tokens], rows, np.int32),
            stop_ids=_padded_ids(ids, rows),
            key_words=words,
        )

    @property
    def greedy(self) -> bool:
        """Whether all rows are known to be greedy."""
        return self.temperature is None

    @property
    def likeliest(self) -> RowSettings:
        """The settings for rows that are known to take the argmax of unchanged logits.

        Such rows have reached min_new_tokens, have no processors, and ask for no top_logprobs.
        """
        off: dict[str, Any] = dict.fromkeys((*_NEUTRAL, "top_logprobs"))
        return dataclasses.replace(self, **off)

    @property
    def without_draws(self) -> RowSettings:
        """The settings for rows that are known to be greedy and to ask for no top_logprobs."""
        off: dict[str, Any] = dict.fromkeys(("temperature", *FILTERS, "top_logprobs"))
        return dataclasses.replace(self, **off)

    def filled(self, stop_ids: int) -> RowSettings:
        """The settings with neutral values instead of None, as NumPy arrays, and varied.

        stop_ids: the width to which the rows' stop ids are padded.
        """
        rows = len(self.max_new_tokens)
        fields = {name: getattr(self, name) for name in (*_NEUTRAL, "top_logprobs")}
        for name, value in fields.items():
            neutral = _NEUTRAL.get(name, 0)
            found = neutral if value is None else value
            fields[name] = np.full(rows, found, _dtype(name))
        ids = np.full((rows, stop_ids), NO_ID, np.int32)
        ids[:, : self.stop_ids.shape[1]] = self.stop_ids
        return dataclasses.replace(self, **fields, stop_ids=ids, varied=True)

    def rows(self, index: jax.Array) -> RowSettings:
        """The settings of some rows, int32 [any number]."""
        return jax.tree.map(lambda each: each[index], self)

    def repeated(self, positions: int) -> RowSettings:
        """The settings of a batch in which each row is repeated `positions` times."""
        return jax.tree.map(lambda each: jnp.repeat(each, positions, axis=0), self)

    def stops(self, tokens: jax.Array) -> jax.Array:
        """Whether tokens, int32 [rows or 1, number], are their rows' stop ids: bool [rows, …]."""
        number = self.stop_ids.shape[1]
        found = jnp.zeros(jnp.broadcast_shapes(tokens.shape, (len(self.stop_ids), 1)), bool)
        if number > 2 * STOP_IDS_MULTIPLE:
            return (tokens[..., None] == self.stop_ids[:, None]).any(-1)
        # XLA fuses comparisons into the consumer, but not a reduction.
        for column in range(number):
            found |= tokens == self.stop_ids[:, column, None]
        return found


# The type of the argument `sampling`: one for all prompts, or a list with one for each.
Samplings = Sampling | Mapping[str, Any] | Sequence[Sampling | Mapping[str, Any] | None] | None


def read_samplings(sampling: Samplings, rows: int, usual: Sampling | None = None) -> list[Sampling]:
    """The argument `sampling` as a list: one Sampling for all rows, or one for each.

    sampling: as for `Sampling.of`, or a list with one for each row. usual: as for `Sampling.of`.
    Raises ValueError for a list of another length.
    """
    if not isinstance(sampling, list | tuple):
        one: Any = sampling
        return [Sampling.of(one, usual)]
    if len(sampling) != rows:
        raise ValueError(
            f"sampling has {len(sampling)} entries for a batch of {rows}: expected one for all "
            "prompts, or a list with one for each"
        )
    return [Sampling.of(one, usual) for one in sampling]


def rows_of(samplings: Sequence[Sampling], rows: int) -> list[Sampling]:
    """One Sampling for each row, with scalar fields.

    samplings: one for all rows, whose fields may be arrays [rows]; or one for each row. Raises
    ValueError for arrays of another shape.
    """
    found = list(samplings) if len(samplings) == rows else [*samplings] * rows
    fields = {name: [getattr(one, name) for one in samplings] for name in _RANGES}
    arrays = {
        name: by_row(name, values, rows, np.float64).tolist()
        for name, values in fields.items()
        if any(map(np.ndim, values))
    }
    if not arrays:
        return found
    numbers = [dict(zip(arrays, own, strict=True)) for own in zip(*arrays.values(), strict=True)]
    return [dataclasses.replace(one, **own) for one, own in zip(found, numbers, strict=True)]


def _dtype(name: str) -> Any:
    """The dtype of a field of RowSettings."""
    return np.float32 if isinstance(_NEUTRAL.get(name), float) else np.int32


def by_row(name: str, values: Sequence[Any], rows: int, dtype: Any) -> Any:
    """A field as an array [rows], from one number or array for all rows, or a number for each.

    Raises ValueError for arrays of another shape.
    """
    is_one = len(values) == 1
    shape = next((np.shape(value) for value in values if np.ndim(value)), ())
    if shape and not (is_one and shape == (rows,)):
        raise ValueError(
            f"{name} has shape {shape}: a batch of {rows} needs a number or an array of shape "
            f"({rows},), and a row of its own settings a number"
        )
    found = values[0] if is_one else values
    if not all(map(is_known, values)):
        return jnp.broadcast_to(jnp.asarray(found).astype(dtype), (rows,))
    # Clip to UNLIMITED, int32's maximum, which means no limit as max_new_tokens and as top_k.
    bounded = np.minimum(found, UNLIMITED) if dtype == np.int32 and np.ndim(found) else found
    bounded = min(bounded, UNLIMITED) if isinstance(bounded, int) else bounded
    return np.broadcast_to(np.asarray(bounded, dtype), (rows,)).copy()


def _padded_ids(ids: Sequence[Any], rows: int) -> Any:
    """Padded stop ids int32 [rows, number], from one list for all rows or one for each."""
    number = -(-max(len(found) for found in ids) // STOP_IDS_MULTIPLE) * STOP_IDS_MULTIPLE
    xp: Any = np if all(map(is_known, ids)) else jnp
    nothing = np.full(number, NO_ID, np.int32)
    padded = [xp.concatenate([xp.asarray(found, np.int32), nothing[len(found) :]]) for found in ids]
    return xp.stack(padded if len(ids) == rows else padded * rows)
