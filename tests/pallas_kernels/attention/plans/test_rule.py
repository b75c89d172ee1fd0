from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings

from mpjax.kernels.attention import shapes
from mpjax.kernels.attention.plans.configuration import why_unsound
from mpjax.kernels.attention.plans.rule import config_by_rule, plan_by_rule
from mpjax.kernels.plans.plan import Plan
from tests.pallas_kernels.attention.plans.problems import DEVICES, FORMATS, any_problem, problem


def assert_sound(problem):
    config = config_by_rule(problem)
    assert why_unsound(config, problem) is None, config
    # The bytes that a program has in all, whatever is reserved for what.
    ahead = (config.stages - 1) * config.tile_keys * problem.token_bytes
    if problem.residual:
        waiting = 2 * 2 * problem.cache.head_dim * config.residual_keys
        ahead = max(ahead, (config.stages - 1) * waiting)
    queries = 2 * config.tile_rows * problem.cache.head_dim
    # With wide heads the weights cross it, too: 10,240 bytes with 64 rows, as Triton compiles them.
    has_weights = problem.cache.head_dim > 128 and config.tile_rows > 8
    crossing = 160 * config.tile_rows if has_weights else 0
    assert ahead + queries + crossing <= problem.limits.shared_memory
    assert config.splits <= max(1, problem.tiles(config.tile_keys))


@settings(max_examples=300)
@any_problem
def test_it_is_sound_for_any_problem(problem):
    assert_sound(problem)


@pytest.mark.parametrize("limits", DEVICES, ids=str)
@pytest.mark.parametrize("shape", shapes.DECODE, ids=lambda shape: shape.name)
def test_it_is_sound_for_named_shapes(shape, limits):
    heads = shape.kv_heads, shape.head_dim
    for text in FORMATS:
        for tokens in (1, 4, 512):
            rows = tokens * shape.query_heads // shape.kv_heads
            assert_sound(problem(text, shape.batch, rows, shape.context, heads, limits))


def test_it_plans_the_kernel():
    shape = problem()
    assert plan_by_rule(shape) == Plan("triton", config_by_rule(shape))


@pytest.mark.parametrize(
    ("text", "stages", "splits"),
    [("KV8", 3, 4), ("KV4", 3, 8), ("KV2", 3, 16), ("K4cV4c", 3, 12)],
)
def test_what_was_measured_to_be_fastest(text, stages, splits):
    """On an H200, of 8 sequences with 32,768 tokens and 8 KV heads."""
    config = config_by_rule(problem(text, 8, tokens=32768))
    assert (config.stages, config.splits) == (stages, splits)


@pytest.mark.parametrize(
    ("text", "tokens", "keys", "splits"),
    [
        ("KV8", 8320, 64, 32),  # for 130 tiles, though 26 would have no more each
        ("KV2", 16384, 64, 126),  # two tiles each, as 128 would have
        ("K4cV8", 8192, 64, 32),
        ("KV4c", 12672, 64, 49),  # 98 would not fit with the registers of one tile each
    ],
)
def test_as_few_programs_as_have_no_more_tiles_if_these_take_long(text, tokens, keys, splits):
    config = config_by_rule(problem(text, 1, tokens=tokens))
    assert (config.tile_keys, config.splits) == (keys, splits)


@pytest.mark.parametrize(("batch", "stages"), [(16, 3), (32, 2), (48, 2), (64, 3)])
def test_16_bits_are_read_far_ahead_where_programs_run_one_after_another(batch, stages):
    assert config_by_rule(problem("KV16", batch)).stages == stages


@pytest.mark.parametrize(
    ("batch", "rows", "tokens", "is_balanced"),
    [
        (256, 4, 4096, False),
        (256, 4, 4224, True),
        (256, 16, 4224, True),
        (256, 4096, 524288, False),  # a prompt
        (8, 4, 8064, False),  # four programs for each sequence
        (8, 4, 8192, True),
        (1, 4, 524288, False),
    ],
)
def test_programs_help_each_other_where_one_sequence_may_be_long(batch, rows, tokens, is_balanced):
    shape = problem("KV8", batch, rows, tokens)
    assert config_by_rule(shape).is_balanced == is_balanced
    assert not config_by_rule(dataclasses.replace(shape, is_varlen=True)).is_balanced


