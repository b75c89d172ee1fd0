from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate, ProductFormat, WeightFormat, device
from mpjax.kernels.experts.plans import ExpertsWarpgroupConfig
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.problem import Problem
from mpjax.kernels.gemm.plans.shared_memory import sent_bytes, stages
from mpjax.kernels.gemm.plans.warpgroup_rule import ranked, why_unsound
from mpjax.kernels.gemm.warpgroups.program import Program, shared_memory
from tests.pallas_kernels.gemm.plans.problems import H200
from tests.pallas_kernels.gemm.warpgroups.programs import FLOAT, call_of

FORMATS = ("uint4:g128", "uint4:g32", "uint8:gK", "float8:g128", "table4:g64", "table3:g64")
FORMATS = (*FORMATS, "int8/int8", "liquid4:g64/int8", "int4:g128/int8", "float4:g32", "bfloat16")


def arrays(text, config):
    words = jnp.dtype(f"uint{WeightFormat.parse(text).word_bits}")
    return shared_memory(call_of(text, config), words, FLOAT)


def nbytes(array):
    if hasattr(array, "num_barriers"):
        return 8 * int(np.prod(array.num_barriers))
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


@pytest.mark.parametrize("text", FORMATS)
def test_everything_fits_shared_memory(text):
    checked = 0
    for rows in (1, 16, 32, 100, 1000):
        for config in ranked(Problem(rows, ProductFormat.of(text), 8192, 10240, H200)):
            needed = sum(map(nbytes, arrays(text, config).values()))
            assert needed <= device.shared_memory(9.0), f"{rows} rows, {config}"
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("gate", [None, Gate()])
def test_tiles_of_experts_fit_shared_memory(text, gate):
    """With all arrays at multiples of 1024 bytes, as JAX places them, but for barriers."""
    format, checked = WeightFormat.parse(text), 0
    for rows, warpgroups in itertools.product(range(48, 257, 16), (2, 3, 4)):
        config = ExpertsWarpgroupConfig(rows, warpgroups, 1)
        if why_unsound(config, format, gated=gate is not None) is not None:
            continue
        for dtype in (jnp.dtype(jnp.bfloat16), FLOAT):
            staged = stages(format, config, dtype, gated=gate is not None)
            call = call_of(text, config)._replace(stages=staged, gate=gate, blocks=4)
            words = jnp.dtype(f"uint{format.word_bits}")
            found = shared_memory(call, words, dtype).values()
            tiles = [nbytes(array) for array in found if not hasattr(array, "num_barriers")]
            barriers = sum(nbytes(array) for array in found if hasattr(array, "num_barriers"))
            needed = barriers + sum(-(-size // 1024) * 1024 for size in tiles)
            assert needed <= device.shared_memory(9.0), config
            checked += 1
    assert checked > (6 if text.startswith("int4") else 20)


@pytest.mark.parametrize(("text", "count"), [("int4:g128/int8", 3), ("liquid4:g64/int8", 0)])
def test_consumers_that_scale_blocks_take_turns(text, count):
    turns = arrays(text, WarpgroupConfig(64, 3, 1)).get("turns")
    assert (0 if turns is None else int(np.prod(turns.num_barriers))) == count


@pytest.mark.parametrize(
    "config",
    [
        *(WarpgroupConfig(16, 3, 1), WarpgroupConfig(8, 4, 1, 4), WarpgroupConfig(32, 2, 3, 2)),
        *(WarpgroupConfig(32, 4, 2, 2), WarpgroupConfig(24, 3, 2, 3), WarpgroupConfig(8, 2, 2)),
    ],
    ids=str,
)
def test_there_is_room_for_what_is_sent(config):
    sums = [array for name, array in arrays("uint4:g128", config).items() if name.endswith("_sums")]
    assert sum(4 * math.prod(array.shape) for array in sums) == sent_bytes(config)
    assert bool(sums) == (config.shares > 1 or config.is_cluster)


def test_each_share_has_slots_of_its_own():
    call = call_of("uint4:g128", WarpgroupConfig(8, 3, 1, 3))
    nothing = [None] * 8
    program = Program(call, *nothing)
    places = {int(program.slot(share, n, 4)) for share, n in itertools.product(range(3), range(9))}
    assert places == set(range(12))
    assert program.slot(1, 9, 4) == 5


@pytest.mark.parametrize(
    ("text", "rows", "channels"),
    [
        ("table3:g64", 16, 64),  # two planes, one group
        ("table3:g32", 16, 32),  # which has a sum of its own
        ("table3:g64", 64, 32),
        ("uint4:g32", 32, 32),
        ("uint4:gK", 8, 64),
        ("liquid4:g64/int8", 16, 128),  # groups are levels of one sum
        ("liquid4:g64/int8", 64, 64),
        ("uint8:g32", 16, 32),
        ("float8:g128", 24, 64),
        ("table2:g64", 8, 64),
        ("int8/int8", 16, 128),
    ],
)
def test_few_rows_have_whole_rows_of_tiles_where_a_group_allows(text, rows, channels):
    call = call_of(text, WarpgroupConfig(rows, 2, 1))
    assert call.operand_width == channels
    [tiling, swizzle] = arrays(text, call.config)["x_tiles"].transforms
    size = call.operand.itemsize
    assert (tiling.tiling, swizzle.swizzle) == ((8, channels), channels * size)
