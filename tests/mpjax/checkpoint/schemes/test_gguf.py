"""The reader of GGUF files; whole files are in tests/mpjax/checkpoint/gguf."""

from __future__ import annotations

import numpy as np
import pytest

from mpjax.checkpoint.gguf.blocks import BLOCK_TYPES
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.gguf import SCHEME, GGUFReader, own_format
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat, pack
from tests.mpjax.checkpoint.gguf.write_gguf import TYPES, random_blocks
from tests.pallas_kernels.oracles import wide

FORMATS = {
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S"), "table4:g32"),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS"), "table3:g32"),
    **{"TQ1_0": "table2:g256", "TQ2_0": "table2:g256", "MXFP4": "float4:g32"},
    **{"Q8_0": "uint8:g32:sym", "Q5_0": "uint8:g32:sym", "Q4_0": "uint4:g32:sym"},
    **{"Q4_1": "affine4:g32", "Q5_1": "affine8:g32", "Q4_K": "affine4:g32", "Q5_K": "affine8:g32"},
}
SHAPE = (32, 256)  # [N, K]


def blocks(kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    data = np.frombuffer(random_blocks(kind, SHAPE, rng), np.uint8)
    return {kind.lower(): data.reshape(SHAPE[0], -1, TYPES[kind][2])}


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_codes_are_kept_where_a_format_has_them(kind, rng):
    reader, tensors = GGUFReader({"a": kind}), blocks(kind, rng)
    assert registry.of_module(tensors) is SCHEME
    assert reader.check(tensors, "a", SHAPE[::-1]) == SHAPE[::-1]
    plain, exact = reader.decode(tensors, "a"), np.asarray(reader.dequantize(tensors, "a"))
    assert str(plain.format) == FORMATS.get(kind, "uint8:g32")
    assert plain.format == reader.format("a", 256) == reader.weights
    assert reader.keeps_codes("a") == (kind in FORMATS)
    found = np.asarray(pack(plain).dequantize())
    if kind in ("Q4_K", "Q5_K"):  # half a place of float16, of scales and of minima
        assert plain.zeros is not None
        ends = 31 * abs(wide(plain.scales)) + abs(wide(plain.zeros))
        assert (abs(found - exact) <= 2.0**-11 * np.repeat(ends, 32, axis=0) + 2.0**-20).all()
        assert (found != exact).any()
    elif kind in (
        "IQ1_S",
        "IQ2_XXS",
        "IQ3_XXS",
        "IQ3_S",
        "IQ4_XS",
    ):  # whose scales are products of two numbers
        assert (abs(found - exact) <= 2.0**-11 * abs(exact) + 2.0**-20).all()
    elif kind in FORMATS:
        np.testing.assert_array_equal(found, exact)
    else:  # half a step of eight bits, and an eighth by the rounding of the scale
        groups = np.concatenate([exact, np.zeros_like(exact)]).reshape(2, 8, 32, 32)
        steps = np.ptp(groups, axis=(0, 2)) / 255
        assert (abs(found - exact).reshape(8, 32, 32) <= 0.63 * steps[:, None]).all()


def test_a_target_rounds_all_but_equal_codes(rng):
    types = {"a": "Q4_0", "b": "Q8_0"}
    reader = GGUFReader(types, target=WeightFormat("uint4", 32))
    assert reader.loss == "Q8_0 to W4g32"
    assert [str(reader.format(name, 64)) for name in "ab"] == ["uint4:g32:sym", "uint4:g32"]
    tensors = blocks("Q8_0", rng)
    assert reader.decode(tensors, "b").codes.max() == 15
    wide = GGUFReader(types, target=WeightFormat("bfloat16"))
    assert not wide.format("a", 64).is_packed
    with pytest.raises(CheckpointError, match="a has 96 input channels, which groups of 64 don't"):
        GGUFReader(types, target=WeightFormat("uint4", 64)).format("a", 96)


def test_modules_that_are_refused(rng):
    reader, tensors = GGUFReader({"a": "Q8_0"}), blocks("Q8_0", rng)
    with pytest.raises(CheckpointError, match="a has the tensors q8_0, q4_0: expected one"):
        reader.check(tensors | blocks("Q4_0", rng), "a")
    with pytest.raises(CheckpointError, match=r"a is uint8 \[8, 34\]: expected the blocks of a"):
        reader.check({"q8_0": tensors["q8_0"][0]}, "a")


def test_the_loss_names_what_is_rounded():
    assert GGUFReader({"a": "Q4_1", "b": "Q8_0"}).loss is None
    mixed = GGUFReader({"a": "Q4_K", "b": "Q6_K", "c": "Q4_0", "d": "Q5_K"})
    assert mixed.loss == (
        "Q6_K to W8g32: by about 1/400 of the range of 32 weights and zero at most; "
        "scales and minima of Q4_K, Q5_K to float16"
    )
    tables = GGUFReader({"a": "IQ4_XS", "b": "IQ4_NL", "c": "TQ2_0", "d": "IQ2_XXS"})
    assert tables.loss == "scales of IQ2_XXS, IQ4_XS to float16"


def test_types_without_a_format():
    assert {kind for kind in BLOCK_TYPES if own_format(BLOCK_TYPES[kind])} == FORMATS.keys()
