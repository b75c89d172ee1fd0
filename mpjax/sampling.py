"""Chooses the next token: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Everything here is a pure function of arrays and runs inside `jit`, `vmap` and `while_loop`. Each
row of a batch is drawn with its own key, so its token depends neither on its neighbours nor on the
size of the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import are_between, as_array, did_you_mean, nearest, shown
from mpjax.kernels.thresholds.api import threshold

FILTERS = ("top_k", "top_p", "min_p")
# Division by a smaller temperature could make logits infinite. At this one, already only the most
# likely token is drawn.
LEAST_TEMPERATURE = 2.0**-100
WHOLE = 2.0**30  # the weight of all tokens for top-p, which counts in parts of it


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token, and tokens that end a row; `None` switches a field off.

    Each field but stop_ids is a number, or an array [batch] with one number for each row. `None` is
    pytree structure and a number is a leaf, so `jit` traces again when a field is switched on or
    off, and not for another value of it.

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
      min_new_tokens: number of new tokens, 0 or above, before which no stop token is drawn and no
        stop string ends the row. The generation loop applies it: `sample` knows no lengths.
      stop_ids: ids of the tokens that end a row, a list of any length; `None` for the checkpoint's,
        which are the tokenizer's, or, without a tokenizer, those of config.json.

    Raises:
      ValueError: for a number outside these ranges, for an array that is not [batch], and for a
        filter without a temperature. The values of tracers are not checked.
    """

    temperature: jax.typing.ArrayLike | None = None
    top_k: jax.typing.ArrayLike | None = None
    top_p: jax.typing.ArrayLike | None = None
    min_p: jax.typing.ArrayLike | None = None
    repetition_penalty: jax.typing.ArrayLike | None = None
    min_new_tokens: jax.typing.ArrayLike | None = None
    stop_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", _stop_ids(self.stop_ids))
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
        """A Sampling from a Sampling, from a mapping of its fields, or from None, which is `usual`.

        Functions that take a Sampling accept all three. Raises ValueError for anything else.

        usual: a model's, which has the fields that a mapping leaves out; None is greedy. Filters of
            it go with its temperature, where that is switched off.
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

    def split(self, usual: Sequence[int], vocabulary: int | None = None) -> tuple[Sampling, Any]:
        """Splits off the stop ids, which are `usual` where `stop_ids` is None.

        vocabulary: the number of tokens that the model knows, if it is to be checked.

        Returns a Sampling without stop_ids, and the ids. The Sampling's min_new_tokens is a number
        (0 instead of None), so that one compiled loop serves both.

        Raises ValueError for a stop id outside the vocabulary, which could end nothing.
        """
        largest = 2**31 - 1 if vocabulary is None else vocabulary - 1
        if self.stop_ids is not None and not are_between(self.stop_ids, 0, largest):
            raise ValueError(
                f"stop_ids are {np.asarray(self.stop_ids).tolist()}: expected each from 0 to "
                f"{largest}, the model's vocabulary"
            )
        least = 0 if self.min_new_tokens is None else self.min_new_tokens
        ids = usual if self.stop_ids is None else self.stop_ids
        return dataclasses.replace(self, min_new_tokens=least, stop_ids=None), ids

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
}
_WHOLE = ("top_k", "min_new_tokens")
_NAMES = (*_RANGES, "stop_ids")


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
        # Larger numbers mean the same as the largest int32: no vocabulary and no text is larger.
        most = np.iinfo(np.int32).max
        bounded = np.clip(found, -most, most)
        value = jnp.asarray(bounded, dtype) if isinstance(value, jax.Array) else bounded
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    if np.ndim(value):
        return np.asarray(value, dtype)
    return int(value) if name in _WHOLE else float(value)


def _stop_ids(ids: Any) -> Any:
    """Stop ids int32 [any number], or None. Raises ValueError for anything else."""
    if ids is None:
        return None
    found = as_array("stop_ids", ids)
    if found.ndim != 1 or (found.size and not jnp.issubdtype(found.dtype, jnp.integer)):
        raise ValueError(f"stop_ids are {shown(found)}: expected a list of token ids")
    # The vocabulary is not known here: `Sampling.split` compares ids with it.
    if not are_between(found, 0, 2**31 - 1):
        raise ValueError(f"stop_ids are {found.tolist()}: expected each from 0 to 2**31 - 1")
    return found.astype(jnp.int32) if isinstance(found, jax.Array) else found.astype(np.int32)


def _read(name: str, value: Any) -> np.ndarray:
    """The numbers of a field, which may be nested lists, as float64.

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


