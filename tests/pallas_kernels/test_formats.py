from __future__ import annotations

import itertools

import pytest

from mpjax.kernels import WeightFormat
from tests.pallas_kernels.oracles import ALL_FORMATS, PACKED_FORMATS

each_format = pytest.mark.parametrize("text", ALL_FORMATS)
each_packed_format = pytest.mark.parametrize("text", PACKED_FORMATS)

CODES = ["uint4", "uint8", "table4", "table3", "table2", "float8", "float4", "int8", "liquid4"]
CODES += ["int4", "affine4", "affine8", "bfloat16", "float16"]


@each_format
def test_parse_inverts_str(text):
    assert str(WeightFormat.parse(text)) == text
    assert WeightFormat.parse(text) == WeightFormat.parse(str(WeightFormat.parse(text)))


def test_no_other_combination_is_legal():
    found = set()
    sizes, operands = (None, 0, 16, 32, 64, 128, 256, 512), (None, "int8", "float8", "float16")
    for fields in itertools.product(CODES, sizes, (False, True), operands):
        try:
            format = WeightFormat(*fields)
        except ValueError:
            continue
        found.add(str(format))
        assert WeightFormat.parse(str(format)) == format
        assert (format.codes, format.group_size, format.symmetric) == fields[:3]
        assert format.operand == fields[3] or fields[3] is None
    assert found == set(ALL_FORMATS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uint4", WeightFormat("uint4")),
        ("uint4:g32", WeightFormat("uint4", 32)),
        ("uint8:gK:sym", WeightFormat("uint8", None, True)),
        ("uint8:sym", WeightFormat("uint8", None, True)),
        ("table3:g256", WeightFormat("table3", 256)),
        ("float8", WeightFormat("float8")),
        ("float8:g128/float8", WeightFormat("float8", 128, operand="float8")),
        ("int8", WeightFormat("int8", operand="int8")),
        ("int8/int8", WeightFormat("int8")),
        ("liquid4:g64", WeightFormat("liquid4", 64, operand="int8")),
        ("bfloat16", WeightFormat("bfloat16")),
        ("float16", WeightFormat("float16")),
    ],
)
def test_parse(text, expected):
    assert WeightFormat.parse(text) == expected
    assert hash(WeightFormat.parse(text)) == hash(expected)


