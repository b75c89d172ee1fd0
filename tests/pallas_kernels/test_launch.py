from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.launch import (
    Settings,
    first_program_id,
    join,
    launch,
    load,
    load_masked,
    store,
)
from mpjax.kernels.target import PLAIN, Target, current_target, tracing_for


def masked_copy(x: jax.Array, rows: int | None, interpret: bool) -> jax.Array:
    def kernel(x_ref, out_ref):
        row, column = jnp.arange(x.shape[0]), jnp.arange(x.shape[1])
        mask = None if rows is None else row < rows
        tile = load_masked(x_ref.at[row[:, None], column[None, :]], mask)
        line = load_masked(x_ref.at[row, 0], mask)
        store(out_ref.at[row[:, None], column[None, :]], tile + line[:, None])

    return launch(
        kernel,
        x,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        settings=Settings("masked_copy"),
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
        store(total_ref.at[place], load(x_ref.at[place]) + load(total_ref.at[place]))

    return launch(
        kernel,
        x,
        total,
        out_shape=jax.ShapeDtypeStruct(total.shape, total.dtype),
        grid=(1,),
        settings=Settings("add_in_place"),
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
        quotient = current_target().divide(load(x_ref.at[place]), load(y_ref.at[place]))
        store(out_ref.at[place], quotient)

    return launch(
        kernel,
        x,
        y,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid=(x.size // tile,),
        settings=Settings("divide"),
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
        result = current_target().multiply_add(
            load(factor_ref.at[row, column]),
            load(other_ref.at[row]),
            load(addend_ref.at[row, column]),
        )
        store(out_ref.at[row, column], result)

    return launch(
        kernel,
        factor,
        other,
        addend,
        out_shape=jax.ShapeDtypeStruct(factor.shape, jnp.float32),
        grid=(1,),
        settings=Settings("multiply_add", warps=4),
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
    # Without the cache that processes share, which warns of a program that another is writing.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, env=environment)


@pytest.mark.parametrize("capability", [None, 8.0, 9.0])
def test_kernels_let_the_next_one_be_launched_early(capability, lower_for_cuda):
    def kernel(out_ref):
        index = first_program_id()
        store(out_ref.at[index + jnp.arange(1)], jnp.full(1, index))

    def numbers(interpret: bool) -> jax.Array:
        return launch(
            kernel,
            out_shape=jax.ShapeDtypeStruct((3,), jnp.int32),
            grid=(3,),
            settings=Settings("numbers"),
            interpret=interpret,
        )

    with device.described_as(compute_capability=capability):
        module = lower_for_cuda(jax.jit(lambda: numbers(interpret=False)))
    assert ("griddepcontrol.launch_dependents" in module) == (capability == 9.0)
    np.testing.assert_array_equal(numbers(interpret=True), [0, 1, 2])


def test_the_target_is_that_of_the_launch(lower_for_cuda):
    """An interpreted kernel has the target around the launch, which numpy's PTX relies on."""
    found = []

    def kernel(out_ref):
        found.append(current_target())
        store(out_ref.at[first_program_id() + jnp.arange(1)], jnp.zeros(1))

    def run(interpret: bool) -> jax.Array:
        out_shape = jax.ShapeDtypeStruct((1,), jnp.float32)
        return launch(
            kernel,
            out_shape=out_shape,
            grid=(1,),
            settings=Settings("empty"),
            interpret=interpret,
        )

    around = Target()
    run(interpret=True)
    with tracing_for(around):
        run(interpret=True)
        lower_for_cuda(lambda: run(interpret=False))
        assert current_target() is around
    assert found[:2] == [PLAIN, around]
    assert [target.has_ptx for target in found[2:]] == [True]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_tiles_are_joined_side_by_side(count, rng):
    tiles = [jnp.asarray(rng.standard_normal((2, 3))) for _ in range(count)]
    np.testing.assert_array_equal(join(tiles), np.concatenate(tiles, 1))


def test_kernels_count_in_32_bits_where_jax_counts_in_64():
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)

    def run(x: jax.Array) -> jax.Array:
        return masked_copy(x, 5, interpret=False)

    expected = str(jax.make_jaxpr(run)(x))
    with jax.enable_x64(True):
        assert str(jax.make_jaxpr(run)(x)) == expected
    assert "i64" not in expected


def test_no_kernel_forgets_the_next_one():
    package = Path(device.__file__).parent
    texts = {
        path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")
    }
    assert [name for name, text in texts.items() if "program_id(0)" in text] == ["target.py"]
    for name, text in texts.items():
        if "from mpjax.kernels.launch import" in text:
            launches = re.findall(r"(?<!def )\blaunch\(", text)
            # A tile of W4Ax's blocks asks for it, and a row of a norm.
            ways = "first_program_id()", "= Tile.of(", "= triton.row_of("
            asked = sum(map(text.count, ways))
            assert len(launches) <= asked, name
