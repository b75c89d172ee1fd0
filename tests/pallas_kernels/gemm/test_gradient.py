from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import QuantizedTensor, matmul, quantize
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.api import matmul_terms
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.operation import forced
from mpjax.kernels.plans.plan import Plan
from mpjax.kernels.quantized_tensor import replace_scales
from tests.pallas_kernels.gemm.weights import ALL_FORMATS, dense, integers, random_weight
from tests.pallas_kernels.oracles import as_array, most_formats, random_array, relative_error, wide

SCALED = [
    "uint4:g32",
    "uint8:gK",
    "table4:g64",
    "float8:g128",
    "float8:g128/float8",
    "int8:gK/int8",
]


def product_gradient(gradient_of, x, weight, cotangent, **options):
    """The gradient of Σ cotangent · matmul(x, weight) with respect to what `gradient_of` names."""

    def loss(x, weight, scales):
        product = matmul(x, weight, scales=scales, **options)
        return (product.astype(jnp.float32) * cotangent).sum()

    index = ("x", "weight", "scales").index(gradient_of)
    gradient = jax.grad(loss, argnums=index, allow_int=True)
    scales = weight.scales()[: weight.format.groups(weight.shape[0])]
    scales = scales.astype(jnp.float32) if gradient_of == "scales" else None
    return jax.jit(gradient)(x, weight, scales)


def operands(rng, text, channels=256, outputs=24, rows=5, dtype="float32", **options):
    weight = random_weight(rng, text, channels, outputs, **options)
    return random_array(rng, (rows, channels), dtype), weight, rng.standard_normal((rows, outputs))


@pytest.mark.parametrize("text", most_formats(ALL_FORMATS))
def test_of_the_activations(text, rng):
    """The gradient is that of a product with the dense matrix, whatever x is rounded to."""
    x, weight, cotangent = operands(rng, text)
    gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"))
    assert gradient.dtype == jnp.float32
    assert relative_error(gradient, cotangent @ dense(weight).T) < 1e-6


@pytest.mark.parametrize("text", ["float8:g128", "float8:g128/float8"])
def test_where_blocks_are_cut(text, rng):
    x, weight, cotangent = operands(rng, text, 200)
    gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"))
    assert relative_error(gradient, cotangent @ dense(weight).T) < 1e-6
    codes = dense(weight) / np.repeat(wide(weight.scales()), 128, 0)[:200]
    of_weight = (wide(x).T @ cotangent) * codes
    expected = np.stack([of_weight[:128].sum(0), of_weight[128:].sum(0)])
    gradient = product_gradient("scales", x, weight, as_array(cotangent, "float32"))
    assert relative_error(gradient, expected) < 1e-5


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("uint4:g128", "bfloat16"),
        ("table2:g32", "float16"),
        ("float8:g128", "float16"),
        ("float8:gK/float8", "bfloat16"),
        ("int8:gK/int8", "bfloat16"),
        ("liquid4:g64/int8", "float16"),
    ],
)
def test_of_the_activations_as_on_a_gpu(text, dtype, rng, interpreted_triton):
    permuted = WeightFormat.parse(text).operand is None
    x, weight, cotangent = operands(rng, text, 192 if "64" in text else 128, 40, 3, dtype)
    if permuted:
        order = rng.permutation(weight.shape[0]).astype(np.int32)
        weight = dataclasses.replace(weight, permutation=jnp.asarray(order))
    config = TritonConfig(16, 32, 1, 2, 3)
    with forced(Plan("triton", config)):
        gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"))
    assert gradient.dtype == dtype
    gate = {"bfloat16": 8e-3, "float16": 1e-3}[dtype]
    assert relative_error(gradient, cotangent @ dense(weight).T) < gate


def test_of_split_sums(rng, interpreted_triton):
    """Each term has the gradient of the sum, and not a share of it."""
    x, weight, cotangent = operands(rng, "uint8:gK", 384, 16, 3, "bfloat16")
    with forced(Plan("triton", TritonConfig(16, 16, 3, 1, 3))):
        gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"))
        assert matmul_terms(x, weight).shape == (3, 3, 16)
    assert relative_error(gradient, cotangent @ dense(weight).T) < 8e-3


@pytest.mark.parametrize("text", ["uint4:g32", "table2:g64", "int8:gK/int8"])
def test_with_act_order(text, rng):
    x, weight, cotangent = operands(rng, text, 192, permuted=True)
    gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"))
    assert relative_error(gradient, cotangent @ dense(weight).T) < 1e-6


def test_of_the_activations_with_other_scales(rng):
    x, weight, cotangent = operands(rng, "uint8:g64")
    scales = 4 * weight.scales().astype(jnp.float32)
    loss = lambda x: (matmul(x, weight, scales=scales) * cotangent).sum()  # noqa: E731
    assert relative_error(jax.grad(loss)(x), 4 * cotangent @ dense(weight).T) < 1e-5


