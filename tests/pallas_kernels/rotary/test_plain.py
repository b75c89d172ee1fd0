"""The reference of rotary embedding and append, and its arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import rotate
from mpjax.kernels.rotary import reference
from tests.pallas_kernels.oracles import random_array, wide
from tests.pallas_kernels.rotary.heads import ROUNDING, head_error, scene


@pytest.mark.parametrize(
    ("bits", "dtype", "heads", "head_dim", "page_size", "tokens", "splits", "normed"),
    [
        (16, "float32", (4, 2), 64, 64, 5, 3, False),
        (16, "bfloat16", (2, 2), 128, 128, 1, 1, True),
        (8, "float16", (3, 1), 128, 64, 5, 3, False),
        (8, "float32", (4, 2), 96, 128, 1, 3, True),
        (4, "float16", (2, 2), 128, 128, 1, 3, True),
        (4, "bfloat16", (4, 2), 64, 64, 5, 1, False),
    ],
)
def test_rotate_and_append(bits, dtype, heads, head_dim, page_size, tokens, splits, normed, rng):
    """Without norms by quarter turns, so that all of it is exact."""
    sizes = {"heads": heads, "head_dim": head_dim, "page_size": page_size, "tokens": tokens}
    test = scene(rng, bits, dtype, splits=splits, normed=normed, quarters=not normed, **sizes)
    test.check(*test.run(reference.rotate_and_append))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotate_turns_pairs_as_complex_numbers(dtype, rng):
    x = random_array(rng, (2, 5, 3, 64), dtype)
    angles = rng.uniform(-100, 100, (2, 5, 32))
    cosines, sines = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    turned = rotate(x, cosines, sines)
    assert turned.dtype == dtype
    pairs = (wide(x)[..., :32] + 1j * wide(x)[..., 32:]) * np.exp(1j * angles[:, :, None])
    expected = np.concatenate([pairs.real, pairs.imag], -1)
    assert head_error(wide(turned), expected) < ROUNDING[dtype]


@pytest.mark.parametrize(("normed", "roundings"), [(False, 3), (True, 5)])
def test_every_step_is_rounded(normed, roundings, rng):
    """The product, norms and rotations: on a GPU, XLA would remove a cast there and back."""
    test = scene(rng, 16, "bfloat16", splits=3, normed=normed)
    append = functools.partial(reference.rotate_and_append, dtype=jnp.dtype("bfloat16"))
    program = jax.jit(append).lower(*test.arguments).as_text()
    assert program.count("stablehlo.reduce_precision") == roundings


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_values_are_rounded_before_they_are_coded_on_the_gpu(bits, rng):
    test = scene(rng, bits, "bfloat16", tokens=3, splits=2)
    terms, *others = test.arguments
    terms = random_array(rng, terms.shape, "float32")
    append = functools.partial(reference.rotate_and_append, dtype=jnp.dtype("bfloat16"))
    rounded = (terms[0] + terms[1]).astype("bfloat16")[None]
    (_, pages), (_, expected) = (jax.jit(append)(x, *others) for x in (terms, rounded))
    np.testing.assert_array_equal(pages.values, expected.values)
    np.testing.assert_array_equal(pages.value_parameters, expected.value_parameters)


def test_all_layers_share_the_loops_of_a_cpu():
    """XLA compiles each loop that it does not fuse, as a join is one, for each layer again."""
    x, angles = jnp.ones((1, 1, 9, 64)), jnp.ones((1, 1, 32))
    text = jax.jit(reference.rotate).lower(x, angles, angles).compile().as_text()
    assert "fusion(" in text
    assert "concatenate(" not in text
