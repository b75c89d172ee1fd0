from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.attention.scenes import kernel, scene
from tests.pallas_kernels.oracles import GATES, NUMPY_DTYPES
from tests.sweeps import combinations, in_sweep

# Numbers of all kinds, in kernels that other files run too.
pytestmark = pytest.mark.any_version


# Around the ends of tiles of 32, 64 and 128 keys, and around their middles.
EDGES = [0, 1, 30, 31, 32, 62, 63, 64, 126, 127, 128]


@pytest.mark.parametrize(
    ("text", "heads", "tokens", "splits", "window"),
    [
        ("KV16", (1, 2), 1, 2, 64),
        ("KV16", (1, 2), 20, 1, None),  # wide tiles, of which the first need no mask
        ("KV8", (1, 12), 1, 3, None),
    ],
)
def test_rows_see_each_key_up_to_their_own_around_the_ends_of_tiles(
    text, heads, tokens, splits, window, rng
):
    starts = EDGES if tokens == 1 else EDGES[-6:]
    test = scene(rng, text, "bfloat16", heads=heads, starts=starts, counts=[tokens] * len(starts))
    out = kernel(*test.arguments, splits=splits, window=window)
    for row, start in enumerate(starts):  # one key too many would hardly count in the mean of all
        error = test.alone(row).error(out[row : row + 1], window=window)
        assert error < GATES["bfloat16"], f"{tokens} tokens from position {start} on"


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("KV16", "bfloat16"),
        ("KV2", "bfloat16"),
    ],
)
def test_sums_that_all_but_cancel_and_channels_that_stand_out(text, dtype, rng):
    """One shape for all kinds of numbers, so that they share a compiled kernel."""
    for kind in ("uniform", "outlier", "small"):
        test = scene(rng, text, dtype, kind=kind, starts=[639, 500], counts=[1, 1])
        error = test.error(kernel(*test.arguments, splits=2))
        assert error < GATES[dtype], kind


@pytest.mark.parametrize(
    ("text", "dtype", "share"), [("KV2", "bfloat16", 0.5), in_sweep("KV4c", "float16", 0.3)]
)
def test_steps_of_channels_lose_little_at_the_query(text, dtype, share, rng):
    """In the queries' 16 bits, query times step would lose more than the gate allows."""
    errors = []
    for _ in range(6):
        test = scene(rng, text, dtype, kind="outlier", starts=[639, 500], counts=[1, 1])
        test = dataclasses.replace(test, queries=test.queries * jnp.asarray(4, dtype))
        errors.append(test.error(kernel(*test.arguments, splits=2)))
    assert max(errors) < GATES[dtype]
    assert np.mean(errors) < GATES[dtype] * share


@pytest.mark.parametrize("text", ["KV16", "KV2"])
def test_scores_whose_exponents_are_rounded_stay_in_float16(text, rng):
    """From 2**24 on, an exponent may be rounded to what is beyond the largest float16."""
    test, scale = scene(rng, text, "float16", starts=[300], counts=[1]), 2.0**20.5
    for factor in np.geomspace(2.0**-2.5, 1, 7):
        smaller = dataclasses.replace(test, queries=test.queries * jnp.float16(factor))
        out = kernel(*smaller.arguments, splits=1, scale=scale)
        assert smaller.error(out, scale) < GATES["float16"], factor


@pytest.mark.parametrize(("kind", "bits"), [("positive", 13.5), ("positive", 15.5), ("near", 22.5)])
def test_small_weights_times_small_steps_do_not_vanish_in_float16(kind, bits, rng):
    """Many keys beside a sink that outweighs each of them."""
    test = scene(rng, "K16V8", "float16", kind=kind, starts=[4095], counts=[1], heads=(1, 1))
    test = dataclasses.replace(test, queries=test.queries * 0)
    sinks = jnp.full(1, bits * np.log(2), jnp.float32)
    out = kernel(*test.arguments, splits=1, sinks=sinks)
    assert test.error(out, sinks=sinks) < GATES["float16"]


