from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.sampling.random_keys import following, key_words, row_keys, step_keys


def test_step_keys_take_one_step_or_one_per_row():
    keys = row_keys([1, 2])
    rows = jax.random.key_data(step_keys(keys, jnp.asarray([3, 4])))
    for row, step in enumerate((3, 4)):
        np.testing.assert_array_equal(rows[row], jax.random.key_data(step_keys(keys, step))[row])
    assert not np.array_equal(rows[0], jax.random.key_data(step_keys(keys, 4))[0])


def test_row_keys_take_every_32_bit_seed_and_any_default_generator():
    seeds = [0, 1, 2**31, 2**32 - 1]
    data = jax.random.key_data(row_keys(seeds))
    assert len({tuple(row) for row in np.asarray(data).tolist()}) == 4
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(jax.random.key_data(row_keys(seeds)), data)
    np.testing.assert_array_equal(
        jax.random.key_data(jax.jit(row_keys)(jnp.asarray(seeds, jnp.uint32))), data
    )
    for bad in ([2**63], [-(2**63) - 1], [0.5], 3):
        with pytest.raises(ValueError, match="seeds are"):
            row_keys(bad)


def test_row_keys_take_every_64_bit_seed():
    """As JAX does with its 64-bit types; also where they are traced."""
    seeds = [-1, -(2**63), 2**63 - 1, 2**32, 5, -(2**31)]
    found = jax.random.key_data(row_keys(seeds))
    with jax.enable_x64(True):
        keys = [jax.random.key(seed, impl="threefry2x32") for seed in seeds]
        expected = jax.random.key_data(jnp.stack(keys))
        traced = jax.random.key_data(jax.jit(row_keys)(jnp.asarray(seeds)))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(traced, expected)
    narrow = jnp.asarray([-1, 5, -(2**31)], jnp.int32)
    for keys in (row_keys(narrow), jax.jit(row_keys)(narrow)):
        np.testing.assert_array_equal(jax.random.key_data(keys), expected[jnp.asarray([0, 4, 5])])


def test_seeds_follow_each_other_in_a_circle():
    assert [following(-1, number) for number in range(3)] == [-1, 0, 1]
    assert following(2**63 - 1, 1) == -(2**63)


def test_row_keys_are_seeds_as_keys():
    """Typed ones and raw ones, as arrays and as lists, also where they are traced."""
    seeds = [3, 2**32 - 1, 5]
    typed = jnp.stack([jax.random.key(seed, impl="threefry2x32") for seed in seeds])
    raw = jax.random.key_data(typed)
    expected = jax.random.key_data(row_keys(seeds))
    np.testing.assert_array_equal(expected, raw)
    for keys in (typed, raw, list(typed), list(raw), np.asarray(raw), tuple(typed)):
        np.testing.assert_array_equal(jax.random.key_data(row_keys(keys)), expected)
    for keys in (typed, raw):
        np.testing.assert_array_equal(jax.random.key_data(jax.jit(row_keys)(keys)), expected)
    # For two rows, two uint32 numbers are two seeds and no key.
    pair = jax.random.key_data(row_keys(np.asarray([3, 4], np.uint32)))
    np.testing.assert_array_equal(pair, [[0, 3], [0, 4]])


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (jax.random.key(0, impl="threefry2x32"), r"keys of threefry2x32 \(\): .*random\.split"),
        (
            jax.random.split(jax.random.key(0, impl="rbg"), 2),
            r"keys of rbg \(2,\): .* threefry2x32",
        ),
        (
            np.zeros((2, 4), np.uint32),
            r"seeds are uint32 of shape \(2, 4\): expected integers from -2.*63 - 1 \[batch\], or",
        ),
        (np.zeros((2, 2), np.int32), r"seeds are int32 of shape \(2, 2\): .* raw uint32"),
        (np.zeros((2, 2, 2), np.uint32), r"seeds are uint32 of shape \(2, 2, 2\)"),
        ([1, 2, 3], "there are 3 seeds for a batch of 2: expected one for each row"),
        (jax.random.split(jax.random.key(0, impl="threefry2x32"), 1), "there are 1 seeds"),
        ([jax.random.key(0), 1], r"seeds are \[.*, 1\]: expected integers"),
        ([[1], [2, 3]], r"seeds are \[\[1\], \[2, 3\]\]: expected integers"),
        ([2**70, 1], r"seeds are \[1180591620717411303424, 1\]: expected integers from"),
        ([2**63, 1], r"seeds are \[9223372036854775808, 1\]: expected integers from"),
        ("ab", "seeds are 'ab': expected"),
        (None, "seeds are None: expected"),
    ],
)
def test_seeds_that_are_none(seeds, message):
    with pytest.raises(ValueError, match=message):
        key_words(seeds, 2)
