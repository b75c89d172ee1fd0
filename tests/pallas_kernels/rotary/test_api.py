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
    KVLayout,
    PagedKVCache,
    Rotation,
    Span,
    UnsupportedError,
    append,
    device,
    rotate,
    rotate_and_append,
)
from mpjax.kernels.rotary import reference, triton
from tests.pallas_kernels.rotary.heads import scene
from tests.sweeps import in_sweep


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_implementations_agree(implementation, rng, interpreted_triton):
    test = scene(rng, 8, "bfloat16", tokens=2, splits=3, quarters=True)
    run = functools.partial(rotate_and_append, implementation=implementation)
    test.check(*test.run(run))


def test_it_is_a_rotation_and_an_append(rng):
    """The result is that of the public functions that it replaces, in their dtypes."""
    test = scene(rng, 4, "bfloat16", tokens=3)
    terms, before, span, rotation = test.arguments
    rotation = dataclasses.replace(rotation, transform_queries=False)
    queries, pages = test.run(rotate_and_append, terms, before, span, rotation)
    cosines, sines = rotation.cosines, rotation.sines
    keys, values = jnp.asarray(test.places.keys), jnp.asarray(test.places.values)

    @jax.jit
    def separate(queries, keys):
        queries, keys = (rotate(x, cosines, sines) for x in (queries, keys))
        return queries, append(before, keys, values, span)

    expected = separate(jnp.asarray(test.queries), keys)
    jax.tree.map(np.testing.assert_array_equal, (queries, pages), expected)


@pytest.mark.parametrize("implementation", ["triton", in_sweep("reference")])
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


def test_varlen_sequences_are_one_kernel_too(rng, pretend_gpu, lower_for_cuda):
    _, pages, span, rotation = scene(rng, 8, "bfloat16").arguments
    rotation = rotation.map_angles(lambda _: jax.ShapeDtypeStruct((300, 32), jnp.float32))
    append = functools.partial(rotate_and_append, dtype="bfloat16")
    terms = jax.ShapeDtypeStruct((1, 300, 512), jnp.bfloat16)
    program = lower_for_cuda(append, terms, pages, span, rotation)
    assert program.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert 'name = "rotate_and_append_kv8"' in program
    assert program.count("#stablehlo.output_operand_alias<") == 4


@pytest.mark.parametrize(
    ("terms", "angles"), [((512,), ()), ((1, 4, 512), (4, 1)), ((1, 4, 1, 512), (4,))]
)
def test_angles_are_those_of_the_tokens(terms, angles, rng):
    _, pages, span, rotation = scene(rng, 8, "bfloat16").arguments
    rotation = rotation.map_angles(lambda _: jnp.ones((*angles, 32)))
    with pytest.raises(ValueError, match="or all without the batch where tokens are varlen"):
        rotate_and_append(jnp.ones(terms), pages, span, rotation, dtype="bfloat16")


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
    norms = HeadNorms(*map(jnp.ones, shapes), 1e-6)
    message = f"norms have weights of shapes {shapes[0]} for queries and {shapes[1]} for keys: exp"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(scene(rng, 8, "bfloat16"), norms=norms)


def test_starts_and_counts_are_those_of_tokens(rng):
    terms, pages, span, rotation = scene(rng, 8, "bfloat16").arguments
    for change, message in (
        ({"counts": np.asarray(span.counts) + 2}, "counts are .* 0 to 1, the new"),
        ({"starts": np.asarray(span.starts) - 1000}, "starts are .*: expected 0 or above"),
    ):
        wrong = dataclasses.replace(span, **change)
        with pytest.raises(ValueError, match=f"rotate_and_append: {message}"):
            rotate_and_append(terms, pages, wrong, rotation, dtype="bfloat16")


def test_tokens_one_at_a_time_equal_all_at_once(rng, trace_counter):
    test = scene(rng, 8, "bfloat16", tokens=4, quarters=True)
    step = functools.partial(rotate_and_append, dtype="bfloat16")
    pages = jax.tree.map(jnp.copy, test.pages)  # donated below
    counted = trace_counter(step)
    step = jax.jit(counted, donate_argnums=1)
    queries = []
    for token in range(4):
        terms, *where = test.token(token)
        query, pages = step(terms, pages, *where)
        queries.append(np.asarray(query))
    assert counted.count == 1
    assert test.places.counts.tolist() == [4, 0, 3, 4]
    test.check(np.concatenate(queries, 1), pages)


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


def test_a_span_is_that_of_the_tokens(rng):
    terms, pages, span, rotation = scene(rng, 8, "bfloat16").arguments
    span = dataclasses.replace(span, counts=span.counts[:3])
    message = r"rotate_and_append: counts is int32 of shape \(3,\): expected int32 \[batch\], and"
    with pytest.raises(ValueError, match=message):
        rotate_and_append(terms, pages, span, rotation, dtype="bfloat16")
    rotation = rotation.map_angles(lambda x: x[0])
    with pytest.raises(ValueError, match=message):
        rotate_and_append(terms[:, 0], pages, span, rotation, dtype="bfloat16")


