from __future__ import annotations

from benchmarks.commands import models_or_shapes, options, values
from mpjax.kernels.experts.shapes import MODELS


def rows(*names):
    return [{"shape": name} for name in names]


def test_a_model_stands_for_all_of_its_shapes():
    both = rows("mixtral-8x7b.gate_up", "mixtral-8x7b.gate_up", "mixtral-8x7b.down")
    assert models_or_shapes(both, MODELS) == "mixtral-8x7b"
    assert models_or_shapes(both[:1], MODELS) == "mixtral-8x7b.gate_up"
    assert models_or_shapes([*both, *rows("own.qkv")], MODELS) == "mixtral-8x7b,own.qkv"
    assert values(both, "shape") == "mixtral-8x7b.gate_up,mixtral-8x7b.down"


def test_options_are_those_without_a_usual_value():
    given = {"batch": 0, "filled": True, "layers": None, "experts": False, "rows": 3, "text": "a"}
    assert options(given, {"rows": 3, "text": "b"}) == " --batch 0 --filled --text a"
