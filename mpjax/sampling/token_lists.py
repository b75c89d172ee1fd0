"""Reads a Sampling's lists of token ids: stop ids, allowed ids, biases and bad words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import are_between, as_array, is_known, shown

NO_ID = np.iinfo(np.int32).max  # padding of lists of ids; in no vocabulary
MOST_BIASES = 300  # OpenAI's limit
MOST_BAD_WORDS, LONGEST_BAD_WORD = 64, 8


def read_ids(name: str, ids: Any) -> Any:
    """Ids as int32 [any number], or None. Raises ValueError for other values."""
    if ids is None:
        return None
    # Python and NumPy integers stay on the host, where requests use them.
    is_on_host = isinstance(ids, list | tuple) and all(
        type(it) is int and abs(it) < 2**63 for it in ids
    )
    is_on_host |= isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.signedinteger)
    wrong = f"{name} are {shown(ids)}: expected a list of token ids"
    try:
        found: Any = np.asarray(ids, np.int64) if is_on_host else as_array(name, ids)
    except ValueError as error:
        raise ValueError(wrong) from error
    if found.ndim != 1 or (found.size and not jnp.issubdtype(found.dtype, jnp.integer)):
        raise ValueError(wrong)
    # The vocabulary size is not known here; `require_known` checks it.
    if not are_between(found, 0, NO_ID - 1):
        raise ValueError(f"{name} are {found.tolist()}: expected each from 0 to 2**31 - 2")
    return found.astype(jnp.int32) if isinstance(found, jax.Array) else found.astype(np.int32)


def read_allowed(ids: Any) -> Any:
    """The ids of allowed tokens, int32 [number], or None. Raises ValueError."""
    found = read_ids("allowed_ids", ids)
    if found is not None and not len(found):
        raise ValueError("allowed_ids are empty, which allows no token: expected one id or more")
    return found


def read_biases(biases: Any) -> Any:
    """Biases as ids int32 [number] and values float32 [number]; None without biases.

    biases: a mapping from ids to finite numbers, or a pair of lists or arrays. Raises ValueError.
    """
    name, most = "logit_bias", float(np.finfo(np.float32).max)
    if biases is None or (isinstance(biases, Mapping) and not biases):
        return None
    if isinstance(biases, Mapping):
        biases = tuple(biases), tuple(biases.values())
    if not (isinstance(biases, tuple) and len(biases) == 2):
        raise ValueError(f"{name} is {shown(biases)}: expected a mapping of token ids to numbers")
    ids, values = read_ids(f"{name}'s token ids", biases[0]), biases[1]
    if is_array := isinstance(values, np.ndarray | jax.Array):
        is_right = any(jnp.issubdtype(values.dtype, kind) for kind in (jnp.floating, jnp.integer))
    else:
        is_right = isinstance(values, list | tuple)
        is_right = is_right and all(type(it) in (int, float) for it in values)
    if not is_right or not are_between(values, -most, most):
        raise ValueError(
            f"{name} is {shown(biases)}: expected finite numbers by token id, up to {most:.1e}"
        )
    values = values if is_array else np.asarray(values, np.float32)
    if np.ndim(ids) != 1 or np.shape(values) != np.shape(ids):
        raise ValueError(f"{name} has {np.shape(ids)} token ids and {np.shape(values)} numbers")
    if len(ids) > MOST_BIASES:
        raise ValueError(f"{name} has {len(ids)} token ids: expected at most {MOST_BIASES}")
    return ids, values.astype(np.float32)


def read_bad_words(words: Any) -> Any:
    """Bad words as ids int32 [number, LONGEST_BAD_WORD], padded in front; None without any.

    words: a list of lists of ids; or such an array. Raises ValueError.
    """
    if words is None or not is_known(words):
        return words
    if isinstance(words, np.ndarray | jax.Array) and words.ndim == 2:
        words = [[i for i in word if i != NO_ID] for word in words.tolist()]
    is_lists = isinstance(words, list | tuple) and all(isinstance(w, list | tuple) for w in words)
    if not is_lists or not all(type(i) is int and 0 <= i < NO_ID for w in words for i in w):
        raise ValueError(f"bad_words are {shown(words)}: expected a list of lists of token ids")
    if len(words) > MOST_BAD_WORDS:
        raise ValueError(f"there are {len(words)} bad_words: expected at most {MOST_BAD_WORDS}")
    if any(not 1 <= len(word) <= LONGEST_BAD_WORD for word in words):
        lengths = sorted({len(word) for word in words})
        raise ValueError(
            f"bad_words have {lengths} tokens: expected 1 to {LONGEST_BAD_WORD} in each"
        )
    pad = [NO_ID] * LONGEST_BAD_WORD
    padded = [[*pad, *word][-LONGEST_BAD_WORD:] for word in words]
    return np.asarray(padded, np.int32) if padded else None


def require_known(name: str, ids: Any, vocabulary: int) -> None:
    """Raises ValueError for ids outside the vocabulary. Padding and traced ids are not checked."""
    if ids is None or not is_known(ids):
        return
    found = np.asarray(ids)
    found = found[found != NO_ID]
    if not are_between(found, 0, vocabulary - 1):
        raise ValueError(
            f"{name} are {found.tolist()}: expected each from 0 to {vocabulary - 1}, the model's "
            "vocabulary"
        )
