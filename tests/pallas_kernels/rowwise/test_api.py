from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import (
    UnsupportedError,
    add_rms_norm,
    device,
    gated,
    gated_silu,
)
from mpjax.kernels.rowwise import reference, triton
from tests.pallas_kernels.oracles import random_array, relative_error, wide
from tests.pallas_kernels.rowwise.rows import (
    EPSILON,
    QUANTIZING,
    Rows,
    assert_result,
    parsed,
    run,
)

norm = functools.partial(add_rms_norm, epsilon=EPSILON)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("text", [None, "int8/int8"])
def test_implementations_agree(text, implementation, rng, interpreted_triton):
    keywords: dict[str, Any] = {"format": parsed(text), "implementation": implementation}
    rows = Rows.random(rng, (2, 3, 96), "bfloat16", splits=2, residual=True)
    stream, result = run(norm, *rows.arrays, **keywords)
    np.testing.assert_array_equal(wide(stream), wide(rows.stream()))
    assert_result(result, rows.normed(), "bfloat16", text)
    result = run(gated_silu, rows.arrays[0], dtype="float16", **keywords)
    assert_result(result, rows.gated(), "float16", text)


@pytest.mark.parametrize("text", [None, "int8/int8"])
def test_gelu_and_a_dtype_of_its_own(text, rng, interpreted_triton):
    """The kernel against the reference: Gemma's gate, and norms whose weights are float32."""
    rows = Rows.random(rng, (2, 3, 96), "bfloat16", splits=2, residual=True)
    terms, residual, weight = rows.arrays
    wider = weight.astype(jnp.float32)
    found, expected = (
        (
            run(
                *(gated, terms),
                **{"activation": "gelu", "dtype": "bfloat16"},
                **{"format": parsed(text), "implementation": name},
            ),
            run(
                *(norm, terms, residual, wider),
                **{"format": parsed(text), "dtype": "bfloat16", "implementation": name},
            ),
        )
        for name in ("triton", "reference")
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, wide(other)) < 0.005


def test_no_rows(pretend_gpu):
    format = parsed("int8/int8")
    stream, result = norm(jnp.ones((2, 0, 64)), None, jnp.ones(64, jnp.bfloat16), format=format)
    assert (stream.shape, stream.dtype) == ((0, 64), jnp.bfloat16)
    assert (result.shape, result.scales.shape) == ((0, 64), (0, 1))
    gated = gated_silu(jnp.ones((2, 3, 0, 64)), dtype="bfloat16", format=format)
    assert gated.shape == (3, 0, 32)
    for call in (
        lambda: norm(jnp.ones((2, 0, 8)), None, jnp.ones(8, jnp.bfloat16), implementation="triton"),
        lambda: gated_silu(jnp.ones((2, 0, 8)), dtype="bfloat16", implementation="triton"),
    ):
        with pytest.raises(UnsupportedError, match="'triton' can't run: there are no rows"):
            call()


@pytest.mark.parametrize(
    ("terms", "residual", "weight"),
    [
        ((2, 3, 64), None, (32,)),
        ((2, 3, 64), (2, 3, 64), (64,)),
        ((2, 3, 64), (4, 64), (64,)),
        ((2, 3, 64), None, (1, 64)),
        ((64,), None, (64,)),
    ],
)
def test_shapes_of_add_rms_norm_must_fit(terms, residual, weight):
    arrays = [None if shape is None else jnp.ones(shape) for shape in (terms, residual, weight)]
    with pytest.raises(ValueError, match="add_rms_norm: terms have shape") as caught:
        norm(*arrays)
    assert str(caught.value) == (
        f"add_rms_norm: terms have shape {terms}, the residual {residual} and the weight {weight};"
        " expected [splits, ..., H], [..., H] and [H]"
    )


@pytest.mark.parametrize("shape", [(1, 3, 65), (64,)])
def test_gated_silu_needs_pairs_of_channels(shape):
    with pytest.raises(
        ValueError, match=r"gated_silu: .*; expected \[splits, ..., 2·I\]"
    ) as caught:
        gated_silu(jnp.ones(shape), dtype="float32")
    assert str(shape) in str(caught.value)


def call_norm(dtype, text, **keywords):
    """Traced, not run."""
    weight, format = jnp.ones(64, dtype), parsed(text)
    return jax.eval_shape(
        lambda terms: norm(terms, None, weight, format=format, **keywords), jnp.ones((1, 3, 64))
    )


