from __future__ import annotations

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import UnsupportedError, WeightFormat, backend, matmul, quantize
from pallas_kernels.gemm import shapes, tables, tuning
from pallas_kernels.gemm.config import GemmConfig, Plan
from pallas_kernels.gemm.tuning import Limits

# The largest shared memory of a block, in bytes, from the CUDA programming guide.
SHARED_MEMORY = {8.0: 166912, 8.6: 101376, 8.7: 166912, 8.9: 101376, 9.0: 232448}
H200 = Limits(132, 9.0)
GPUS = [H200, Limits(108, 8.0), Limits(84, 8.6), Limits(16, 8.7), Limits(128, 8.9)]
FORMATS = (
    *("uint4:g32", "uint4:g128", "uint4:gK", "uint8:g64", "uint8:gK"),
    *("table4:g64", "table3:g256", "table3:g32", "table2:g64", "float8:gK", "float8:g128"),
    *("float8:gK/float8", "float8:g128/float8", "int8/int8", "liquid4:g64/int8"),
)
PACKED = WeightFormat.parse("uint4:g128")
EIGHT_BITS = ("int8/int8", "float8:gK/float8")


@dataclasses.dataclass(frozen=True)
class Weight:
    """What `plan` looks at."""

    format: WeightFormat
    shape: tuple[int, int]


