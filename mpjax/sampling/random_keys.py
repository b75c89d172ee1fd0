"""PRNG keys of a batch: one for each row, made from seeds, and from it one for each step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import shown

THREEFRY = "threefry2x32"
SEEDS = range(-(2**63), 2**63)  # the range of int64
RANGE = "from -2**63 to 2**63 - 1"
EXPECTED = f"integers {RANGE} [batch], or keys: typed [batch], or raw uint32 [batch, 2]"


def row_keys(seeds: Any) -> jax.Array:
    """A typed PRNG key [batch] for each row. seeds, errors: as for `key_words`.

    The generator is threefry for any `jax_default_prng_impl`: with hardware generators, a row's
    numbers under `vmap` depend on the batch.
    """
    return jax.random.wrap_key_data(jnp.asarray(key_words(seeds)), impl=THREEFRY)


def step_keys(keys: jax.Array, step: Any) -> jax.Array:
    """Keys [batch] of a decoding step. step: an integer, or an array [batch] with one per row."""
    steps = jnp.broadcast_to(jnp.asarray(step, jnp.uint32), keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, steps)


def gumbel_noise(keys: jax.Array, vocabulary: int) -> jax.Array:
    """Gumbel noise float32 [rows, vocabulary] for keys [rows], exact in its largest values.

    argmax(logits + noise) is a draw from the softmax. Over a large vocabulary it depends on the
    largest noise values, hence mode "high".
    """
    draw = functools.partial(jax.random.gumbel, shape=(vocabulary,), dtype=jnp.float32, mode="high")
    noise: jax.Array = jax.vmap(draw)(keys)
    return noise


def key_words(seeds: Any, batch: int | None = None) -> Any:
    """The two words of each row's key, uint32 [batch, 2]; a NumPy array for untraced integers.

    seeds: integers [batch] in int64's range, or JAX keys: typed [batch], or raw uint32 [batch, 2].
        Seed n equals `jax.random.key(n, impl="threefry2x32")` with 64-bit types enabled; seeds from
        0 to 2**32 - 1 equal it without, too.
    batch: the expected number of seeds.

    Raises ValueError for keys of other generators, and seeds of a wrong number, shape or range.
    """
    words = _words(seeds)
    if batch is not None and len(words) != batch:
        raise ValueError(
            f"there are {len(words)} seeds for a batch of {batch}: expected one for each row"
        )
    return words


def only_seed(seed: Any) -> list[Any]:
    """The seed of a single row as a list for `key_words`. Raises ValueError."""
    try:
        key_words([seed], 1)
    except ValueError as error:
        expected = f"expected an integer {RANGE}, or a key of {THREEFRY}"
        raise ValueError(f"seed is {shown(seed)}: {expected}") from error
    return [seed]


def _words(seeds: Any) -> Any:
    wrong = f"seeds are {shown(seeds)}: expected {EXPECTED}"
    if not isinstance(seeds, jax.Array):
        try:
            is_list = isinstance(seeds, list | tuple)
            seeds = jnp.stack(seeds) if is_list and any(map(_is_key, seeds)) else np.asarray(seeds)
        except (TypeError, ValueError) as error:
            raise ValueError(wrong) from error
    if _is_key(seeds):
        kind = str(jax.random.key_impl(seeds))
        if seeds.ndim != 1 or kind != THREEFRY:
            raise ValueError(
                f"seeds are keys of {kind} {seeds.shape}: expected one of {THREEFRY} for each row, "
                f'as in jax.random.split(jax.random.key(0, impl="{THREEFRY}"), batch)'
            )
        return jax.random.key_data(seeds)
    if seeds.ndim == 2 and seeds.shape[1] == 2 and seeds.dtype == np.uint32:
        return seeds
    if seeds.ndim != 1 or not np.issubdtype(seeds.dtype, np.integer):
        raise ValueError(wrong)
    if isinstance(seeds, jax.core.Tracer):
        high = seeds >> 32 if seeds.dtype.itemsize == 8 else -(seeds < 0).astype(jnp.int32)
        return jnp.stack([high.astype(jnp.uint32), seeds.astype(jnp.uint32)], 1)
    seeds = np.asarray(seeds)
    if np.any(seeds >= SEEDS.stop):
        raise ValueError(wrong)
    seeds = seeds.astype(np.int64)
    return np.stack([seeds >> 32, seeds], 1).astype(np.uint32)


def following(seed: int, number: int) -> int:
    """The seed `number` after another; the smallest follows the largest."""
    return (seed - SEEDS.start + number) % 2**64 + SEEDS.start


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
