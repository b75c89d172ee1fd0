from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks import early, persistent
from benchmarks import persistent_kernel as kernel
from benchmarks.persistent_kernel import layout
from mpjax.kernels import add_rms_norm, device, gated, matmul_terms
from mpjax.kernels.gemm.shapes import GemmShape

pytestmark = pytest.mark.any_version

HAS_EARLY_LAUNCHES = jax.__version_info__ >= (0, 11, 2)  # JAX 0.10 has only the instruction
SHARED_MEMORY = 232_448  # bytes that a program on an H100 can have


def shapes():
    return jax.eval_shape(lambda: early.layers_of(1))[0]


def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def state_struct(terms):
    return persistent.State(
        struct((terms, 1, early.HIDDEN), jnp.float32),
        struct((1, early.HIDDEN), jnp.bfloat16),
        struct((kernel.COUNTERS,), jnp.int32),
        struct((1,), jnp.int32),
    )


def test_slots_have_every_word_of_a_product():
    weights = shapes()
    matrices = weights.output, weights.gate_up, weights.down
    first = 0
    for phase, matrix in zip(layout.PHASES, matrices, strict=True):
        channels, outputs = matrix.shape
        assert phase.outputs * phase.halves * layout.PROGRAMS == outputs
        assert phase.slots * phase.blocks * layout.BLOCK == channels * phase.halves
        assert phase.outputs % layout.WARP_OUTPUTS == 0
        # Consumers take slots in turn, so that a half is always the same consumers'.
        assert first % layout.CONSUMERS == phase.slots % layout.CONSUMERS == 0
        first += phase.slots
        assert matrix.format.block == layout.BLOCK


def test_shared_memory_suffices():
    slot = layout.SLOT_ROWS * (layout.ROW_BYTES + 4 * layout.GROUPS)
    assert kernel.SLOTS * slot + 2 * layout.INTERMEDIATE + 8 * 1024 <= SHARED_MEMORY


def test_other_formats_and_shapes_are_refused():
    weights = shapes()
    x, norm = jnp.zeros((1, early.HIDDEN), jnp.bfloat16), jnp.zeros((early.HIDDEN,), jnp.bfloat16)
    counters = jnp.zeros((kernel.COUNTERS,), jnp.int32)
    with pytest.raises(ValueError, match=r"output: found uint4:g128 \(12288, 4096\) float16"):
        kernel.layer(
            x, x, norm, weights.down, weights.gate_up, weights.down, counters, epsilon=1e-6
        )


def test_a_chain_has_one_kernel_in_place_of_five(lower_for_cuda):
    weights, state = [shapes()], state_struct(1)
    for way in (way for way in persistent.WAYS if not way.graph):
        with device.described_as("NVIDIA H200"):
            text = lower_for_cuda(persistent._function("layer", way, 0), weights, state)
        is_today, is_early = way.kernel == "today", way.kernel == "early"
        assert ("persistent_layer" in text) != is_today
        assert text.count("matmul_uint4") >= (4 if is_today else 1)
        assert text.count("uses_pdl") == (1 if is_early and HAS_EARLY_LAUNCHES else 0)


@pytest.fixture
def small(monkeypatch):
    """Weights of small matrices, and plain jnp in place of the persistent kernel."""
    matrices = {"qkv": (256, 320), "output": (256, 256), "gate_up": (256, 512), "down": (256, 256)}
    named = [GemmShape(f"qwen3-8b.{name}", *shape) for name, shape in matrices.items()]
    monkeypatch.setattr(early, "HIDDEN", 256)
    monkeypatch.setattr(early, "QWEN3_8B", named)
    monkeypatch.setattr(persistent, "persistent", fake)
    [weights] = early.layers_of(1)
    return weights


def fake(x, residual, weights, counters, **options):
    out, stream = persistent.reference(x, residual, weights)
    nothing = jnp.zeros((1,), jnp.int32)
    clocks = jnp.zeros((2, len(kernel.MARKS)), jnp.int32)
    return kernel.Results(out, stream, nothing, nothing, nothing, clocks)


def test_the_reference_is_the_chain_of_functions(small):
    x, residual = jax.random.normal(jax.random.key(0), (2, 1, 256), jnp.bfloat16)
    [terms] = matmul_terms(x, small.output)
    stream, rows = add_rms_norm(terms[None], residual, small.norms[1], early.EPSILON)
    inner = gated(matmul_terms(rows, small.gate_up), "silu", dtype=x.dtype)
    [expected] = matmul_terms(inner, small.down)
    found, found_stream = persistent.reference(x, residual, small)
    assert early.relative_error(found, expected) < early.GATE
    assert early.relative_error(found_stream, stream) < persistent.GATE


def test_a_check_finds_what_is_wrong(small, monkeypatch):
    result = persistent.check(small)
    assert result["is_right"]
    assert result["calls"] == 30
    assert result["relative_error"] < 1e-3

    def late(*arguments, lag, **options):
        results = fake(*arguments)
        return results._replace(out=results.out * (1 + 1e-4 * (lag > 0)))

    monkeypatch.setattr(persistent, "persistent", late)
    result = persistent.check(small)
    assert not result["is_right"]
    assert result["different_bits"] == 15

    def gives_up(*arguments, **options):
        return fake(*arguments)._replace(given_up=jnp.ones((1,), jnp.int32))

    monkeypatch.setattr(persistent, "persistent", gives_up)
    assert not persistent.check(small)["is_right"]


@pytest.mark.gpu
def test_the_kernel_is_right_while_programs_are_late():
    if device.compute_capability() != 9.0:
        pytest.skip("the kernel is for compute capability 9.0")
    [weights] = early.layers_of(1)
    assert persistent.check(weights)["is_right"]
