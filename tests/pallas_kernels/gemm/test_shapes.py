from __future__ import annotations

import pytest

from mpjax.kernels.gemm import shapes
from mpjax.models import Decoder, DecoderConfig, presets


def fused_projections(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """The products of a layer."""
    return {
        place.path.rpartition(".")[2]: place.part_shapes(1)[0]
        for place in Decoder.linear_places(config)
    }


def test_qwen3_8b_is_the_model_of_that_name():
    found = {shape.name: (shape.channels, shape.outputs) for shape in shapes.QWEN3_8B}
    expected = fused_projections(presets.QWEN3_8B)
    assert found == {f"qwen3-8b.{name}": shape for name, shape in expected.items()}


def test_names_are_unique():
    names = [shape.name for shape in shapes.QWEN3_8B + shapes.LLAMA3_70B + shapes.SMALL]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("shape", shapes.LLAMA3_70B, ids=lambda shape: shape.name)
def test_llama3_70b_has_64_query_and_8_key_heads(shape):
    hidden, inner, heads, kv_heads, dim = 8192, 28672, 64, 8, 128
    expected = {
        "qkv": (hidden, (heads + 2 * kv_heads) * dim),
        "output": (heads * dim, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }
    assert (shape.channels, shape.outputs) == expected[shape.name.split(".")[1]]


def test_shapes_by_name_each_once():
    down = shapes.QWEN3_8B[3]
    assert shapes.named(["llama3-70b"]) == shapes.LLAMA3_70B
    assert shapes.named(["qwen3-8b.down", "qwen3-8b"]) == (down, *shapes.QWEN3_8B[:3])
    for model, members in shapes.MODELS.items():
        assert all(shape.name.startswith(f"{model}.") for shape in members)


def test_an_unknown_name_is_met_with_those_there_are():
    with pytest.raises(ValueError, match=r"'gpt': expected a model \(qwen3-8b, llama3-70b\)"):
        shapes.named(["qwen3-8b", "gpt"])