@pytest.mark.parametrize("out_dtype", ["float32", "float16"])
def test_of_sixteen_bit_activations(out_dtype, rng):
    x, weight, cotangent = operands(rng, "uint4:g64", dtype="bfloat16")
    cotangent = wide(as_array(cotangent, "bfloat16"))
    gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"), out_dtype=out_dtype)
    assert gradient.dtype == jnp.bfloat16
    assert relative_error(gradient, cotangent @ dense(weight).T) < 8e-3


@pytest.mark.one_of(3)
@pytest.mark.parametrize("text", SCALED)
@pytest.mark.parametrize("permuted", [False, True])
def test_of_the_scales(text, permuted, rng):
    x, weight, cotangent = operands(rng, text, permuted=permuted)
    gradient = product_gradient("scales", x, weight, as_array(cotangent, "float32"))
    of_matrix = wide(x).T @ cotangent  # [K, N]
    plain = dataclasses.replace(weight, permutation=None)
    if permuted:
        of_matrix = of_matrix[np.asarray(weight.permutation)]
    ones = replace_scales(plain, jnp.ones(gradient.shape))
    groups = (of_matrix * dense(ones)).reshape(len(gradient), -1, weight.shape[1])
    assert gradient.dtype == jnp.float32
    assert relative_error(gradient, groups.sum(1)) < 1e-5


def test_of_the_scales_is_that_through_dequantize(rng):
    x, weight, _ = operands(rng, "uint4:g64")
    scales = weight.scales().astype(jnp.float32)
    loss = lambda product: jnp.sin(product).sum()  # noqa: E731
    actual = jax.grad(lambda scales: loss(matmul(x, weight, scales=scales)))(scales)
    expected = jax.grad(lambda scales: loss(x @ weight.dequantize(scales=scales)))(scales)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("text", ["table4:g128", "table3:g32", "table2:g64"])
def test_of_the_table(text, rng):
    x, weight, cotangent = operands(rng, text)
    gradient = product_gradient("weight", x, weight, as_array(cotangent, "float32")).table
    of_matrix = wide(x).T @ cotangent
    entries = np.eye(len(gradient), dtype=np.float32)
    shares = [dense(dataclasses.replace(weight, table=entry)) for entry in entries]
    assert relative_error(gradient, np.array([(of_matrix * s).sum() for s in shares])) < 1e-4


def test_of_the_channel_scales(rng):
    x, weight, cotangent = operands(rng, "liquid4:g64/int8")
    gradient = product_gradient("weight", x, weight, as_array(cotangent, "float32"))
    expected = ((wide(x).T @ cotangent) * integers(weight)).sum(0)
    assert relative_error(gradient.channel_scales, expected) < 1e-5