def call_gated(dtype, text, **keywords):
    """Traced, not run."""
    gate = functools.partial(gated_silu, dtype=dtype, format=parsed(text), **keywords)
    return jax.eval_shape(gate, jnp.ones((1, 3, 64)))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which implementations were called, in order."""
    names: list[str] = []

    def record(module: Any, name: str, function: str) -> None:
        plain = getattr(reference, function)

        def compute(*arguments: Any, **keywords: Any) -> Any:
            names.append(name)
            return plain(*arguments, **keywords)

        monkeypatch.setattr(module, function, compute)

    for function in ("add_rms_norm", "gated"):
        record(triton, "triton", function)
        record(reference, "reference", function)
    return names


@pytest.mark.parametrize(
    ("dtype", "capability", "text", "expected"),
    [
        ("bfloat16", 9.0, None, ["triton", "reference"]),
        ("float16", 9.0, "uint4:g64", ["triton", "reference"]),
        ("bfloat16", 9.0, "float8:g128/float8", ["triton", "reference"]),
        ("bfloat16", 9.0, "int8/int8", ["triton", "triton"]),
        ("float16", 8.0, "liquid4:g64/int8", ["triton", "triton"]),
        ("float16", 9.0, "float8:gK/float8", ["triton", "triton"]),
        ("bfloat16", 8.0, "float8:gK/float8", ["reference", "reference"]),
        ("float32", 9.0, "int8/int8", ["reference", "reference"]),
        ("bfloat16", None, "int8/int8", ["reference", "reference"]),
    ],
)
def test_the_implementation_that_is_chosen(
    dtype, capability, text, expected, chosen, monkeypatch, pretend_gpu
):
    """Without quantising, XLA fuses a gated activation as well as a kernel does."""
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    if capability is None:
        monkeypatch.setattr(device, "why_triton_cannot_run", lambda: "there is no GPU")
    call_norm(dtype, text)
    call_gated(dtype, text)
    assert chosen == expected


def test_a_traced_epsilon_is_left_to_xla(rng, pretend_gpu):
    rows = Rows.random(rng, (1, 3, 64), "bfloat16")
    call = jax.jit(lambda epsilon: add_rms_norm(*rows.arrays, epsilon))
    with pytest.warns(UserWarning, match="epsilon is traced, expected a Python number"):
        _, result = call(EPSILON)
    assert_result(result, rows.normed(), "bfloat16", None)
    with pytest.raises(UnsupportedError, match="'triton' can't run: epsilon is traced"):
        jax.jit(functools.partial(add_rms_norm, *rows.arrays, implementation="triton"))(EPSILON)


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_the_norm_kernel(residual, rng, interpreted_triton):
    rows = Rows.random(rng, (3, 64), "float16", splits=2, residual=residual)
    of_stream, of_normed = random_array(rng, (2, 3, 64), "float16")

    @jax.jit
    def gradients(*arrays):
        return jax.vjp(functools.partial(norm, implementation="triton"), *arrays)[1](
            (of_stream, of_normed)
        )

    of_terms, of_residual, of_weight = gradients(*rows.arrays)
    expected, expected_of_weight = rows.norm_gradients(wide(of_stream), wide(of_normed))
    for of_term in of_terms:
        assert of_term.dtype == jnp.float32
        np.testing.assert_allclose(of_term, expected, rtol=4e-3, atol=4e-3)
    if residual:
        assert of_residual.dtype == jnp.float16
        np.testing.assert_allclose(wide(of_residual), expected, rtol=4e-3, atol=4e-3)
    assert of_weight.dtype == jnp.float16
    assert relative_error(of_weight, expected_of_weight) < 1e-3


def test_gradients_of_the_gated_kernel(rng, interpreted_triton):
    rows = Rows.random(rng, (3, 64), "float16", splits=2)
    cotangent = random_array(rng, (3, 32), "float16")
    gate = functools.partial(gated_silu, dtype="float16", implementation="triton")
    of_terms = jax.jit(lambda terms: jax.vjp(gate, terms)[1](cotangent)[0])(rows.arrays[0])
    for of_term in of_terms:
        np.testing.assert_allclose(of_term, rows.gated_gradient(wide(cotangent)), atol=1e-4)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_quantised_norm_leaves_the_gradient_of_the_stream(
    implementation, rng, interpreted_triton
):
    rows = Rows.random(rng, (2, 64), "float16", residual=True)

    def total(terms, residual, weight):
        stream, _ = norm(
            terms, residual, weight, format=parsed("int8/int8"), implementation=implementation
        )
        return stream.astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*rows.arrays)
    for gradient, expected in zip(gradients, (1, 1, 0), strict=True):
        np.testing.assert_array_equal(wide(gradient), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("text", [None, *QUANTIZING])
def test_gradients_and_results_on_the_gpu(text, dtype, rng):
    rows = Rows.random(rng, (2, 3, 320), dtype, splits=3, residual=True)
    stream, result = run(norm, *rows.arrays, format=parsed(text))
    np.testing.assert_array_equal(wide(stream), wide(rows.stream()))
    assert_result(result, rows.normed(), dtype, text)
    gated = run(gated_silu, rows.arrays[0], dtype=dtype, format=parsed(text))
    assert_result(gated, rows.gated(), dtype, text)
    cotangent = random_array(rng, stream.shape, dtype)
    function = functools.partial(norm, format=parsed(text))

    def total(terms, residual, weight):
        stream, _ = function(terms, residual, weight)
        return (stream.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum()

    of_terms = jax.jit(jax.grad(total))(*rows.arrays)
    np.testing.assert_allclose(of_terms, np.broadcast_to(wide(cotangent), of_terms.shape))