def sample(
    logits: jax.Array,
    keys: jax.Array,
    sampling: Sampling | Mapping[str, Any] | None = None,
    seen: jax.Array | None = None,
    *,
    divided: bool = False,
) -> jax.Array:
    """Draws one token for each row.

    Args:
      logits: [batch, vocabulary], any float dtype; computed in float32.
      keys: typed PRNG keys [batch], one for each row (`row_keys`, `step_keys`). Greedy sampling
        does not use them.
      sampling: a Sampling, or a mapping of its fields; `None` is greedy.
      seen: bool [batch, vocabulary], whether a token is in the prompt or the text so far; needed
        for `repetition_penalty` and ignored without it.
      divided: whether devices have parts of the vocabulary's axis (static). Top-k and top-p then
        search for their thresholds in plain JAX, so that no device needs all logits. The draws are
        the same, except for rounding of the probabilities.

    Returns:
      Tokens int32 [batch]. Among equal logits a greedy row takes the lowest token id.

    Raises:
      ValueError: for shapes that do not match, or a repetition penalty without `seen`.
    """
    logits, sampling = as_array("sample: logits", logits), Sampling.of(sampling)
    logits = _penalised(logits, sampling, seen)
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if keys.shape != logits.shape[:1] or not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"keys are {keys.dtype} {keys.shape}: expected a typed key for each row of logits "
            f"{logits.shape}, as row_keys(seeds) makes them"
        )
    # The index of the maximum of logits plus Gumbel noise is a draw from their softmax. "high"
    # keeps the noise exact where it is largest, since the maximum over a large vocabulary lies
    # there.
    noise = jax.vmap(
        lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32, mode="high")
    )(keys)  # [batch, vocabulary]
    drawn = jnp.argmax(_filtered(logits, sampling, divided) + noise, axis=-1)
    temperature = _per_row(sampling.temperature, "temperature", logits)[:, 0]  # [batch]
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def process_logits(
    logits: jax.Array,
    sampling: Sampling | Mapping[str, Any],
    seen: jax.Array | None = None,
    *,
    divided: bool = False,
) -> jax.Array:
    """Logits that `sample` draws from, float32 [batch, vocabulary]; removed tokens have -inf.

    The steps and their order are Hugging Face's: repetition penalty, temperature, top-k, top-p,
    min-p, each on the result of the step before. A greedy row gets the penalty alone. Arguments
    and errors are those of `sample`.
    """
    logits, sampling = as_array("process_logits: logits", logits), Sampling.of(sampling)
    logits = _penalised(logits, sampling, seen)
    if sampling.greedy:
        return logits
    temperature = _per_row(sampling.temperature, "temperature", logits)
    return jnp.where(temperature > 0, _filtered(logits, sampling, divided), logits)


def _penalised(logits: jax.Array, sampling: Sampling, seen: jax.Array | None) -> jax.Array:
    if logits.ndim != 2:
        raise ValueError(f"logits have shape {logits.shape}: expected [batch, vocabulary]")
    logits = logits.astype(jnp.float32)
    if sampling.repetition_penalty is None:
        return logits
    if seen is None or seen.shape != logits.shape:
        found = "None" if seen is None else f"of shape {seen.shape}"
        raise ValueError(
            f"seen is {found}: repetition_penalty needs a bool array of shape {logits.shape} that "
            "marks the tokens of the prompt and of the text so far"
        )
    penalty = _per_row(sampling.repetition_penalty, "repetition_penalty", logits)
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(seen.astype(jnp.bool_), penalised, logits)


def _filtered(logits: jax.Array, sampling: Sampling, divided: bool = False) -> jax.Array:
    """Applies temperature, top-k, top-p and min-p; removed logits become -inf.

    Each filter is a threshold for each row. Logits equal to the threshold stay. Rows that are
    greedy, or have a filter switched off, are not searched for its threshold.
    """
    temperature = _per_row(sampling.temperature, "temperature", logits)
    divisor = jnp.maximum(temperature, LEAST_TEMPERATURE)
    logits = logits / jnp.where(temperature > 0, divisor, jnp.ones_like(temperature))
    search = functools.partial(threshold, implementation="reference" if divided else None)
    least = jnp.full((logits.shape[0], 1), -jnp.inf, jnp.float32)  # the smallest logit that stays
    if sampling.top_k is not None:
        top_k = jnp.maximum(_per_row(sampling.top_k, "top_k", logits, jnp.int32), 1)
        is_on = (temperature > 0) & (top_k < logits.shape[-1])
        least = search(logits, jnp.where(is_on, top_k, 0))
    if sampling.top_p is not None:
        top_p = _per_row(sampling.top_p, "top_p", logits)
        kept = jnp.where(logits >= least, logits, -jnp.inf)
        # Whole numbers, whose sums are exact: a token's fate does not depend on an order of sums.
        weights = jnp.round(jax.nn.softmax(kept, axis=-1) * WHOLE).astype(jnp.int32)
        wanted = jnp.maximum(jnp.ceil(top_p * WHOLE), 1).astype(jnp.int32)
        # A top_p of 1 keeps all tokens, whatever the rounding of the sum.
        wanted = jnp.where((temperature > 0) & (top_p < 1), wanted, 0)
        least = jnp.maximum(least, search(logits, wanted, weights))
    if sampling.min_p is not None:
        min_p = _per_row(sampling.min_p, "min_p", logits)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        least = jnp.maximum(least, peak + jnp.log(min_p))
    return jnp.where(logits >= least, logits, -jnp.inf)


def _per_row(value: Any, name: str, logits: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """A field as an array [batch, 1], or [1, 1] for one number. Raises ValueError."""
    value = jnp.asarray(value, dtype)
    if value.shape not in ((), logits.shape[:1]):
        raise ValueError(
            f"{name} has shape {value.shape}: logits of shape {logits.shape} need a number or "
            f"an array of shape {logits.shape[:1]}"
        )
    return value.reshape(-1, 1)


def pad_sampling(sampling: Sampling, batch: int, rows: int) -> Sampling:
    """Pads the arrays of a Sampling from [batch] to [rows] by repeating their last number.

    Raises ValueError for an array that is not [batch].
    """

    def pad(path: Any, value: Any) -> Any:
        if np.ndim(value) == 0 or path[0].name == "stop_ids":
            return value
        if np.shape(value) != (batch,):
            raise ValueError(
                f"{path[0].name} has shape {np.shape(value)}: a batch of {batch} needs a number or "
                f"an array of shape ({batch},)"
            )
        return np.pad(np.asarray(value), (0, rows - batch), "edge")

    return jax.tree_util.tree_map_with_path(pad, sampling)


def logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probability of each token under the softmax of the unmodified logits.

    Args:
      logits: [..., vocabulary], any float dtype; computed in float32.
      tokens: integers [...].

    Returns:
      float32 [...], natural logarithms; NaN for a row with a logit of NaN or +inf.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(jnp.isposinf(total), jnp.nan, chosen - total)
