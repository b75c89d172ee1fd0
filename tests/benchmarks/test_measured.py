from __future__ import annotations

from benchmarks.measured import models_or_shapes
from mpjax.kernels.experts.shapes import MODELS


def rows(*names):
    return [{"shape": name} for name in names]


def test_a_model_stands_for_all_of_its_shapes():
    both = rows("mixtral-8x7b.gate_up", "mixtral-8x7b.gate_up", "mixtral-8x7b.down")
    assert models_or_shapes(both, MODELS) == "mixtral-8x7b"
    assert models_or_shapes(both[:1], MODELS) == "mixtral-8x7b.gate_up"
    assert models_or_shapes([*both, *rows("own.qkv")], MODELS) == "mixtral-8x7b,own.qkv"


def test_both_products_at_once_are_a_shape_of_their_own():
    assert models_or_shapes(rows("mixtral-8x7b.mlp"), MODELS) == "mixtral-8x7b.mlp"
