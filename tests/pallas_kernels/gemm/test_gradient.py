"""Derivatives of products, and products of stacks under `vmap` and `scan`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import QuantizedTensor, matmul, matmul_terms
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.operation import forced
from mpjax.kernels.plans.plan import Plan
from mpjax.kernels.quantized_tensor import replace_scales
from tests.pallas_kernels.gemm.weights import ALL_FORMATS, dense, integers, random_weight
from tests.pallas_kernels.oracles import as_array, most_formats, random_array, relative_error, wide
from tests.sweeps import combinations

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


def test_of_split_sums(rng, interpreted_triton):
    """Each term has the gradient of the sum, and not a share of it."""
    x, weight, cotangent = operands(rng, "uint8:gK", 384, 16, 3, "bfloat16")
    with forced(Plan("triton", TritonConfig(16, 16, 3, 1, 3))):
        gradient = product_gradient("x", x, weight, as_array(cotangent, "float32"))
        assert matmul_terms(x, weight).shape == (3, 3, 16)
    assert relative_error(gradient, cotangent @ dense(weight).T) < 8e-3


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("uint4:g128", "bfloat16"),
        ("table2:g32", "float16"),
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


def test_scales_must_fit(rng):
    x, weight, _ = operands(rng, "uint4:g64")
    with pytest.raises(ValueError, match=r"shape \(3, 24\).* expects \(4, 24\)"):
        matmul(x, weight, scales=jnp.ones((3, 24)))


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


# One of each kind of codes; the K of some is padded to whole blocks.
KINDS = (
    *("uint4:g128", "uint8:gK", "uint4:g32:sym", "table4:g64", "table3:g64", "table2:g64"),
    *("float8:g128", "float8:gK/float8", "float8:g128/float8", "int8:gK/int8", "liquid4:g64/int8"),
)


def stacked(tensors: list[QuantizedTensor]) -> QuantizedTensor:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *tensors)


def experts(rng: np.random.Generator, text: str, *, permuted: bool = False):
    """Four weights [384, 24] and their stack."""
    each = [random_weight(rng, text, 384, 24, permuted=permuted) for _ in range(4)]
    return each, stacked(each)


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    ("text", "permuted"), [*((text, False) for text in KINDS), ("uint4:g128", True)]
)
def test_experts_tell_their_shape_and_multiply_under_vmap(text, permuted, rng):
    each, stack = experts(rng, text, permuted=permuted)
    x = random_array(rng, (4, 3, 384), "float32")
    seen = []

    def product(x, weight):
        seen.append((weight.shape, weight.padded_channels))
        return matmul(x, weight)

    found = jax.jit(jax.vmap(product))(x, stack)
    assert stack.shape == (4, 384, 24)
    assert seen == [((384, 24), each[0].padded_channels)]
    assert stack.padded_channels == each[0].padded_channels
    one = jax.jit(matmul)
    for rows, weight, of_expert in zip(x, each, found, strict=True):
        np.testing.assert_allclose(of_expert, one(rows, weight), rtol=1e-5, atol=1e-4)


def test_leading_axes_are_for_vmap_or_scan(rng):
    _, stack = experts(rng, "uint4:g128")
    for product in (matmul, matmul_terms):
        with pytest.raises(
            ValueError,
            match=r"leading axes \(shape \(4, 384, 24\)\): expected a matrix .* jax\.vmap or jax",
        ):
            product(jnp.ones((4, 3, 384)), stack)


@pytest.mark.gpu
@combinations(1, text=KINDS, rows=[1, 16, 300, 2048])
def test_experts_on_the_gpu(text, rows, rng):
    """Whatever implementation is planned for one of them."""
    each = [random_weight(rng, text, 2048, 1536) for _ in range(3)]
    x = random_array(rng, (3, rows, 2048), "bfloat16")
    found, one = jax.jit(jax.vmap(matmul))(x, stacked(each)), jax.jit(matmul)
    for rows_of_one, weight, of_expert in zip(x, each, found, strict=True):
        assert relative_error(of_expert, wide(one(rows_of_one, weight))) < 2e-3
