"""Problems and GPUs that plans are made for, and what makes a configuration sound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpjax.kernels import ProductFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans.configuration import TritonConfig
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.shared_memory import triton_bytes

# The largest shared memory of a block, in bytes, from the CUDA programming guide.
SHARED_MEMORY = {8.0: 166912, 8.6: 101376, 8.7: 166912, 8.9: 101376, 9.0: 232448, 12.0: 101376}
H200, WITHOUT_WGMMA = Limits(132, 9.0), Limits(132, 10.0)
GPUS = [H200, Limits(108, 8.0), Limits(84, 8.6), Limits(16, 8.7), Limits(128, 8.9)]
GPUS += [Limits(170, 12.0)]
FORMATS = (
    *("uint4:g32", "uint4:g128", "uint4:gK", "uint8:g64", "uint8:gK"),
    *("table4:g64", "table3:g256", "table3:g32", "table2:g64", "float8:gK", "float8:g128"),
    *("float8:gK/float8", "float8:g128/float8", "int8/int8", "liquid4:g64/int8"),
)
EIGHT_BITS = ("int8:gK/int8", "float8:gK/float8")


def product(
    rows: int,
    channels: int = 4096,
    outputs: int = 24576,
    text: str = "uint4:g128",
    limits: Limits = H200,
) -> Problem:
    """A problem on an H200, whose weight has a shape of Qwen3-8B's, unless another is given."""
    return Problem(rows, ProductFormat.of(text), channels, outputs, limits)


def assert_sound(config: TritonConfig, problem: Problem) -> None:
    """Triton takes it, and registers and shared memory hold it."""
    format = problem.weight
    for size in (config.tile_m, config.tile_n, config.warps):
        assert size & (size - 1) == 0, f"{config}: Triton takes powers of two only"
    assert config.tile_m >= 8
    assert config.tile_n >= 16 * config.warps, "a warp multiplies 16 outputs at a time"
    assert 1 <= config.splits <= problem.blocks
    assert 1 <= config.warps <= 8
    assert config.stages >= 2, "loads and products must overlap"
    assert format.plane_width % (config.width or 1) == 0
    # Sums, 32 bits each, must fit in the registers of the program's threads.
    assert config.tile_m * config.tile_n <= 128 * 32 * config.warps
    if config.scaling == "weight":
        assert format.group_size is not None
        assert format.operand is None
    available = SHARED_MEMORY[problem.limits.compute_capability]
    assert triton_bytes(config, format, problem.limits) <= available


any_problem = given(
    st.builds(
        product,
        rows=st.integers(1, 20_000),
        channels=st.integers(1, 120).map(lambda groups: 256 * groups),
        outputs=st.integers(1, 60_000) | st.integers(1, 900).map(lambda tiles: 64 * tiles),
        text=st.sampled_from(FORMATS),
        limits=st.sampled_from(GPUS),
    )
)
