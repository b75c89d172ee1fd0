from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.kernels import KVFormat, KVLayout, KVPages, PagedKVCache, device
from mpjax.kernels.attention import shapes, tuning


@pytest.fixture(autouse=True, scope="module")
def _as_many_multiprocessors_as_an_h200() -> Iterator[None]:
    with device.described_as():
        yield


def pages_of(text: str, kv_heads: int, page_size: int = 128, head_dim: int = 128) -> KVPages:
    """Shapes of one layer's pages."""

    def create() -> KVPages:
        return PagedKVCache.create(
            KVLayout(kv_heads, head_dim, KVFormat.parse(text), page_size=page_size),
            layers=1,
            batch=1,
            max_tokens=1,
        ).layers[0]

    return jax.eval_shape(create)


def assert_sound(
    batch: int, rows: int, entries: int, pages: KVPages, shared_kibibytes: int = 227
) -> None:
    config = tuning.configure(batch, rows, entries, pages)
    for size in (config.tile_rows, config.tile_keys, config.warps):
        assert size & (size - 1) == 0, f"{config}: Triton takes powers of two only"
    assert 8 <= config.tile_rows <= max(8, 2 * rows)
    assert 16 <= config.tile_keys <= 128
    assert 1 <= config.splits <= -(-entries * pages.page_size // config.tile_keys)
    assert 1 <= config.warps <= 8
    assert config.stages >= 1
    # Accumulators of 32 bits must fit in the registers of the threads, and what is loaded ahead,
    # beside queries of 16 bits, in shared memory.
    assert config.tile_rows * pages.head_dim <= 128 * 32 * config.warps
    slot = sum(side.words.shape[3] * side.words.dtype.itemsize for side in pages.sides)
    if pages.residual is not None:
        waiting = pages.residual.page_size // config.waiting_keys
        assert config.waiting_keys in (16, 32, 64, 128)
        assert config.waiting_splits <= waiting
        assert config.waiting_splits > 0 or config.splits == 1
        slot = max(slot, 4 * pages.head_dim * config.waiting_keys // config.tile_keys)
    ahead = (config.stages - 1) * config.tile_keys * slot
    # Of wide heads the weights cross it, too: 10,240 bytes with 64 rows, as Triton compiles them.
    crossing = 160 * config.tile_rows if pages.head_dim > 128 and config.tile_rows > 8 else 0
    queries = 2 * config.tile_rows * pages.head_dim
    assert ahead + queries + crossing <= shared_kibibytes * 1024


@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4", "KV4cg64", "KV2t"])
@pytest.mark.parametrize("shape", shapes.DECODE, ids=lambda shape: shape.name)
def test_named_shapes(shape, text):
    group = shape.query_heads // shape.kv_heads
    for page_size in (64, 128):
        pages = pages_of(text, shape.kv_heads, page_size, shape.head_dim)
        for tokens in (1, 4, 512):
            assert_sound(shape.batch, group * tokens, shape.context // page_size, pages)


@given(
    *(st.integers(1, 300), st.integers(1, 100_000), st.integers(1, 5000)),
    st.builds(
        pages_of,
        st.sampled_from(
            [
                "KV16",
                "KV8",
                "KV4",
                "KVfp8",
                "K8V4",
                "K16V4",
                "KV2t",
                "KV2g32",
                "KV4cg32",
            ]
        ),
        st.integers(1, 128),
        st.sampled_from([32, 64, 128, 256]),
        st.sampled_from([64, 96, 128, 256]),
    ),
    st.sampled_from([16, 84, 132]),
)
def test_any_shape(batch, rows, entries, pages, multiprocessors):
    with device.described_as(multiprocessors=multiprocessors):
        assert_sound(batch, rows, entries, pages)


@pytest.mark.parametrize(("capability", "kibibytes"), [(8.0, 163), (8.6, 99), (8.9, 99)])
@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gpus_with_less_shared_memory(capability, kibibytes, text, head_dim):
    with device.described_as(compute_capability=capability):
        for rows in (4, 2048):
            assert_sound(1, rows, 256, pages_of(text, 8, head_dim=head_dim), kibibytes)


@pytest.mark.parametrize(
    ("text", "stages", "splits"),
    [("KV8", 3, 4), ("KV4", 3, 8), ("KV2", 3, 16), ("K4cV4c", 3, 12)],
)
def test_what_was_measured_to_be_fastest(text, stages, splits):
    """On an H200, of 8 sequences with 32,768 tokens and 8 KV heads."""
    config = tuning.configure(8, 4, 256, pages_of(text, 8))
    assert (config.stages, config.splits) == (stages, splits)


@pytest.mark.parametrize(
    ("text", "batch", "tokens", "keys", "splits"),
    [
        ("KV4", 1, 4096, 64, 64),
        ("KV4", 8, 4096, 64, 8),
        ("KV4", 5, 4096, 64, 13),  # 3.9 programs for each multiprocessor
        ("KV4", 32, 1024, 128, 1),
        ("KV4", 128, 2048, 64, 1),  # all at once, which they would not be with tiles of 128
        ("KV4", 128, 4096, 64, 1),
        ("KV4", 128, 8192, 128, 1),  # nor would they be with half as large ones and two splits
        ("KV8", 1, 32768, 64, 32),
        ("KV8", 8, 4096, 64, 4),
        ("KV8", 32, 1024, 64, 1),
        ("KV8", 128, 2048, 128, 1),  # not all at once with either
        ("KV8", 16, 1024, 128, 1),
        ("KV8", 8, 2048, 64, 4),
        ("KV8", 1, 4096, 128, 32),  # one tile each, which four warps share
        ("KV2", 1, 4096, 64, 60),  # 256 wait
        ("KV2", 4, 4096, 64, 30),
        ("KV2", 8, 2048, 64, 14),  # two tiles each, where there is room for 16
        ("KV2", 8, 4096, 128, 14),
        ("KV2", 1, 32768, 128, 128),
        ("KV4c", 32, 1024, 128, 2),
        ("KV4c", 32, 4096, 128, 3),
        ("K4cV4c", 1, 4096, 128, 31),
        ("KV4c", 1, 4096, 128, 31),  # one tile each
        ("KV4c", 1, 2048, 64, 30),  # 15 would leave multiprocessors idle
        ("KV4c", 1, 8192, 128, 63),
        ("KV4c", 1, 16384, 64, 64),  # there is no room for one each
        ("K2V4", 1, 4096, 128, 30),
        ("KV2", 1, 131072, 128, 130),
        ("KV16", 1, 1024, 64, 16),
        ("KV16", 1, 4096, 64, 16),
        ("KV16", 32, 1024, 64, 1),
        ("KV16", 8, 16384, 128, 2),
    ],
)
def test_short_sequences_are_shared_as_was_measured_to_be_fastest(
    text, batch, tokens, keys, splits
):
    """Measured on an H200, with 8 KV heads."""
    config = tuning.configure(batch, 4, tokens // 128, pages_of(text, 8))
    assert (config.tile_keys, config.splits) == (keys, splits)


@pytest.mark.parametrize(
    ("text", "tokens", "keys", "splits"),
    [
        ("KV8", 8320, 64, 32),  # for 130 tiles, though 26 would have no more each
        ("K8V4", 3072, 64, 32),
        ("KV16", 2176, 64, 16),
        ("KV2", 16384, 64, 126),  # two tiles each, as 128 would have
        ("KV4c", 12672, 64, 49),  # 98 would not fit with the registers of one tile each
        ("K4cV8", 8192, 64, 32),
    ],
)
def test_as_few_programs_as_have_no_more_tiles_if_these_take_long(text, tokens, keys, splits):
    """Others, which wait for memory, are as many as there is room for, or a multiple of eight."""
    config = tuning.configure(1, 4, tokens // 128, pages_of(text, 8))
    assert (config.tile_keys, config.splits) == (keys, splits)


@pytest.mark.parametrize(("batch", "stages"), [(16, 3), (32, 2), (48, 2), (64, 3)])
def test_16_bits_are_read_far_ahead_where_programs_run_one_after_another(batch, stages):
    assert tuning.configure(batch, 4, 32, pages_of("KV16", 8)).stages == stages


def test_one_long_sequence_is_shared_and_a_large_batch_is_not():
    assert tuning.configure(1, 4, 1024, pages_of("KV8", 8)).splits > 4
    assert tuning.configure(256, 4, 64, pages_of("KV8", 8)).splits == 1


@pytest.mark.parametrize(
    ("batch", "rows", "entries", "is_balanced"),
    [
        (256, 4, 32, False),  # 4096 tokens
        (256, 4, 33, True),
        (256, 16, 33, True),
        (256, 4096, 4096, False),  # a prompt
        (8, 4, 63, False),  # four programs for each sequence
        (8, 4, 64, True),
        (1, 4, 4096, False),
    ],
)
def test_programs_help_each_other_where_one_sequence_may_be_long(batch, rows, entries, is_balanced):
    config = tuning.configure(batch, rows, entries, pages_of("KV8", 8))
    assert config.is_balanced == is_balanced


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
    """Of eight sequences of 16,384 tokens, KV2's programs have 1024 each, and KV8's 4096."""
    config = tuning.configure(8, 4, 128, pages_of(text, 8))
    assert (config.splits, config.is_balanced) == (splits, is_balanced)


@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4c", "K4cV4c", "KV2"])
def test_keys_of_two_bits_have_one_loop_where_programs_help(text):
    for entries, is_balanced in ((16, False), (256, True)):
        config = tuning.configure(64, 4, entries, pages_of(text, 8, page_size=256))
        assert config.is_balanced == is_balanced
        assert config.has_one_loop == (is_balanced and text == "KV2")


@pytest.mark.parametrize(("entries", "splits"), [(64, 1), (65, 2), (4096, 64)])
def test_none_waits_for_one_long_sequence_in_a_large_packed_batch(entries, splits):
    config = tuning.configure(256, 4, entries, pages_of("KV8", 8), is_packed=True)
    assert (config.splits, config.is_balanced) == (splits, False)
    assert tuning.configure(256, 4096, entries, pages_of("KV8", 8)).splits == 1


def test_one_sequence_that_nobody_helps_has_more_programs():
    assert tuning.configure(1, 4, 4096, pages_of("KV8", 8)).splits == 64


@pytest.mark.parametrize(
    ("batch", "tokens", "stages", "splits", "waiting"),
    [
        (1, 32768, 2, 128, 2),
        (8, 2048, 3, 14, 2),
        (16, 4096, 2, 6, 2),
        (32, 1024, 2, 2, 2),
        (32, 4096, 3, 4, 2),
    ],
)
def test_what_waits_takes_programs_from_brief_ones(batch, tokens, stages, splits, waiting):
    """Eight on each of an H200's multiprocessors; in the last case they are not brief."""
    config = tuning.configure(batch, 4, tokens // 128, pages_of("KV2", 8))
    assert (config.stages, config.splits, config.waiting_splits) == (stages, splits, waiting)


@pytest.mark.parametrize(
    ("text", "keys", "entries", "splits"),
    [
        ("KV2", 16, 4, 4),  # the packed block has four programs, too
        ("KV2", 16, 32, 4),
        ("KV2", 16, 1024, 2),
        ("KV4c", 32, 32, 1),
        ("KV4c", 32, 1024, 1),
        ("K8V2", 32, 2, 4),  # nothing is packed
        ("K8V2", 16, 32, 4),
        ("K8V4c", 32, 4, 4),
    ],
)
def test_what_waits_is_shared_out_as_what_is_packed_is(text, keys, entries, splits):
    """In tiles of no more bytes, by four programs at most."""
    config = tuning.configure(1, 4, entries, pages_of(text, 8))
    assert (config.waiting_keys, config.waiting_splits) == (keys, splits)


@pytest.mark.parametrize(
    ("text", "batch", "entries", "reads_both"),
    [
        ("KV2", 128, 16, True),
        ("KV2", 512, 4, True),
        ("KV2", 512, 1, True),
        ("KV4c", 64, 16, True),
        ("KV4c", 128, 16, True),
        ("K8V4c", 128, 16, True),
        ("KV2t", 128, 64, True),  # where programs help each other, too
        ("KV4c", 128, 64, False),  # but for keys with steps of channels
        ("KV2", 32, 16, False),  # there is room beside a sequence's programs
        ("KV2", 1, 1, False),
        ("KV4c", 1, 1, False),
    ],
)
def test_what_waits_has_no_programs_where_there_is_no_room(text, batch, entries, reads_both):
    """Measured on an H200, with 8 KV heads; there, nothing is left to join."""
    config = tuning.configure(batch, 4, entries, pages_of(text, 8))
    assert (config.programs == 1) == (config.waiting_splits == 0) == reads_both
    if reads_both and text != "K8V4c":
        assert config.stages == 3  # however brief they are
        assert config.registers == 255


@pytest.mark.parametrize(
    ("text", "narrow", "most"),
    [
        ("KV16", 16, 16),
        ("KV8", 16, 32),
        ("KV4", 16, 32),
        ("K8V2", 16, 32),
        ("KV2t", 16, 32),
        ("KV4c", 8, 16),
        ("K4cV8", 8, 16),
        ("KV2", 8, 32),
        ("K2V4", 8, 32),
    ],
)
def test_few_rows_are_read_in_narrow_tiles(text, narrow, most):
    """As was measured to be fastest on an H200; sequences help each other there, too."""
    for rows in (9, 16, 17, 24, 32, 33):
        config = tuning.configure(8, rows, 1024, pages_of(text, 4))
        wide = min(64, 1 << (rows - 1).bit_length())
        assert config.tile_rows == (narrow if rows <= most else wide)
        assert config.is_balanced


@pytest.mark.parametrize(
    ("text", "head_dim", "tokens", "entries", "registers"),
    [
        ("K4cV4c", 128, 1, 32, 192),
        ("KV4c", 128, 1, 32, 192),
        ("KV4c", 128, 1, 8, 168),
        ("KV4c", 128, 1, 64, 168),
        ("KV4c", 256, 1, 64, 192),
        ("KV2", 128, 1, 32, 224),
        ("KV2", 128, 1, 64, 255),
        ("KV4c", 64, 1, 32, 224),
        ("K4cV8", 64, 1, 32, 192),
        ("KV2", 128, 1, 8, 224),
        ("KV2", 256, 1, 32, 224),
        ("KV4c", 128, 512, 32, None),
    ],
)
def test_registers_of_steps_of_channels(text, head_dim, tokens, entries, registers):
    """Of two warps and keys of four bits, for six programs that are brief or may help.

    Keys of two bits that may help have all that there are. Of others six would have too few, and
    so would K4cV8's eight.
    """
    pages = pages_of(text, 8, head_dim=head_dim)
    assert tuning.configure(32, 4 * tokens, entries, pages).registers == registers


@pytest.mark.parametrize(
    ("text", "batch", "entries", "registers"),
    [
        ("KV16", 1, 32, 255),
        ("KV4", 32, 32, 255),
        ("KV4", 128, 32, None),
        ("KV8", 128, 32, None),
        ("KV4", 128, 64, 168),  # which may help
        ("KV8", 128, 64, 168),
        ("KV8", 8, 256, 255),
        ("K8V4", 128, 64, 168),
        ("KV16", 512, 32, 255),  # shared memory holds the tiles of one
        ("K8V4c", 64, 8, 255),  # four, and as many of what waits, which are brief
    ],
)
def test_registers_of_programs_that_come_beside_each_other(text, batch, entries, registers):
    """Of KV4's two warps there are eight; of KV8's four, six: what they get, the assembler says.

    But where they may help, it would give them more than their company allows.
    """
    pages = pages_of(text, 8, head_dim=128)
    assert tuning.configure(batch, 4, entries, pages).registers == registers


@pytest.mark.parametrize(
    ("keys", "splits", "ahead", "kibibytes", "programs"),
    [
        (64, 1, 2, 227, 1),
        (64, 6, 2, 227, 3),
        (64, 30, 2, 227, 6),
        (64, 30, 1, 227, 12),
        (64, 30, 2, 99, 2),
        (128, 30, 2, 227, 3),
        (128, 30, 2, 99, 1),
    ],
)
def test_programs_beside_each_other(keys, splits, ahead, kibibytes, programs, monkeypatch):
    """As many as there are, or as shared memory holds the tiles of, but for 32 KiB."""
    monkeypatch.setattr(device, "shared_memory", lambda capability: 1024 * kibibytes)
    work = tuning._Work(programs=64, tokens=4096, packed_tokens=4096, slot_bytes=256)
    assert work.beside(keys, splits, ahead) == programs