def call(test, implementation=None, **changes):
    """With changes of the rotation."""
    *others, rotation = test.arguments
    rotation = dataclasses.replace(rotation, **changes)
    return rotate_and_append(*others, rotation, dtype=test.dtype, implementation=implementation)


def test_unknown_implementations_are_refused(rng):
    message = "rotate_and_append: unknown implementation 'xla': expected triton or reference"
    with pytest.raises(ValueError, match=message):
        call(scene(rng, 8, "bfloat16"), implementation="xla")


def test_the_kernel_needs_a_gpu(rng, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: "there is no GPU")
    message = "rotate_and_append: 'triton' can't run: there is no GPU"
    with pytest.raises(UnsupportedError, match=message):
        call(scene(rng, 8, "bfloat16"), implementation="triton")


@pytest.mark.parametrize(
    ("bits", "dtype", "head_dim", "reason"),
    [
        (16, "float32", 64, "queries are float32, expected bfloat16 or float16"),
        (8, "float32", 64, "queries are float32, expected bfloat16 or float16"),
        (4, "bfloat16", 80, "head dimension 80 is not one of (64, 96, 128, 256)"),
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


@pytest.mark.parametrize("supported", [True, False])
def test_the_kernel_is_chosen_where_it_can_run(supported, rng, monkeypatch):
    reason = None if supported else "there is no GPU"
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: reason)
    monkeypatch.setattr(triton, "rotate_and_append", lambda *_, **__: "triton")
    monkeypatch.setattr(reference, "rotate_and_append", lambda *_, **__: "reference")
    test = scene(rng, 8, "bfloat16")
    assert call(test) == ("triton" if supported else "reference")
    assert call(test, implementation="reference") == "reference"


@pytest.mark.parametrize("bits", [8, 4])
def test_no_tokens_go_to_the_reference(bits, rng, pretend_gpu):
    test = scene(rng, bits, "bfloat16")
    terms, pages, span, rotation = test.arguments
    run = jax.jit(functools.partial(rotate_and_append, dtype="bfloat16"))
    none = rotation.map_angles(lambda x: x[:, :0])
    queries, written = run(terms[:, :, :0], pages, span, none)
    assert queries.shape == (4, 0, 4, 64)
    jax.tree.map(np.testing.assert_array_equal, written, pages)
    none = rotation.map_angles(lambda x: x[0, :0])
    queries, written = run(terms[:, 0, :0], pages, span, none)
    assert queries.shape == (0, 4, 64)
    jax.tree.map(np.testing.assert_array_equal, written, pages)


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


def test_rotate_is_the_reference_with_its_shapes_checked(rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 4, 16)), jnp.bfloat16)
    angles = jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.float32)
    found = rotate(x, jnp.cos(angles), jnp.sin(angles))
    np.testing.assert_array_equal(found, reference.rotate(x, jnp.cos(angles), jnp.sin(angles)))
    same = rotate(x, jnp.cos(angles[:1]), jnp.sin(angles[:1]))  # the same positions in all rows
    np.testing.assert_array_equal(same[0], found[0])
    for heads, turns in (((2, 3, 16), (2, 3, 8)), ((2, 3, 4, 15), (2, 3, 7)), (x.shape, (2, 4, 8))):
        with pytest.raises(
            ValueError, match=r"rotate: x has shape .*: expected \[batch, tokens, he"
        ):
            rotate(jnp.ones(heads), jnp.ones(turns), jnp.ones(turns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norms": (1, 2)}, r"norms is \(1, 2\): expected a HeadNorms, or None"),
        ({"norms": HeadNorms([1.0] * 64, [1.0] * 64, -1)}, "norms: epsilon is -1: expected a fin"),
        ({"dtype": "int8"}, "dtype is 'int8': expected a dtype, such as bfloat16"),
        ({"span": "all"}, "span is 'all': expected a Span"),
        ({"rotation": 3}, "rotation is 3: expected a Rotation"),
        (
            {"pages": "cache"},
            "pages is 'cache': expected a KVPages, one of a PagedKVCache's layers",
        ),
    ],
)
def test_what_is_wrong_is_named(change, message):
    cache = PagedKVCache.create(KVLayout(2, 64), layers=1, batch=1, max_tokens=16)
    norms = HeadNorms([1.0] * 64, [1.0] * 64, 1e-6)
    angles = jnp.ones((1, 1, 32))
    arguments = {
        "terms": jnp.ones((1, 1, 1, 512)),
        "pages": cache.layers[0],
        "span": Span(cache.block_tables, [0], [1]),
        "rotation": Rotation(angles, angles, (4, 2), norms),
        "dtype": "bf16",
    }
    rotate_and_append(**arguments)
    if "norms" in change:
        change = {"rotation": dataclasses.replace(arguments["rotation"], **change)}
    with pytest.raises(ValueError, match=f"rotate_and_append: {message}"):
        rotate_and_append(**arguments | change)