SIZES = "expected 32, 64, 128 or "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"can't read the weight format ''.*uint4:g128"),
        ("uint4:128", r"format 'uint4:128' \(did you mean 'uint4:g128'\?\): expected, for example"),
        ("UINT8-gK", r"format 'UINT8-gK' \(did you mean 'uint8:gK'\?\): expected, for example"),
        ("uint4:g128:sym:sym", "can't read"),
        ("uint4:sym:g128", "can't read"),
        ("uint4:g128/", "can't read"),
        ("uint4:g-1", "can't read"),
        (
            "unt4",
            r"unknown weight format 'unt4' \(did you mean 'uint4'\?\): expected one of uint4",
        ),
        ("int4", "int4 with group size K: expected 128$"),
        ("uint2:g64", "unknown weight format 'uint2'.*liquid4, bfloat16, float16"),
        ("uint4:g16", rf"uint4 with group size 16: {SIZES}K, all input channels"),
        ("uint8:g0", rf"uint8 with group size 0: {SIZES}K, all input channels"),
        ("uint4:g256", rf"uint4 with group size 256: {SIZES}K, all input channels"),
        ("table4", "table4 with group size K: expected 32, 64, 128 or 256"),
        ("table2:g512", "table2 with group size 512: expected 32, 64, 128 or 256"),
        ("float8:g64", r"float8 with group size 64: expected 128 or K, all input channels"),
        ("int8:g128", r"int8 with group size 128: expected K, all input channels"),
        ("liquid4", "liquid4 with group size K: expected 64$"),
        ("affine4", "affine4 with group size K: expected 32, 64 or 128$"),
        ("affine4:g32:sym", "affine4 has no zero point"),
        ("bfloat16:g128", r"bfloat16 with group size 128: expected K, all input channels"),
        ("float16:sym", "float16 has no zero point, so that it can't be symmetric"),
        ("table4:g64:sym", "table4 has no zero point"),
        ("liquid4:g64:sym", "liquid4 has no zero point"),
        ("int8:sym", "int8 has no zero point"),
        ("uint4:g128/int8", r"uint4 with the operand 'int8': expected none \(16 bits\)"),
        ("float8:gK/int8", r"float8 with the operand 'int8': expected none \(16 bits\) or float8"),
        ("int8/float8", "int8 with the operand 'float8': expected int8"),
        ("liquid4:g64/float8", "liquid4 with the operand 'float8': expected int8"),
        ("bfloat16/int8", r"bfloat16 with the operand 'int8': expected none \(16 bits\)"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        WeightFormat.parse(text)


@pytest.mark.parametrize(
    ("text", "word_bits", "columns", "planes", "plane_width"),
    [
        # As wide as a group, and at most a cache line: 64 words.
        ("uint4:g32", 16, 1, 4, 32),
        ("uint4:g128", 16, 1, 4, 64),
        ("uint4:gK", 16, 1, 4, 64),
        ("uint8:g32", 16, 1, 2, 32),
        ("uint8:gK", 16, 1, 2, 64),
        ("table4:g256", 16, 1, 4, 64),
        ("table2:g32", 16, 1, 8, 32),
        ("table2:g256", 16, 1, 8, 64),
        # Sixteen codes of three bits in three words; blocks of 512 channels.
        ("table3:g32", 16, 3, 16, 32),
        ("table3:g256", 16, 3, 16, 32),
        # Words as wide as the operand that they become.
        ("float8:g128", 16, 1, 2, 64),
        ("float8:gK", 16, 1, 2, 64),
        ("liquid4:g64", 8, 1, 2, 64),
        ("float8:g128/float8", 8, 1, 1, 128),
        ("int8/int8", 8, 1, 1, 128),
        ("bfloat16", 16, 1, 1, 64),
    ],
)
def test_layout(text, word_bits, columns, planes, plane_width):
    format = WeightFormat.parse(text)
    assert (format.word_bits, format.columns) == (word_bits, columns)
    assert (format.planes, format.plane_width) == (planes, plane_width)
    assert format.block == planes * plane_width
    assert format.is_flat == (planes == 1)


@each_packed_format
def test_a_plane_never_straddles_groups(text):
    format = WeightFormat.parse(text)
    group = format.group_size or format.block
    assert group % format.plane_width == 0
    assert max(group, format.block) % min(group, format.block) == 0
    assert format.plane_width & (format.plane_width - 1) == 0  # a kernel's tiles are powers of two


@each_packed_format
def test_no_bit_is_padding(text):
    format = WeightFormat.parse(text)
    assert format.is_packed
    assert format.columns * format.plane_width * format.word_bits == format.block * format.bits


@pytest.mark.parametrize("text", ["bfloat16", "float16"])
def test_plain_formats_take_two_bytes_an_element(text):
    format = WeightFormat.parse(text)
    assert not format.is_packed
    assert format.bits == 16
    assert format.nbytes((300, 7)) == 300 * 7 * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uint4:g128", 4096 * 1024 // 2 + 32 * 1024 * 4),
        ("uint8:gK", 4096 * 1024 + 1024 * 4),
        ("table3:g64", 4096 * 1024 * 3 // 8 + 64 * 1024 * 4 + 8 * 4),
        ("table2:g256", 4096 * 1024 // 4 + 16 * 1024 * 4 + 4 * 4),
        ("float8:g128/float8", 4096 * 1024 + 32 * 1024 * 4),
        ("int8/int8", 4096 * 1024 + 1024 * 4),
        ("liquid4:g64/int8", 4096 * 1024 // 2 + 32 * 1024 * 4 + 1024 * 4),
    ],
)
def test_bytes_of_whole_blocks(text, expected):
    assert WeightFormat.parse(text).nbytes((4096, 1024)) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("uint4:gK", 1), ("uint4:g32", 4), ("table4:g64", 2), ("float8:g128", 1)]
)
def test_groups(text, expected):
    assert WeightFormat.parse(text).groups(128) == expected
    assert WeightFormat.parse(text).groups(127) == expected


def test_only_blocks_of_float8_may_be_cut():
    for text, channels, expected in (
        ("uint4:g128", 256, True),
        ("uint4:g128", 200, False),
        ("liquid4:g64", 96, False),
        ("uint4:gK", 99, True),
        ("float8:g128", 200, True),
        ("float8:g128/float8", 1, True),
    ):
        assert WeightFormat.parse(text).can_split(channels) == expected
    assert WeightFormat.parse("float8:g128").groups(200) == 2
    # Two blocks of each output's channels, and two scales.
    assert WeightFormat.parse("float8:g128").nbytes((200, 3)) == 3 * (256 + 8)


def test_a_format_may_come_as_text():
    format = WeightFormat.parse("uint4:g128")
    assert WeightFormat.of(format) is format
    assert WeightFormat.of("uint4:g128") == format
    with pytest.raises(ValueError, match="unknown weight format 'uint5'"):
        WeightFormat.of("uint5")
    for other in (4, None):
        with pytest.raises(ValueError, match=f"weight format is {other}: expected a text, such as"):
            WeightFormat.of(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["UINT4:G128", " uint4:g128", "uint4:g128\n"])
def test_capitals_and_spaces_do_not_matter(text):
    assert str(WeightFormat.parse(text)) == "uint4:g128"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codes": 4}, "the codes of a weight format is 4: expected a text"),
        ({"group_size": 32.0}, "uint4: group_size is 32.0: expected 0 or more"),
        ({"symmetric": "yes"}, "symmetric is 'yes': expected True or False"),
        ({"operand": 8}, "uint4 with the operand 8: expected none"),
    ],
)
def test_fields_of_the_wrong_type(fields, message):
    with pytest.raises(ValueError, match=message):
        WeightFormat(**({"codes": "uint4", "group_size": 32} | fields))