@pytest.mark.parametrize(
    ("text", "what"),
    [("uint4:g32", "scales"), *((text, "x") for text in ("table4:g128", "liquid4:g64/int8"))],
)
def test_rows_may_be_divided_along_an_explicit_axis(text, what, rng):
    x, weight, cotangent = operands(rng, text)
    expected = product_gradient(what, x, weight, cotangent)
    mesh = jax.make_mesh((1,), ("row",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, cotangent = (
            jax.device_put(array, jax.NamedSharding(mesh, jax.P("row")))
            for array in (x, as_array(cotangent, "float32"))
        )
        gradient = product_gradient(what, x, weight, cotangent)
    assert relative_error(gradient, wide(expected)) < 1e-5


@pytest.mark.parametrize("text", ["uint4:g32", "float8:gK/float8", "int8:gK/int8"])
def test_codes_have_none(text, rng):
    x, weight, cotangent = operands(rng, text, permuted=True)
    gradient = product_gradient("weight", x, weight, as_array(cotangent, "float32"))
    assert isinstance(gradient, QuantizedTensor)
    for leaf in (gradient.words, gradient.parameters, gradient.permutation):
        assert not np.asarray(leaf).astype(bool).any()


@pytest.mark.parametrize("text", SCALED)
def test_scales_stand_in_for_those_of_the_weight(text, rng):
    x, weight, _ = operands(rng, text)
    shape = weight.format.groups(weight.shape[0]), weight.shape[1]
    scales = as_array(rng.uniform(0.5, 2, shape), "float32")
    multiply = jax.jit(matmul)
    given = multiply(x, weight, scales=scales)
    replaced = multiply(x, replace_scales(weight, scales))
    np.testing.assert_array_equal(np.asarray(given), np.asarray(replaced))
    assert relative_error(given, wide(multiply(x, weight))) > 1


def test_integer_steps_are_not_replaced(rng):
    x, weight, _ = operands(rng, "liquid4:g64/int8")
    with pytest.raises(ValueError, match="integer steps: replace its channel_scales instead"):
        matmul(x, weight, scales=jnp.ones((4, 24)))


def test_scales_must_fit(rng):
    x, weight, _ = operands(rng, "uint4:g64")
    with pytest.raises(ValueError, match=r"shape \(3, 24\).* expects \(4, 24\)"):
        matmul(x, weight, scales=jnp.ones((3, 24)))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("text", ["uint4:g32", "table2:g32", "int8:gK/int8"])
@pytest.mark.parametrize("what", ["adapters", "scales"])
def test_training_beside_a_quantized_weight(text, what, rng):
    """Low-rank adapters learn what is missing, or scales that are 20 % off what they were."""
    weight = quantize(random_array(rng, (64, 16), "float32"), WeightFormat.parse(text))
    x = random_array(rng, (128, 64), "float32")
    scales = weight.scales()[: weight.format.groups(64)].astype(jnp.float32)
    missing = 0.0
    trained = {"a": jnp.zeros((64, 2)), "b": jnp.zeros((2, 16)), "factors": jnp.ones_like(scales)}
    if what == "adapters":
        missing = rng.standard_normal((64, 2)) @ rng.standard_normal((2, 16)) / 10
        trained["a"] = random_array(rng, (64, 2), "float32") / 8
    else:
        trained["factors"] *= 0.8
    target = as_array(wide(x) @ (dense(weight) + missing), "float32")
    rates = {"a": 1.0, "b": 1.0, "factors": 0.05}

    def loss(trained):
        product = matmul(x, weight, scales=scales * trained["factors"])
        return ((product + x @ trained["a"] @ trained["b"] - target) ** 2).mean()

    @jax.jit
    def step(trained):
        value, gradient = jax.value_and_grad(loss)(trained)
        return jax.tree.map(lambda p, g, rate: p - rate * g, trained, gradient, rates), value

    losses = []
    for _ in range(60):
        trained, value = step(trained)
        losses.append(float(value))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("text", ["uint4:g128", "table3:g64", "float8:gK", "liquid4:g64/int8"])
def test_of_the_activations_on_the_gpu(text, dtype, rng):
    permuted = text == "uint4:g128"
    x, weight, cotangent = operands(rng, text, 1152, 500, 40, dtype, permuted=permuted)
    gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"))
    gate = {"bfloat16": 8e-3, "float16": 1e-3}[dtype]
    assert relative_error(gradient, cotangent @ dense(weight).T) < gate


@pytest.mark.one_of(4)
@pytest.mark.parametrize("text", ["uint4:g64", "uint8:gK", "float8:gK", "int8:gK/int8"])
@pytest.mark.parametrize("permuted", [False, True])
def test_of_a_gradient_with_respect_to_scales(text, permuted, rng):
    """The gradient with respect to x depends on scales, as that of the dense product does."""
    x, weight, cotangent = operands(rng, text)
    if weight.format.operand:
        permuted = False
    if permuted:
        order = rng.permutation(weight.shape[0]).astype(np.int32)
        weight = dataclasses.replace(weight, permutation=jnp.asarray(order))
    scales = weight.scales()[: weight.format.groups(weight.shape[0])].astype(jnp.float32)
    cotangent = as_array(cotangent, "float32")

    def penalty(multiply, scales):
        of_x = jax.grad(lambda x: (jnp.sin(cotangent) * multiply(x, scales)).sum())(x)
        return (of_x**2).sum()

    found = jax.grad(lambda s: penalty(lambda x, s: matmul(x, weight, scales=s), s))(scales)
    expected = jax.grad(
        lambda s: penalty(lambda x, s: x @ weight.dequantize(jnp.float32, scales=s), s)
    )(scales)
    assert relative_error(found, wide(expected)) < 1e-5


def test_of_a_gradient_with_respect_to_x_and_the_table(rng):
    """Through what is not linear in x, too."""
    x, weight, cotangent = operands(rng, "table4:g64")
    cotangent = as_array(cotangent, "float32")

    def penalty(multiply, x, table):
        tensor = dataclasses.replace(weight, table=table)
        of_x = jax.grad(lambda x: (cotangent * jnp.sin(multiply(x, tensor))).sum())(x)
        return (of_x**2).sum()

    def dense_product(x, tensor):
        return x @ tensor.dequantize(jnp.float32)

    arguments = x, weight.table
    found = jax.grad(lambda *a: penalty(matmul, *a), (0, 1))(*arguments)
    expected = jax.grad(lambda *a: penalty(dense_product, *a), (0, 1))(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, wide(other)) < 1e-5