def assert_sound(config: GemmConfig, format: WeightFormat, channels: int, limits: Limits) -> None:
    for size in (config.tile_m, config.tile_n, config.warps):
        assert size & (size - 1) == 0, f"{config}: Triton takes powers of two only"
    assert config.tile_m >= 8
    assert config.tile_n >= 16 * config.warps, "a warp multiplies 16 outputs at a time"
    assert 1 <= config.splits <= -(-channels // format.block)
    assert 1 <= config.warps <= 8
    assert config.stages >= 2, "loads and products must overlap"
    assert format.plane_width % (config.width or 1) == 0
    # Sums, 32 bits each, must fit in the registers of the program's threads.
    assert config.tile_m * config.tile_n <= 128 * 32 * config.warps
    if config.scaling == "weight":
        assert format.group_size is not None
        assert format.activations is None
    available = SHARED_MEMORY[limits.compute_capability]
    assert tuning.shared_memory(config, format, limits) <= available


any_product = given(
    rows=st.integers(1, 20_000),
    text=st.sampled_from(FORMATS),
    groups=st.integers(1, 120),
    outputs=st.integers(1, 60_000),
    limits=st.sampled_from(GPUS),
)


@settings(max_examples=200)
@any_product
def test_heuristics_are_sound_for_any_product(rows, text, groups, outputs, limits):
    format, channels = WeightFormat.parse(text), groups * 256
    plan = tuning.heuristic(rows, format, channels, outputs, limits)
    assert (plan.config is None) == (plan.implementation != "triton")
    if plan.implementation == "xla":
        assert text in EIGHT_BITS
    if "/float8" in text and limits.compute_capability < 8.9:
        assert plan == Plan("dequantize")
        return
    config = tuning.tile(rows, format, channels, outputs, limits)
    assert plan.config in (None, config)
    assert_sound(config, format, channels, limits)
    assert config.tile_m <= max(8, 2 * rows), "the rows of a tile are mostly padding"


@settings(max_examples=40)
@any_product
def test_candidates_are_sound_for_any_product(rows, text, groups, outputs, limits):
    format, channels = WeightFormat.parse(text), groups * 256
    plans = tuning.candidates(rows, format, channels, outputs, limits)
    assert len(set(plans)) == len(plans) <= 40
    assert tuning.heuristic(rows, format, channels, outputs, limits) in plans
    assert plans[-1].implementation == ("xla" if text in EIGHT_BITS else "dequantize") or (
        "/float8" in text and limits.compute_capability < 8.9
    )
    for plan in plans[:-1]:
        assert plan.implementation == "triton"
        assert plan.config is not None
        assert_sound(plan.config, format, channels, limits)
        assert plan.config.tile_m <= max(8, 2 * rows)


@pytest.mark.parametrize("shape", [shapes.QWEN3_8B[1], shapes.LLAMA3_70B[2]], ids=lambda s: s.name)
def test_there_is_enough_to_search_for_named_shapes(shape):
    for text in FORMATS:
        for rows in (16, 128, 1024):
            plans = tuning.candidates(
                rows, WeightFormat.parse(text), shape.channels, shape.outputs, H200
            )
            assert len(plans) >= 15, f"{text}, {rows} rows"


def test_candidates_begin_with_the_rule_of_thumb_and_what_is_near_to_it():
    plans = tuning.candidates(64, PACKED, 4096, 24576, H200)
    assert plans[0] == Plan("triton", tuning.tile(64, PACKED, 4096, 24576, H200))
    few = tuning.candidates(64, PACKED, 4096, 24576, H200, most=5)
    assert few == [*plans[:4], Plan("dequantize")]


def test_candidates_split_what_the_rule_splits_in_other_ways():
    plans = tuning.candidates(128, PACKED, 4096, 24576, H200)
    configs = [plan.config for plan in plans if plan.config is not None]
    assert {config.unsplit for config in configs} == {None, 16896}
    assert len({config.splits for config in configs if config.unsplit}) > 1


# What Triton asked for, as the compiler reported it for a GPU that had too little.
REQUESTED = [
    ("uint4:g128", 9.0, (16, 64, 1, 2, 3), 33792),
    ("uint4:g128", 9.0, (64, 64, 1, 4, 3), 115712),
    ("uint4:g128", 9.0, (128, 128, 1, 8, 3), 231424),
    ("uint4:g128", 8.0, (128, 128, 1, 8, 3), 165888),
    ("uint4:g128", 8.9, (128, 128, 1, 8, 2), 82944),
    ("uint4:g32", 9.0, (64, 64, 1, 4, 3), 59392),
    ("uint4:gK", 9.0, (128, 64, 1, 4, 2), 139264),
    ("uint8:g128", 9.0, (64, 128, 1, 8, 3), 82944),
    ("float8:gK", 9.0, (256, 64, 1, 4, 3), 212992),
    ("int8/int8", 9.0, (128, 128, 1, 8, 2), 65536),
    ("int8/int8", 8.0, (32, 128, 1, 8, 3), 40960),
]


@pytest.mark.parametrize(("text", "capability", "sizes", "requested"), REQUESTED)
def test_shared_memory_is_what_the_compiler_takes(text, capability, sizes, requested):
    limits = Limits(132, capability)
    assert tuning.shared_memory(GemmConfig(*sizes), WeightFormat.parse(text), limits) == requested


@pytest.mark.parametrize(
    ("text", "capability", "config", "reason"),
    [
        ("uint4:g128", 9.0, GemmConfig(128, 128, 1, 8, 4), "bytes of shared memory"),
        ("uint4:g128", 8.9, GemmConfig(128, 128, 1, 8, 3), "bytes of shared memory"),
        ("uint4:g128", 12.0, GemmConfig(128, 128, 1, 8, 3), "there are 101376"),  # not in the table
        ("uint4:g32", 9.0, GemmConfig(256, 128, 1, 8, 2), "256 registers for sums"),
        ("uint4:gK", 9.0, GemmConfig(16, 64, 1, 2, 3, "weight"), "no scales that can be applied"),
        ("liquid4:g64/int8", 9.0, GemmConfig(16, 64, 1, 2, 3, "weight"), "no scales"),
        ("uint4:g128", 9.0, GemmConfig(16, 64, 1, 8, 3), "64 output channels are too few"),
        ("uint4:g128", 9.0, GemmConfig(16, 64, 2, 2, 3, unsplit=96), "no whole tiles of 64"),
        ("float8:gK/float8", 8.6, GemmConfig(16, 64, 1, 2, 3), "need compute capability 8.9"),
        ("uint4:g32", 9.0, GemmConfig(256, 128, 1, 8, 2, "weight"), None),
        ("uint4:g128", 9.0, GemmConfig(128, 128, 1, 8, 3), None),
        ("float8:gK/float8", 8.9, GemmConfig(16, 64, 1, 2, 3), None),
    ],
)
def test_unsound_configurations_are_refused(text, capability, config, reason):
    found = tuning.why_unsound(config, WeightFormat.parse(text), Limits(132, capability))
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


@pytest.mark.parametrize(
    ("rows", "outputs", "sizes", "scaling"),
    [
        (1, 24576, (8, 64, 4), "accumulator"),
        (16, 24576, (16, 64, 4), "accumulator"),
        (16, 4096, (16, 64, 4), "accumulator"),
        (32, 24576, (32, 64, 4), "accumulator"),
        (64, 24576, (64, 64, 4), "weight"),
        (128, 6144, (128, 64, 4), "weight"),
        (128, 24576, (128, 128, 8), "weight"),
        (256, 24576, (128, 128, 8), "weight"),
        (256, 4096, (128, 64, 4), "weight"),  # too few tiles for the largest
    ],
)
def test_the_rule_at_named_numbers_of_rows(rows, outputs, sizes, scaling):
    config = tuning.heuristic(rows, PACKED, 4096, outputs, H200).config
    assert config is not None
    assert (config.tile_m, config.tile_n, config.warps) == sizes
    assert (config.scaling, config.stages) == (scaling, 3)


@pytest.mark.parametrize(
    ("text", "stages"),
    [("liquid4:g64/int8", 4), ("int8/int8", 4), ("float8:gK", 4), ("uint8:g128", 3)],
)
def test_what_has_no_scales_of_groups_is_loaded_further_ahead(text, stages):
    assert tuning.tile(16, WeightFormat.parse(text), 4096, 24576, H200).stages == stages


@pytest.mark.parametrize(("outputs", "stages"), [(24576, 2), (4096, 3)])
def test_weights_of_8_bits_share_multiprocessors_at_128_rows(outputs, stages):
    for text in ("uint8:g128", "float8:g128"):
        assert tuning.tile(128, WeightFormat.parse(text), 4096, outputs, H200).stages == stages


@pytest.mark.parametrize(
    ("channels", "outputs", "sizes", "splits"),
    [
        (12288, 4096, (128, 128, 8), 4),
        (8192, 57344, (128, 128, 8), 2),
        (8192, 10240, (128, 128, 8), 3),  # 240 programs in two rounds of a third of K
        (8192, 8192, (128, 64, 4), 1),  # whose partial sums would cost more
        (4096, 4096, (128, 64, 4), 2),  # hardly begun before they end
    ],
)
def test_the_largest_tile_serves_fewer_rows_where_they_have_many_steps(
    channels, outputs, sizes, splits
):
    config = tuning.tile(128, PACKED, channels, outputs, H200)
    assert (config.tile_m, config.tile_n, config.warps) == sizes
    assert config.splits == splits


@pytest.mark.parametrize(
    ("channels", "outputs", "warps", "splits"),
    [
        (8192, 10240, 2, 3),  # 480 programs
        (8192, 8192, 2, 4),
        (4096, 6144, 4, 4),  # 384
        (4096, 24576, 4, 1),
    ],
)
def test_many_programs_have_two_warps(channels, outputs, warps, splits):
    config = tuning.tile(16, PACKED, channels, outputs, H200)
    assert (config.warps, config.splits) == (warps, splits)


def test_programs_are_made_smaller_where_multiprocessors_would_have_unlike_numbers():
    assert tuning.tile(16, PACKED, 2048, 13824, H200).warps == 2  # 216 tiles


def test_large_tiles_are_split_where_rounds_would_be_left_half_empty():
    assert tuning.tile(128, PACKED, 8192, 10240, H200).splits == 3  # 80 tiles
    assert tuning.tile(256, PACKED, 8192, 57344, H200).splits == 1  # sums would cost more


@pytest.mark.parametrize(
    ("rows", "channels", "outputs", "splits", "unsplit"),
    [
        (256, 8192, 10240, 4, 8448),  # 28 of 160 tiles are left over
        (128, 8192, 57344, 2, 50688),  # 52 of 448
        (128, 4096, 24576, 2, 16896),  # 60 of 192
        (256, 5120, 13824, 1, None),  # 84 of 216: as many programs of half of K need two rounds
        (128, 8192, 10240, 3, None),  # there is no whole round
    ],
)
def test_large_tiles_that_whole_rounds_leave_over_are_split(
    rows, channels, outputs, splits, unsplit
):
    config = tuning.tile(rows, PACKED, channels, outputs, H200)
    assert (config.tile_m, config.tile_n) == (128, 128)
    assert (config.splits, config.unsplit) == (splits, unsplit)
    assert -(-rows // 128) * (unsplit or 0) // 128 % 132 == 0


def test_symmetric_weights_are_scaled_as_they_are_decoded():
    symmetric = WeightFormat.parse("uint4:g128:sym")
    for rows in (1, 32, 64, 256):
        config = tuning.tile(rows, symmetric, 4096, 24576, H200)
        other = tuning.tile(rows, PACKED, 4096, 24576, H200)
        assert config == dataclasses.replace(other, scaling="weight")


def test_small_products_are_split_and_large_ones_not():
    assert tuning.tile(1, PACKED, 4096, 4096, H200).splits > 1
    assert tuning.tile(1, PACKED, 4096, 4096, Limits(16, 9.0)).splits == 1
    assert tuning.tile(256, PACKED, 4096, 57344, H200).splits == 1


@pytest.mark.parametrize(
    ("rows", "outputs", "splits"), [(32, 6144, 4), (64, 4096, 4), (128, 4096, 2), (64, 24576, 1)]
)
def test_splits_have_one_length(rows, outputs, splits):
    assert tuning.tile(rows, PACKED, 4096, outputs, H200).splits == splits  # of 16 blocks


def test_k_that_no_number_divides_is_split_all_the_same():
    assert tuning.tile(1, PACKED, 13 * 256, 4096, H200).splits > 1


def test_many_rows_are_not_fused():
    assert tuning.heuristic(257, PACKED, 4096, 4096, H200) == Plan("dequantize")
    table = WeightFormat.parse("table4:g64")
    assert tuning.heuristic(128, table, 4096, 4096, H200).implementation == "triton"
    assert tuning.heuristic(129, table, 4096, 4096, H200) == Plan("dequantize")
    float8 = WeightFormat.parse("float8:gK/float8")
    assert tuning.heuristic(32, float8, 4096, 4096, H200).implementation == "triton"
    assert tuning.heuristic(33, float8, 4096, 4096, H200) == Plan("xla")


@pytest.mark.parametrize("text", ["int8/int8", "liquid4:g64/int8"])
def test_integer_products_are_always_fused(text):
    plan = tuning.heuristic(8192, WeightFormat.parse(text), 4096, 24576, H200)
    assert plan.implementation == "triton"


def test_fused_fp8_products_need_a_gpu_that_has_them(monkeypatch):
    monkeypatch.setattr(backend, "compute_capability", lambda: 8.6)
    weight = Weight(WeightFormat.parse("float8:gK/float8"), (4096, 4096))
    assert tuning.plan(1, weight) == Plan("dequantize")
    assert tuning.candidates(1, weight.format, 4096, 4096, Limits(84, 8.6)) == [Plan("dequantize")]
    with pytest.raises(UnsupportedError, match=r"need compute capability 8\.9"):
        tuning.configure(1, weight)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Puts a plan for 16 rows and one for 32 into a table for this device."""
    monkeypatch.setenv("MPJAX_TUNED", str(tmp_path))
    device = tables.current_device()
    config = GemmConfig(16, 128, 5, 8, 4)
    entries = {
        tables.key(PACKED, 4096, 6144, 16): tables.Entry(Plan("triton", config), 7.0),
        tables.key(PACKED, 4096, 6144, 32): tables.Entry(Plan("dequantize"), 7.0),
    }
    tables.record(tmp_path / tables.file_name(device), device, entries, {})
    yield config
    tables.forget()


def test_a_measured_plan_goes_before_the_heuristic(table):
    weight = Weight(PACKED, (4096, 6144))
    assert tuning.plan(9, weight) == tuning.plan(16, weight) == Plan("triton", table)
    assert tuning.configure(9, weight) == table
    assert tuning.plan(17, weight) == Plan("dequantize")
    # The fused kernel can still be forced, and then needs a configuration.
    here = tuning.current_limits()
    assert tuning.configure(17, weight) == tuning.tile(17, PACKED, 4096, 6144, here)
    for rows, other in [(33, weight), (1, Weight(PACKED, (4096, 6145)))]:
        assert tuning.plan(rows, other) == tuning.heuristic(rows, PACKED, *other.shape, here)


def test_a_forced_plan_goes_before_everything(table):
    weight, plan = Weight(PACKED, (4096, 6144)), Plan("triton", GemmConfig(32, 32, 1, 1, 2))
    with tuning.forced(plan):
        assert tuning.plan(9, weight) == plan
        assert tuning.configure(9, weight) == plan.config
        with tuning.forced(Plan("dequantize")):
            assert tuning.plan(9, weight) == Plan("dequantize")
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            assert other.submit(tuning.plan, 9, weight).result() == Plan("triton", table)
        assert tuning.plan(9, weight) == plan
    assert tuning.plan(9, weight) == Plan("triton", table)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU does with plans for a GPU")
def test_products_that_are_traced_follow_a_forced_plan():
    x, w = jnp.ones((3, 256), jnp.bfloat16), jnp.ones((256, 32), jnp.bfloat16)
    weight = quantize(w, WeightFormat.parse("float8:gK/float8"))

    def multiplies_bytes(plan):
        with tuning.forced(plan):
            text = jax.jit(lambda x, weight: matmul(x, weight)).lower(x, weight).as_text()
        [product] = [line for line in text.splitlines() if "dot_general" in line]
        return "f8E4M3FN" in product

    plans = [Plan("xla"), Plan("dequantize"), Plan("xla")]  # the second is the reference on a CPU
    assert [multiplies_bytes(plan) for plan in plans] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("table4:g64", 32, (32, 64, 4, 2, None)),
        ("table4:g64", 33, (64, 64, 4, 2, 32)),
        ("table4:g64", 65, (64, 128, 4, 2, 32)),
        ("table3:g64", 32, (32, 64, 4, 2, None)),
        ("table3:g64", 65, (64, 64, 4, 3, None)),  # a wider tile would spill
    ],
)
def test_tables_in_shared_memory_have_wider_tiles(text, rows, expected):
    config = tuning.tile(rows, WeightFormat.parse(text), 4096, 24576, Limits(132, 9.0))
    assert (config.tile_m, config.tile_n, config.warps, config.stages, config.width) == expected


def test_plans_depend_on_what_is_forced_and_on_the_tables(tmp_path, monkeypatch):
    seen = [tuning.conditions()]
    with tuning.forced(Plan("dequantize")):
        seen.append(tuning.conditions())
    assert tuning.conditions() == seen[0]
    tables.forget()
    seen.append(tuning.conditions())
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    seen.append(tuning.conditions())
    assert len(set(seen)) == 4
