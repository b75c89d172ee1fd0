from __future__ import annotations

import functools
import warnings
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
    matmul,
    quantize,
    rms_norm,
)
from mpjax.kernels.rowwise import reference, triton
from mpjax.kernels.rowwise.api import quantize_rows
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


def test_activations_that_there_are():
    with pytest.raises(ValueError, match="gated: activation is 'relu': expected silu or gelu"):
        gated(jnp.ones((1, 2, 8)), "relu", dtype="float32")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_single_row_needs_no_axis_of_rows(implementation, rng, interpreted_triton):
    rows = Rows.random(rng, (1, 64), "bfloat16", residual=True)
    terms, residual, weight = rows.arrays
    assert residual is not None
    chosen: dict[str, Any] = {"implementation": implementation}
    stream, result = run(norm, terms[:, 0], residual[0], weight, **chosen)
    np.testing.assert_array_equal(wide(stream), wide(rows.stream())[0])
    assert_result(result, rows.normed()[0], "bfloat16", None)
    result = run(gated_silu, terms[:, 0], dtype="bfloat16", format=parsed("int8/int8"), **chosen)
    assert_result(result, rows.gated()[0], "bfloat16", "int8/int8")


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


def call_rows(dtype, text, **keywords):
    """Traced, not run; of a format that quantises where there is a choice."""
    quantise = functools.partial(quantize_rows, format=parsed(text or "int8/int8"), **keywords)
    return jax.eval_shape(quantise, jnp.ones((3, 64), dtype))


each_operation = pytest.mark.parametrize(
    ("call", "name"),
    [(call_norm, "add_rms_norm"), (call_gated, "gated_silu"), (call_rows, "quantize_rows")],
)


@each_operation
def test_unknown_implementations_are_refused(call, name):
    message = f"{name}: unknown implementation 'xla': expected triton or reference"
    for text in (None, "int8/int8"):
        with pytest.raises(ValueError, match=message):
            call("bfloat16", text, implementation="xla")


@each_operation
def test_the_kernels_need_a_gpu(call, name, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: "there is no GPU")
    with pytest.raises(UnsupportedError, match=f"{name}: 'triton' can't run: there is no GPU"):
        call("bfloat16", None, implementation="triton")


@each_operation
def test_the_kernels_have_sixteen_bit_results(call, name, pretend_gpu):
    with pytest.raises(UnsupportedError, match=f"{name}: .*: the result is float32, expected bfl"):
        call("float32", None, implementation="triton")


@each_operation
def test_the_kernels_hold_float8_where_the_gpu_does(call, name, monkeypatch, pretend_gpu):
    monkeypatch.setattr(device, "compute_capability", lambda: 8.0)
    with pytest.raises(UnsupportedError, match=f"{name}: .*FP8 came with compute capability 8.9"):
        call("bfloat16", "float8:gK/float8", implementation="triton")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_rows_are_quantised_alike(implementation, rng, interpreted_triton):
    x = Rows.random(rng, (2, 3, 96), "bfloat16", terms_dtype="bfloat16").arrays[0][0]
    for text in ("int8/int8", "float8:gK/float8"):
        result = run(quantize_rows, x, format=parsed(text), implementation=implementation)
        assert_result(result, wide(x), "bfloat16", text)


def test_scales_of_groups_are_left_to_xla(rng, pretend_gpu):
    x = Rows.random(rng, (3, 256), "bfloat16", terms_dtype="bfloat16").arrays[0][0]
    format = parsed("float8:g128/float8")
    assert run(quantize_rows, x, format=format).scales.shape == (3, 2)
    reason = "quantize_rows: 'triton' can't run: float8:g128 does not have one scale per"
    with pytest.raises(UnsupportedError, match=reason):
        quantize_rows(x, format, implementation="triton")
    with pytest.raises(ValueError, match="uint4:g64 has 16-bit activations"):
        quantize_rows(x, "uint4:g64")


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


