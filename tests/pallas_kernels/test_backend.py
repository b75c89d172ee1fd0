from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels import backend


@pytest.fixture
def machine(monkeypatch):
    """`machine(platform, capability)` pretends to be another machine."""

    def pretend(platform: str, capability: float | None) -> None:
        device = SimpleNamespace(
            platform=platform, compute_capability=str(capability), core_count=78
        )
        monkeypatch.setattr(backend, "default_device", lambda: device)

    return pretend


def test_without_a_gpu(machine):
    machine("cpu", None)
    assert not backend.on_gpu()
    assert (backend.compute_capability(), backend.multiprocessors()) == (None, 132)
    assert backend.why_triton_cannot_run() == (
        "the default device is 'cpu', and kernels need a CUDA GPU"
    )


def test_with_an_old_gpu(machine):
    machine("gpu", 7.5)
    assert backend.on_gpu()
    assert backend.why_triton_cannot_run() == "compute capability 7.5 is below 8.0"


@pytest.mark.parametrize("capability", [8.0, 8.6, 9.0, 12.0])
def test_with_a_gpu_since_ampere(machine, capability):
    machine("gpu", capability)
    assert backend.why_triton_cannot_run() is None
    assert (backend.compute_capability(), backend.multiprocessors()) == (capability, 78)


def test_eight_bit_arrays_that_offsets_cannot_count():
    assert backend.why_too_large(2**31 - 1) is None
    assert "2147483648 elements" in str(backend.why_too_large(2**31))


def test_default_device():
    """It is asked for at every call: a program may put a model on the CPU beside a GPU."""
    cpu = jax.devices("cpu")[0]
    for chosen in (cpu, "cpu"):
        with jax.default_device(chosen):
            assert backend.default_device() == cpu
            assert not backend.on_gpu()
            assert backend.compute_capability() is None


@pytest.mark.gpu
def test_this_gpu():
    assert backend.on_gpu()
    assert backend.multiprocessors() > 0
    assert (backend.compute_capability() or 0) > 5


def test_unsupported_is_a_value_error():
    assert issubclass(backend.UnsupportedError, ValueError)


def masked_copy(x: jax.Array, rows: int | None, interpret: bool) -> jax.Array:
    def kernel(x_ref, out_ref):
        row, column = jnp.arange(x.shape[0]), jnp.arange(x.shape[1])
        mask = None if rows is None else row < rows
        tile = backend.load_masked(x_ref.at[row[:, None], column[None, :]], mask)
        line = backend.load_masked(x_ref.at[row, 0], mask)
        backend.store(out_ref.at[row[:, None], column[None, :]], tile + line[:, None])

    return backend.pallas_call(
        kernel,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        name="masked_copy",
        warps=1,
        stages=1,
        interpret=interpret,
    )


@pytest.mark.parametrize("rows", [None, 8, 5, 0])
def test_rows_that_are_masked_read_as_zero(rows):
    x = jnp.arange(1.0, 65.0).reshape(8, 8)
    expected = np.array(x + x[:, :1])
    expected[8 if rows is None else rows :] = 0
    np.testing.assert_array_equal(masked_copy(x, rows, interpret=True), expected)


def add_in_place(x: jax.Array, total: jax.Array, interpret: bool) -> jax.Array:
    def kernel(x_ref, _, total_ref):
        place = jnp.arange(x.size)
        backend.store(
            total_ref.at[place], backend.load(x_ref.at[place]) + backend.load(total_ref.at[place])
        )

    return backend.pallas_call(
        kernel,
        x,
        total,
        out_shape=jax.ShapeDtypeStruct(total.shape, total.dtype),
        grid=(1,),
        name="add_in_place",
        warps=1,
        stages=1,
        interpret=interpret,
        aliases={1: 0},
    )


def test_an_alias_starts_with_what_the_argument_held(lower_for_cuda):
    x, total = jnp.arange(8.0), jnp.full(8, 10.0)
    np.testing.assert_array_equal(add_in_place(x, total, True), np.arange(8.0) + 10)
    text = lower_for_cuda(lambda x, total: add_in_place(x, total, False), x, total)
    assert "output_operand_alias" in text
    assert "operand_index = 1" in text


