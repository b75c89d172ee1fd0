from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import WeightFormat, codes
from tests.pallas_kernels.codes import decoding
from tests.pallas_kernels.oracles import PACKED_FORMATS


def operands(format: WeightFormat) -> list[str]:
    if format.operand is None:
        return ["bfloat16", "float16"]
    return ["int8" if format.operand == "int8" else "float8_e4m3fn"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "text",
    [
        *("uint4:g32", "uint4:g128", "uint8:g32", "uint8:gK", "uint4:g64:sym", "table4:g32"),
        *("table4:g256", "table3:g64", "table2:g32", "table2:g64", "float8:gK", "float8:gK/float8"),
        *("int8/int8", "liquid4:g64/int8"),
    ],
)
def test_decoders_lower_for_cuda(text, lower_for_cuda):
    """In every width, from the type of words that the format has."""
    format = WeightFormat.parse(text)
    kind = codes.of(format)
    word = kind.code_dtype if format.is_flat else jnp.dtype(f"uint{format.word_bits}")
    rows, width = decoding.TILE // format.plane_width, format.plane_width
    lowered = functools.partial(
        decoding.decode_words,
        format=format,
        scale_dtype=kind.scale_dtypes[0],
        interpret=False,
    )
    for operand in operands(format):
        text = lower_for_cuda(
            functools.partial(lowered, operand=operand),
            jax.ShapeDtypeStruct((rows, format.columns * width), word),
            jax.ShapeDtypeStruct((rows,), jnp.uint32),
            jax.ShapeDtypeStruct((2**format.bits,), jnp.float32) if kind.has_table else None,
        )
        assert ("elementwise_inline_asm" in text) != format.is_flat


@pytest.mark.parametrize("text", PACKED_FORMATS)
def test_the_scales_of_a_word_have_as_many_planes_each(text):
    """Formats say how many groups share a word, and kinds of codes how many of them have scales."""
    format = WeightFormat.parse(text)
    scales = codes.of(format).scales_of_word
    assert format.groups_of_word % scales == 0
    if format.parameter_channels is not None:
        planes = min(format.planes, format.parameter_channels // format.plane_width)
        assert planes % scales == 0