@pytest.mark.parametrize(
    ("call", "text"), [(call_norm, None), (call_gated, "int8/int8"), (call_rows, "int8/int8")]
)
def test_what_runs_as_plain_jax_on_a_gpu_says_so(call, text, pretend_gpu):
    with pytest.warns(UserWarning, match="runs as plain JAX on this GPU.*: the result is float32"):
        call("float32", text)


def test_a_traced_epsilon_is_left_to_xla(rng, pretend_gpu):
    rows = Rows.random(rng, (1, 3, 64), "bfloat16")
    call = jax.jit(lambda epsilon: add_rms_norm(*rows.arrays, epsilon))
    with pytest.warns(UserWarning, match="epsilon is traced, expected a Python number"):
        _, result = call(EPSILON)
    assert_result(result, rows.normed(), "bfloat16", None)
    with pytest.raises(UnsupportedError, match="'triton' can't run: epsilon is traced"):
        jax.jit(functools.partial(add_rms_norm, *rows.arrays, implementation="triton"))(EPSILON)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_known_epsilon_may_be_an_array(kind, pretend_gpu):
    x, norm, epsilon = jnp.ones((1, 2, 64)), jnp.ones(64, jnp.bfloat16), kind(1e-6)
    traced = jax.make_jaxpr(lambda x: add_rms_norm(x, None, norm, epsilon))(x)
    assert "pallas_call" in str(traced)


def test_what_xla_does_as_well_needs_no_warning(pretend_gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_gated("float32", None)
        quantize_rows(jnp.ones((2, 128)), parsed("float8:g128/float8"))
        norm(jnp.ones((2, 0, 64)), None, jnp.ones(64))


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_a_forced_implementation_runs(name, chosen, pretend_gpu):
    call_norm("bfloat16", "int8/int8", implementation=name)
    call_gated("bfloat16", None, implementation=name)
    assert chosen == [name, name]


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


@pytest.mark.one_of(3)
@pytest.mark.parametrize("text", ["int8/int8", "float8:gK/float8", "float8:g128/float8"])
def test_what_is_quantised_here_equals_what_a_product_quantises(text, rng):
    """But for the rounding to 16 bits that quantising at once leaves out."""
    weight = quantize(random_array(rng, (128, 32), "float32"), text)
    terms, residual, scale = Rows.random(rng, (4, 128), "float16", residual=True).arrays
    _, plain = norm(terms, residual, scale)
    _, ready = norm(terms, residual, scale, format=weight.format)
    product, expected = matmul(ready, weight), matmul(plain, weight)
    assert product.dtype == jnp.float16
    assert relative_error(product, wide(expected)) < 0.01


def test_other_values_do_not_retrace(rng, trace_counter):
    counted = trace_counter(functools.partial(norm, format=parsed("int8/int8")))
    compiled = jax.jit(counted)
    for _ in range(2):
        compiled(*Rows.random(rng, (3, 64), "bfloat16", residual=True).arrays)
    assert counted.count == 1


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


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_the_format_may_be_text(implementation, rng, interpreted_triton):
    rows = Rows.random(rng, (2, 64), "bfloat16", residual=True)
    text, chosen = "int8/int8", {"implementation": implementation}
    for function, arrays, keywords in (
        (norm, rows.arrays, {}),
        (gated_silu, rows.arrays[:1], {"dtype": "float16"}),
        (quantize_rows, (rows.arrays[1],), {}),
    ):
        expected = run(function, *arrays, format=parsed(text), **keywords, **chosen)
        found = run(function, *arrays, format=text, **keywords, **chosen)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_norm_is_the_reference_with_its_shapes_checked(rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 16)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(16), jnp.bfloat16)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, reference.rms_norm(x, weight, 1e-5))
    for shape in ((), (15,), (2, 16)):
        with pytest.raises(
            ValueError, match=r"rms_norm: x has shape .* and the weight .*; expected"
        ):
            rms_norm(x, jnp.ones(shape), 1e-5)
    with pytest.raises(ValueError, match="rms_norm: epsilon is nan: expected a finite number"):
        rms_norm(x, weight, np.nan)
    jax.jit(rms_norm)(x, weight, 1e-5)  # a traced epsilon is XLA's