def divide_in_kernel(x: jax.Array, y: jax.Array) -> jax.Array:
    tile = 256

    def kernel(x_ref, y_ref, out_ref):
        place = pl.program_id(0) * tile + jnp.arange(tile)
        quotient = backend.divide(backend.load(x_ref.at[place]), backend.load(y_ref.at[place]))
        backend.store(out_ref.at[place], quotient)

    return backend.pallas_call(
        kernel,
        x,
        y,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid=(x.size // tile,),
        name="divide",
        warps=1,
        stages=1,
        interpret=False,
    )


def test_division_lowers_to_the_instruction_that_rounds_correctly(lower_for_cuda):
    assert "div.rn.f32" in lower_for_cuda(divide_in_kernel, jnp.ones(256), jnp.ones(256))


@pytest.mark.gpu
def test_division_in_a_kernel_is_rounded_correctly(rng):
    x = rng.standard_normal(2**18).astype(np.float32)
    y = (rng.standard_normal(2**18) * 10 ** rng.uniform(-5, 5, 2**18)).astype(np.float32)
    quotient = jax.jit(divide_in_kernel)(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_array_equal(np.asarray(quotient), x / y)


def multiply_add_in_kernel(factor: jax.Array, other: jax.Array, addend: jax.Array) -> jax.Array:
    def kernel(factor_ref, other_ref, addend_ref, out_ref):
        row, column = jnp.arange(factor.shape[0])[:, None], jnp.arange(factor.shape[1])[None, :]
        result = backend.multiply_add(
            backend.load(factor_ref.at[row, column]),
            backend.load(other_ref.at[row]),
            backend.load(addend_ref.at[row, column]),
        )
        backend.store(out_ref.at[row, column], result)

    return backend.pallas_call(
        kernel,
        factor,
        other,
        addend,
        out_shape=jax.ShapeDtypeStruct(factor.shape, jnp.float32),
        grid=(1,),
        name="multiply_add",
        warps=4,
        stages=1,
        interpret=False,
    )


def test_multiply_add_lowers_to_one_instruction(lower_for_cuda):
    tile = jnp.ones((64, 64))
    assert "fma.rn.f32" in lower_for_cuda(multiply_add_in_kernel, tile, tile[:, 0], tile)


@pytest.mark.gpu
def test_multiply_add_in_a_kernel_rounds_once(rng):
    factor = rng.standard_normal((64, 64)).astype(np.float32)
    other = rng.standard_normal(64).astype(np.float32)
    exact = factor.astype(np.float64) * other[:, None].astype(np.float64)
    addend = -exact.astype(np.float32)  # what is left is the product's rounding error
    found = jax.jit(multiply_add_in_kernel)(
        jnp.asarray(factor), jnp.asarray(other), jnp.asarray(addend)
    )
    np.testing.assert_array_equal(np.asarray(found, np.float64), exact + addend)


def test_nobody_sees_the_deprecation_warning():
    script = """
import jax, jax.numpy as jnp
from mpjax.kernels import WeightFormat, quantize
from mpjax.kernels.gemm.dequantize import write_out
weight = quantize(jnp.ones((256, 64)), WeightFormat.parse("uint4:g128"))
write_out(weight, jnp.dtype("bfloat16"), interpret=True)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.parametrize("capability", [None, 8.0, 9.0])
def test_kernels_let_the_next_one_be_launched_early(capability, machine, lower_for_cuda):
    def kernel(out_ref):
        index = backend.first_program_id()
        backend.store(out_ref.at[index + jnp.arange(1)], jnp.full(1, index))

    def numbers(interpret: bool) -> jax.Array:
        return backend.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((3,), jnp.int32),
            grid=(3,),
            name="numbers",
            warps=1,
            stages=1,
            interpret=interpret,
        )

    machine("cpu" if capability is None else "gpu", capability)
    module = lower_for_cuda(jax.jit(lambda: numbers(interpret=False)))
    assert ("griddepcontrol.launch_dependents" in module) == (capability == 9.0)
    machine("cpu", None)
    np.testing.assert_array_equal(numbers(interpret=True), [0, 1, 2])


def test_kernels_count_in_32_bits_where_jax_counts_in_64():
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)

    def run(x: jax.Array) -> jax.Array:
        return masked_copy(x, 5, interpret=False)

    expected = str(jax.make_jaxpr(run)(x))
    with jax.enable_x64(True):
        assert str(jax.make_jaxpr(run)(x)) == expected
    assert "i64" not in expected


def test_no_kernel_forgets_the_next_one():
    package = Path(backend.__file__).parent
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    assert [name for name, text in texts.items() if "program_id(0)" in text] == ["backend.py"]
    for name, text in texts.items():
        assert text.count("backend.pallas_call(") <= text.count("backend.first_program_id()"), name
