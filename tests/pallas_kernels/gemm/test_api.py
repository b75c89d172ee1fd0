from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedError, WeightFormat, backend, matmul, quantize
from pallas_kernels.gemm import api, reference, triton, tuning
from tests.pallas_kernels.gemm.weights import dense, random_weight
from tests.pallas_kernels.oracles import GATES, QUICK, as_array, random_array, relative_error, wide


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("packed", [False, True])
def test_leading_axes_are_kept(leading, packed, rng):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    x = random_array(rng, (*leading, 64), "float32")
    product = matmul(x, weight if packed else as_array(dense(weight), "float32"))
    assert product.shape == (*leading, 10)
    np.testing.assert_allclose(wide(product), wide(x) @ dense(weight), atol=1e-4)


def test_a_plain_weight_is_a_plain_dot(rng):
    x, weight = random_array(rng, (3, 8), "bfloat16"), random_array(rng, (8, 5), "bfloat16")
    product = matmul(x, weight)
    assert product.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(product), np.asarray(x @ weight))


@pytest.mark.parametrize("packed", [False, True])
def test_channels_must_agree(packed, rng):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    with pytest.raises(ValueError, match=r"x has 96 channels in shape \(2, 96\).* expects 64"):
        matmul(jnp.ones((2, 96)), weight if packed else jnp.ones((64, 10)))


def test_unknown_implementations_are_refused(rng):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    with pytest.raises(ValueError, match="unknown implementation 'cuda': expected triton"):
        matmul(jnp.ones((2, 64)), weight, implementation="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["triton", "dequantize"])
def test_kernels_need_a_gpu(implementation, rng, monkeypatch):
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: "there is no GPU")
    weight = random_weight(rng, "uint4:g32", 64, 10)
    with pytest.raises(UnsupportedError, match=f"matmul: '{implementation}'.*there is no GPU"):
        matmul(jnp.ones((2, 64), jnp.bfloat16), weight, implementation=implementation)


@pytest.mark.parametrize("implementation", ["triton", "dequantize"])
def test_kernels_need_sixteen_bits(implementation, rng, pretend_gpu):
    weight = random_weight(rng, "uint4:g32", 64, 10)
    with pytest.raises(UnsupportedError, match="activations are float32, expected bfloat16"):
        matmul(jnp.ones((2, 64)), weight, implementation=implementation)


@pytest.mark.parametrize(
    ("rows", "dtype", "expected"),
    [
        (1, "bfloat16", "triton"),
        (tuning.FUSED_ROWS, "float16", "triton"),
        (tuning.FUSED_ROWS + 1, "bfloat16", "dequantize"),
        (1, "float32", "reference"),
    ],
)
def test_the_gpu_implementation_is_chosen_by_rows(rows, dtype, expected, monkeypatch, pretend_gpu):
    weight = quantize(jnp.ones((64, 8)), WeightFormat.parse("uint4:g32"))
    chosen = []

    def record(name):
        def compute(x, *_):
            chosen.append(name)
            shape = (8, 128) if name == "dequantize" else (x.shape[0], 8)
            return jnp.zeros(shape, dtype)

        return compute

    monkeypatch.setattr(triton, "matmul", record("triton"))
    monkeypatch.setattr(triton, "dequantize", record("dequantize"))
    monkeypatch.setattr(reference, "matmul", record("reference"))
    assert matmul(jnp.ones((rows, 64), dtype), weight).shape == (rows, 8)
    assert chosen == [expected]


def test_without_a_gpu_the_reference_is_chosen(monkeypatch):
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: "there is no GPU")
    assert api._choose(jnp.ones((1, 64), jnp.bfloat16)) == "reference"


@pytest.mark.parametrize("implementation", ["triton", "dequantize", "reference"])
@pytest.mark.parametrize(("text", "channels"), [("uint4:g32", 192), ("uint8:gK", 100)])
def test_act_order(implementation, text, channels, rng, interpreted_triton):
    weight = random_weight(rng, text, channels, 40, permuted=True)
    x = random_array(rng, (2, 3, channels), "float16")
    multiply = functools.partial(matmul, implementation=implementation)
    product = jax.jit(multiply, compiler_options=QUICK)(x, weight)
    assert product.dtype == jnp.float16
    expected = wide(x) @ dense(weight)
    assert relative_error(product, expected) < GATES["float16"]


def test_other_values_do_not_retrace(rng, trace_counter):
    multiply = trace_counter(matmul)
    compiled = jax.jit(multiply)
    for _ in range(2):
        compiled(random_array(rng, (2, 64), "float32"), random_weight(rng, "uint4:g32", 64, 10))
    assert multiply.count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_act_order_on_the_gpu(rows, dtype, rng):
    weight = random_weight(rng, "uint4:g128", 1024, 512, permuted=True)
    x = random_array(rng, (rows, 1024), dtype)
    expected = wide(x) @ dense(weight)
    assert relative_error(jax.jit(matmul)(x, weight), expected) < GATES[dtype]


@pytest.mark.gpu
def test_float32_uses_the_reference_on_the_gpu(rng):
    weight = random_weight(rng, "uint4:g128", 256, 64)
    x = random_array(rng, (4, 256), "float32")
    assert relative_error(matmul(x, weight), wide(x) @ dense(weight)) < 1e-5