@pytest.mark.one_of(2)
@combinations(
    1,
    text_and_dtype=[("KV2", "bfloat16"), ("K4cV8", "float16")],
    tokens=[1, 20],
    size=["small", "large"],
)
def test_queries_of_channels_may_have_any_size(text_and_dtype, tokens, size, rng):
    """float16 keeps them and queries apart: each query has its own power of two."""
    text, dtype = text_and_dtype
    test = scene(rng, text, dtype, starts=[300, 140], counts=[tokens, tokens])
    sizes = {"bfloat16": (2.0**-100, 2.0**100), "float16": (2.0**-8, 2.0**12)}
    factor = sizes[dtype][size == "large"]
    queries = test.queries * jnp.asarray(factor, dtype)
    out = kernel(queries, *test.arguments[1:], splits=2, scale=1 / 8 / factor)
    assert test.error(out, 1 / 8) < GATES[dtype]


@pytest.mark.parametrize("text", ["KV4"])
def test_slots_that_were_never_written_have_no_step(text, rng):
    test = scene(rng, text, "bfloat16", starts=[70, 3], counts=[1, 1], page_size=64)
    parameters = np.array(test.pages.value_parameters)  # [pages, heads, tokens]
    for length, table in zip((71, 4), np.asarray(test.span.block_tables), strict=True):
        for number, page in enumerate(table):
            parameters[page, :, max(0, length - 64 * number) :] = 0
    pages = dataclasses.replace(test.pages, value_parameters=jnp.asarray(parameters))
    test = dataclasses.replace(test, pages=pages)
    assert test.error(kernel(*test.arguments, splits=1)) < GATES["bfloat16"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("text", "dtype"), [in_sweep("KV8", "float16"), ("KV4t", "bfloat16"), ("KV4c", "bfloat16")]
)
def test_many_rows_see_keys_and_values_in_16_bits(text, dtype, rng):
    for kind in ("uniform", "outlier", "small"):
        test = scene(rng, text, dtype, kind=kind, starts=[600, 500], counts=[40, 33])
        # Keys with scales of channels are float16 in any case.
        of_keys = "float16" if text == "KV4c" else dtype
        keys, values = (
            x.astype(NUMPY_DTYPES[to]).astype(np.float64)
            for x, to in ((test.keys, of_keys), (test.values, dtype))
        )
        rounded = dataclasses.replace(test, keys=keys, values=values)
        error = rounded.error(kernel(*test.arguments, splits=2))
        assert error < GATES[dtype] / 2, kind


def test_powers_of_two_make_up_for_codes_that_are_subnormals(rng, attention_with_ptx):
    """Interpreted kernels decode codes to integers, so that other tests need no such powers."""
    lengths: dict[str, Any] = {"starts": [300, 140], "counts": [1, 1]}
    test = scene(rng, "KVfp8", "float16", kind="outlier", **lengths)
    assert test.error(kernel(*test.arguments, splits=2)) < GATES["float16"]


@pytest.mark.one_of(3)
@combinations(1, text=["KV16", "KV4"], behind=["poison", -1, 2**31 - 1], page_size=[16, 64, 128])
def test_what_the_table_says_behind_the_end_is_not_read(text, behind, page_size, rng):
    """A tile spans four pages, or is one, or a half; tables go on behind the last page in use."""
    starts = [start * page_size // 16 for start in (20, 3, 63)]
    test = scene(rng, text, "bfloat16", starts=starts, counts=[1, 1, 1], page_size=page_size)
    [poisoned] = set(range(test.pages.keys.shape[0])) - set(
        np.asarray(test.span.block_tables).ravel()
    )
    tables = np.array(test.span.block_tables)
    for row, start in zip(tables, starts, strict=True):
        row[start // page_size + 1 :] = poisoned if behind == "poison" else behind
    value = np.nan
    if text == "KV16":
        keys, values = (x.at[poisoned].set(value) for x in (test.pages.keys, test.pages.values))
        pages = dataclasses.replace(test.pages, keys=keys, values=values)
    else:  # scales and zeros that are NaN
        keys, values = (
            x.at[poisoned].set(0x7FFF7FFF)
            for x in (test.pages.key_parameters, test.pages.value_parameters)
        )
        pages = dataclasses.replace(test.pages, key_parameters=keys, value_parameters=values)
    poisoned_test = dataclasses.replace(test, pages=pages).moved(block_tables=jnp.asarray(tables))
    assert test.error(kernel(*poisoned_test.arguments, splits=1)) < GATES["bfloat16"]
