from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import (
    HeadNorms,
    UnsupportedError,
    append,
    rotate_and_append,
)
from tests.pallas_kernels.rotary.heads import scene


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_implementations_agree(implementation, rng, interpreted_triton):
    test = scene(rng, 8, "bfloat16", tokens=2, splits=3, quarters=True)
    run = functools.partial(rotate_and_append, implementation=implementation)
    test.check(*test.run(run))


@pytest.mark.parametrize("implementation", ["triton"])
def test_beside_a_residual_it_is_a_rotation_and_an_append(implementation, rng, interpreted_triton):
    check_beside_a_residual(implementation, rng)


@pytest.mark.gpu
def test_beside_a_residual_it_is_a_rotation_and_an_append_on_the_gpu(rng):
    check_beside_a_residual("triton", rng)


def check_beside_a_residual(implementation, rng):
    """Three tokens at once, and one by one; the third sequence goes on to the next block."""
    test = scene(rng, "KV4c", "bfloat16", page_size=128, tokens=3, quarters=True)
    before = test.pages
    keys, values = jnp.asarray(test.turned(test.places.keys, 1)), jnp.asarray(test.places.values)
    step = functools.partial(rotate_and_append, dtype="bfloat16", implementation=implementation)
    step = jax.jit(step)

    def equal(one, other):
        jax.tree.map(np.testing.assert_array_equal, one, other)

    write = jax.jit(functools.partial(append, implementation="reference"))
    expected = write(before, keys, values, test.places.span())
    queries, pages = step(*test.arguments)
    equal((queries, pages), (test.turned(test.queries, 0), expected))
    pages = before
    for token in range(3):
        terms, *where = test.token(token)
        query, pages = step(terms, pages, *where)
        equal(query, np.asarray(queries)[:, token : token + 1])
    equal(dataclasses.replace(pages, residual=None), dataclasses.replace(expected, residual=None))
    assert (np.asarray(pages.keys) != np.asarray(before.keys)).any()


@pytest.mark.parametrize(("bits", "implementation"), [(8, "triton"), ("KV4c", "reference")])
def test_tokens_can_be_varlen(bits, implementation, rng, interpreted_triton):
    check_varlen(bits, implementation, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [16, 8, "KV4c"])
def test_tokens_can_be_varlen_on_the_gpu(bits, rng):
    check_varlen(bits, "triton", rng)


def check_varlen(bits, implementation, rng):
    """Bit by bit as with padding: four, of which one adds nothing, and two tokens of padding."""
    test = scene(rng, bits, "bfloat16", page_size=128, tokens=4, splits=3, normed=True)
    terms, before, span, rotation = test.arguments
    counts = test.places.counts
    assert counts.tolist() == [4, 0, 3, 4]

    def varlen(x):
        """[..., batch, tokens, channels] without the padding of sequences, and with some behind."""
        x = np.asarray(x)
        rows = [x[..., b, :count, :] for b, count in enumerate(counts)]
        return np.concatenate([*rows, x[..., 1, :2, :]], -2)

    run = functools.partial(rotate_and_append, implementation=implementation)
    expected, expected_pages = test.run(run)
    queries, pages = test.run(run, varlen(terms), before, span, rotation.map_angles(varlen))
    assert queries.shape == (13, 4, 64)
    jax.tree.map(np.testing.assert_array_equal, pages, expected_pages)
    real = np.arange(4) < counts[:, None]
    np.testing.assert_array_equal(np.asarray(queries)[:11], np.asarray(expected)[real])


@pytest.mark.parametrize("width", [16, 33, 64])
def test_angles_are_half_a_heads_channels(width, rng):
    """The kernel would read past the end of others, or those of another token."""
    test = scene(rng, 8, "bfloat16")
    wrong = jnp.ones((*test.rotation.cosines.shape[:-1], width))
    for name in ("cosines", "sines"):
        with pytest.raises(
            ValueError, match=r"expected .* and \[batch, tokens, 32\], half of"
        ) as e:
            call(test, **{name: wrong})
        assert str(wrong.shape) in str(e.value)


@pytest.mark.parametrize("shapes", [((64,), (32,)), ((1,), (64,)), ((4, 64), (2, 64))])
def test_norms_are_of_a_heads_channels(shapes, rng):
    norms = HeadNorms(*map(jnp.ones, shapes), 1e-6)  # type: ignore[call-arg]
    message = f"norms have weights of shapes {shapes[0]} for queries and {shapes[1]} for keys: exp"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(scene(rng, 8, "bfloat16"), norms=norms)


@pytest.mark.parametrize(
    ("channels", "heads"), [(511, (4, 2)), (512, (4, 3)), (512, (3, 2)), (640, (4, 3))]
)
def test_terms_must_fit_the_pages(channels, heads, rng):
    test = scene(rng, 8, "bfloat16")
    terms = np.ones((1, 4, 1, channels), np.float32)
    with pytest.raises(ValueError, match="rotate_and_append: terms have shape") as caught:
        call(dataclasses.replace(test, terms=terms), heads=heads)
    assert str(caught.value) == (
        f"rotate_and_append: terms have shape (1, 4, 1, {channels}), and the pages 2 heads of 64; "
        f"{heads[0]} query and {heads[1]} KV heads take {(heads[0] + 2 * heads[1]) * 64} channels"
    )


def call(test, implementation=None, **changes):
    """With changes of the rotation."""
    *others, rotation = test.arguments
    rotation = dataclasses.replace(rotation, **changes)
    return rotate_and_append(*others, rotation, dtype=test.dtype, implementation=implementation)


@pytest.mark.parametrize(
    ("bits", "dtype", "head_dim", "reason"),
    [
        (16, "float32", 64, "queries are float32, expected bfloat16 or float16"),
        (8, "float32", 64, "queries are float32, expected bfloat16 or float16"),
        (4, "bfloat16", 72, "head dimension 72 is not one of (64, 80, 96, 112, 128,"),
    ],
)
def test_what_the_kernel_cannot_do_goes_to_the_reference(
    bits, dtype, head_dim, reason, rng, pretend_gpu
):
    test = scene(rng, bits, dtype, head_dim=head_dim, splits=3, quarters=True)
    message = f"rotate_and_append runs as plain JAX on this GPU, which is slow: {reason}"
    with pytest.warns(UserWarning, match=re.escape(message)):
        test.check(*test.run(rotate_and_append))
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        call(test, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_implementations_agree_on_the_gpu(bits, dtype, rng):
    sizes = {"heads": (32, 8), "head_dim": 128, "page_size": 128, "splits": 4}
    for tokens in (1, 5):
        for quarters in (True, False):
            test = scene(
                rng, bits, dtype, tokens=tokens, quarters=quarters, normed=not quarters, **sizes
            )
            for name in ("triton", "reference"):
                test.check(*test.run(functools.partial(rotate_and_append, implementation=name)))
