from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks import early, persistent
from benchmarks import persistent_kernel as kernel
from mpjax.kernels import device

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
    for phase, matrix in zip(kernel.PHASES, matrices, strict=True):
        channels, outputs = matrix.shape
        assert phase.outputs * phase.halves * kernel.PROGRAMS == outputs
        assert phase.slots * phase.blocks * kernel.BLOCK == channels * phase.halves
        assert phase.outputs % kernel.WARP_OUTPUTS == 0
        # Consumers take slots in turn, so that a half is always the same consumers'.
        assert first % kernel.CONSUMERS == phase.slots % kernel.CONSUMERS == 0
        first += phase.slots
        assert matrix.format.block == kernel.BLOCK


def test_shared_memory_suffices():
    slot = kernel._ROWS * (kernel.ROW_BYTES + 4 * kernel.GROUPS)
    assert kernel.SLOTS * slot + 2 * kernel.INTERMEDIATE + 8 * 1024 <= SHARED_MEMORY


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