@pytest.mark.parametrize(
    ("text", "splits", "is_balanced"),
    [
        ("KV8", 4, True),
        ("KV4", 8, True),
        ("KV4c", 12, True),
        ("KV2", 16, True),
        ("KV2t", 16, False),
    ],
)
def test_programs_of_few_tokens_help_if_keys_have_steps_of_channels(text, splits, is_balanced):
    """With eight sequences of 16,384 tokens, KV2's programs have 1024 each, and KV8's 4096."""
    config = config_by_rule(problem(text, 8, tokens=16384))
    assert (config.splits, config.is_balanced) == (splits, is_balanced)


@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4c", "K4cV4c", "KV2"])
def test_keys_of_two_bits_have_one_loop_where_programs_help(text):
    for tokens, is_balanced in ((4096, False), (65536, True)):
        config = config_by_rule(problem(text, 64, tokens=tokens))
        assert config.is_balanced == is_balanced
        assert config.has_one_loop == (is_balanced and text == "KV2")


@pytest.mark.parametrize(
    ("batch", "tokens", "stages", "splits", "waiting"),
    [
        (1, 32768, 2, 130, 2),
        (8, 2048, 3, 14, 2),
        (16, 4096, 2, 6, 2),
        (32, 1024, 2, 2, 2),
        (32, 4096, 3, 4, 2),
    ],
)
def test_the_residual_takes_programs_from_brief_ones(batch, tokens, stages, splits, waiting):
    """Eight on each of an H200's multiprocessors; in the last case they are not brief."""
    config = config_by_rule(problem("KV2", batch, tokens=tokens))
    assert (config.stages, config.splits, config.residual_splits) == (stages, splits, waiting)


@pytest.mark.parametrize(
    ("text", "keys", "tokens", "splits"),
    [
        ("KV2", 16, 4096, 4),
        ("KV2", 16, 131072, 2),
        ("KV4c", 32, 4096, 1),
        ("KV4c", 32, 131072, 1),
        ("K8V2", 16, 256, 4),  # nothing is packed
        ("K8V2", 16, 4096, 4),
        ("K8V4c", 32, 512, 4),
    ],
)
def test_the_residual_is_shared_out_as_packed_keys_are(text, keys, tokens, splits):
    """In tiles of no more bytes, by four programs at most."""
    config = config_by_rule(problem(text, 1, tokens=tokens))
    assert (config.residual_keys, config.residual_splits) == (keys, splits)


@pytest.mark.parametrize(
    ("text", "batch", "tokens", "reads_both"),
    [
        ("KV2", 128, 2048, True),
        ("KV2", 512, 512, True),
        ("KV2", 512, 128, True),
        ("KV4c", 64, 2048, True),
        ("KV4c", 128, 2048, True),
        ("K8V4c", 128, 2048, True),
        ("KV2t", 128, 8192, True),  # where programs help each other, too
        ("KV4c", 128, 8192, False),  # but for keys with steps of channels
        ("KV2", 32, 2048, False),  # there is room beside a sequence's programs
        ("KV2", 1, 128, False),
        ("KV4c", 1, 128, False),
    ],
)
def test_the_residual_has_no_programs_where_there_is_no_room(text, batch, tokens, reads_both):
    """Measured on an H200, with 8 KV heads; there, nothing is left to join."""
    config = config_by_rule(problem(text, batch, tokens=tokens))
    assert (config.programs == 1) == (config.residual_splits == 0) == reads_both
    if reads_both and text != "K8V4c":
        assert config.stages == 3  # however brief they are
        assert config.registers == 255
