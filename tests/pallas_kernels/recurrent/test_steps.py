"""One token of each row by kernels, against plain jnp on states that are taken and put back."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import kernels
from mpjax.kernels import DeltaGates, ScanGates, StateRows
from mpjax.kernels.recurrent.shapes import PUBLISHED, RecurrentShape
from mpjax.kernels.recurrent.steps import reference, triton
from mpjax.kernels.recurrent.steps.gates import for_tokens

# A program has a part of a state, whose sizes are no powers of two, and all of it.
SMALL = (
    RecurrentShape("delta.parts", "delta", 2, 6, 100, 72, (1, 1, 1)),
    RecurrentShape("delta.whole", "delta", 3, 3, 16, 6, (1, 1, 1)),
    RecurrentShape("delta.channels", "delta", 2, 4, 40, 24, (1, 1, 1), by_channel=True),
    RecurrentShape("scan.parts", "scan", 2, 4, 136, 40, (1, 1, 1)),
    RecurrentShape("scan.whole", "scan", 1, 3, 12, 6, (1, 1, 1)),
)
SLOTS = jnp.array([4, 7, 0, 2], jnp.int32)  # of five; the second row has no token
ROWS = StateRows(SLOTS, jnp.array([False, False, True, False]))


def draw_step(shape: RecurrentShape, rows: int, slots: int):
    """The arguments of a step but its rows."""
    keys = iter(jax.random.split(jax.random.key(0), 10))

    def draw(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes)

    width = 2 * shape.groups * shape.keys + shape.heads * shape.values
    channels, states = draw(rows, width).astype(jnp.bfloat16), draw(slots, *shape.state)
    each = draw(rows, shape.heads), draw(rows, shape.heads)
    parameters = [draw(shape.heads) for _ in range(3)]
    if shape.by_channel:
        decays = draw(rows, shape.heads, shape.keys), each[1]
        shift = draw(shape.heads, shape.keys)
        return channels, DeltaGates(*decays, parameters[0], shift), states
    if shape.kind == "delta":
        return channels, DeltaGates(*each, *parameters[:2], scale=2.0), states
    return channels, ScanGates(each[0], *parameters, least=0.1, most=2.0), states


def step_of(shape: RecurrentShape) -> str:
    return {"delta": "gated_delta_step", "scan": "state_space_step"}[shape.kind]


def draw_convolution(width: int, bias: bool, dtype: str):
    rng = np.random.default_rng(1)
    x, weight, states = (
        jnp.asarray(rng.normal(size=size), dtype)
        for size in ((4, 300), (300, width), (5, width - 1, 300))
    )
    return x, weight, weight[:, 0] if bias else None, states.astype(jnp.float32)


def require_alike(found, expected, before, tolerance: float = 2e-6) -> None:
    """Outputs of rows with tokens, and states; those of other slots stay as they are."""
    real = np.array([0, 2, 3])
    for one, other in ((found[0][real], expected[0][real]), (found[1], expected[1])):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        used = np.isfinite(other)
        np.testing.assert_array_equal(np.isfinite(one), used)
        scale = np.abs(other[used]).max()
        np.testing.assert_allclose(one[used], other[used], atol=tolerance * scale)
    for slot in (1, 3):
        np.testing.assert_array_equal(found[1][slot], before[slot])


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_kernels_do_what_plain_jnp_does(shape):
    name, (*given, states) = step_of(shape), draw_step(shape, 4, 5)
    # What a new row's slot holds, and a slot without a row, must not matter.
    states = states.at[0].set(jnp.nan).at[1].set(jnp.nan)
    run = functools.partial(getattr(triton, name), interpret=True)
    found = jax.jit(run)(*given, states, ROWS)
    expected = jax.jit(getattr(reference, name))(*given, states, ROWS)
    assert np.isfinite(found[0]).all()
    require_alike(found, expected, states)


@pytest.mark.parametrize(("width", "bias", "silu"), [(4, True, True), (3, False, False)])
def test_the_convolution_kernel_does_what_plain_jnp_does(width, bias, silu):
    x, weight, offset, states = draw_convolution(width, bias, "float32" if silu else "bfloat16")
    states = states.at[0].set(jnp.nan).at[1].set(jnp.nan)
    arguments = x, weight, offset, states, ROWS
    run = functools.partial(triton.convolution_step, silu=silu, interpret=True)
    found = jax.jit(run)(*arguments)
    expected = jax.jit(functools.partial(reference.convolution_step, silu=silu))(*arguments)
    assert (found[0].dtype, found[1].dtype) == (x.dtype, jnp.float32)
    require_alike(found, expected, states)


@pytest.mark.parametrize("kind", ["delta", "scan", "convolution"])
def test_several_tokens_of_a_row_are_steps_one_after_another(kind):
    """By kernels and in plain jnp: with the bits of single steps, wherever tokens are cut."""
    if kind == "convolution":
        name, (x, *given, states) = "convolution_step", draw_convolution(4, True, "bfloat16")
        x = jnp.concatenate([x, x + 1])
        options = {"silu": True}
    else:
        shape = next(shape for shape in SMALL if shape.kind == kind)
        name, (x, *given, states) = step_of(shape), draw_step(shape, 8, 5)
        options = {}
    begins, counts = jnp.array([0, 8, 2, 5]), jnp.array([2, 0, 3, 3])
    single = functools.partial(getattr(reference, name), **options)
    for plain in (True, False):
        kernel = functools.partial(getattr(triton, name), **options, interpret=True)
        run = jax.jit(functools.partial(reference.in_order, single) if plain else kernel)

        def read(begins, counts, states, is_new, run=run):
            rows = StateRows(SLOTS, is_new, begins, counts)
            return run(x, *given, states, rows)

        outputs, after = read(begins, counts, states, ROWS.is_new)
        first = jnp.minimum(counts, 1)
        begun, half = read(begins, first, states, ROWS.is_new)
        rest, whole = read(begins + first, counts - first, half, jnp.zeros(4, bool))
        np.testing.assert_array_equal(whole, after)
        is_first = np.isin(np.arange(8), [0, 2, 5]).reshape(8, *[1] * (rest.ndim - 1))
        pieces = np.where(is_first, begun, rest)
        np.testing.assert_array_equal(pieces, outputs)
        if plain:
            expected = outputs, after
    outputs, expected_outputs = (np.asarray(y, np.float64) for y in (outputs, expected[0]))
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(after, expected[1], rtol=1e-5, atol=1e-5)
    third = [for_tokens(lambda gates: gates[2:3], each) for each in given]
    one, _ = jax.jit(single)(x[2:3], *third, states, StateRows(SLOTS[2:3], ROWS.is_new[2:3]))
    np.testing.assert_allclose(one[0], expected_outputs[2], rtol=1e-2, atol=1e-5)


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize("shape", PUBLISHED, ids=lambda shape: shape.name)
def test_a_gpu_runs_kernels_with_states_in_place(shape, lower_for_cuda):
    arguments = jax.eval_shape(lambda: (*draw_step(shape, 4, 5), ROWS))
    program = lower_for_cuda(getattr(kernels, step_of(shape)), *arguments)
    assert f'name = "{step_of(shape)}"' in program
    assert program.count("#stablehlo.output_operand_alias<") == 1


@pytest.mark.usefixtures("pretend_gpu")
def test_a_gpu_runs_the_convolution_in_place(lower_for_cuda):
    def step(x, weight, bias, states, rows):
        return kernels.convolution_step(x, weight, states, rows, bias=bias, activation="silu")

    program = lower_for_cuda(step, *draw_convolution(4, True, "bfloat16"), ROWS)
    assert 'name = "convolution_step"' in program
    assert program.count("#stablehlo.output_operand_alias<") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SMALL, *PUBLISHED], ids=lambda shape: shape.name)
def test_steps_on_a_gpu(shape):
    *given, states = draw_step(shape, 4, 5)
    step = getattr(kernels, step_of(shape))
    found = jax.jit(step)(*given, states, ROWS)
    expected = jax.jit(functools.partial(step, implementation="reference"))(*given, states, ROWS)
    require_alike(found, expected, states, 5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_convolution_on_a_gpu(dtype):
    x, weight, bias, states = draw_convolution(4, True, dtype)
    found, expected = (
        kernels.convolution_step(
            x, weight, states, ROWS, bias=bias, activation="silu", implementation=each
        )
        for each in ("triton", "reference")
    )
    require_alike(found, expected, states, 2e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("shape", SMALL[1:3] + SMALL[-1:], ids=lambda shape: shape.name)
def test_gradients_are_those_of_plain_jnp(shape, monkeypatch):
    name, (*given, states) = step_of(shape), draw_step(shape, 4, 5)
    run = functools.partial(getattr(triton, name), interpret=True)
    monkeypatch.setattr(triton, name, run)
    monkeypatch.setattr("mpjax.kernels.device.why_triton_cannot_run", lambda: None)

    def loss(given, states, implementation):
        step = getattr(kernels, name)
        outputs, after = step(*given, states, ROWS, implementation=implementation)
        real = outputs[np.array([0, 2, 3])]
        return (real**2).sum() + (after**3).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    found, expected = (gradient(given, states, each) for each in ("triton", "reference"))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())
        assert np.abs(other).max() > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": jnp.ones((4, 69))}, "expected the channels of all heads, and twice 16"),
        ({"channels": jnp.ones((3, 114))}, r"decay is .*: expected \(3, 3\)"),
        ({"states": jnp.ones((5, 3, 16))}, r"expected \[rows, channels\], and float32"),
        ({"gates": 1}, "gates is 1"),
        ({"rows": StateRows(SLOTS[:3], ROWS.is_new)}, "expected int32 and bool of shape"),
        ({"rows": dataclasses.replace(ROWS, begins=SLOTS)}, "counts is None: expected an array"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    channels, gates, states = draw_step(SMALL[1], 4, 5)
    arguments = {"channels": channels, "gates": gates, "states": states, "rows": ROWS} | wrong
    with pytest.raises(ValueError, match=message):
        kernels.gated_delta_step(**arguments)
