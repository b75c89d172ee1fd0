from __future__ import annotations

from pathlib import Path

import pytest

from mpjax.checkpoint import agreement
from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.precision import Precision

FOLDER = Path("folder")
FP8 = FP8Scheme("fp8", (128, 128), "float8")
STATIC = FP8Scheme("fp8", (128, 128), None, "FP8 with static scales")


def choose(scheme, text):
    precision = None if text is None else Precision.parse(text)
    return agreement.choose(FOLDER, scheme, precision)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("A16KV8", None),
        ("W16A16KV8", None),
        ("W4A16KV8", "uint4:g128"),
        ("WNF4g64A16KV8", "table4:g64"),
        ("W16+W4A16KV8", None),
    ],
)
def test_format_to_quantize(text, expected):
    found = agreement.format_to_quantize(None if text is None else Precision.parse(text))
    assert found == (None if expected is None else WeightFormat.parse(expected))


@pytest.mark.parametrize("scheme", [AWQScheme(32), GPTQScheme(4, 32)])
@pytest.mark.parametrize(
    "text", [None, "A16KV8", "W4g32A16KV8", "W4g32symA16KV8", "W16+W4g32A16KV8", "W16+W8A16KV8"]
)
def test_a_precision_that_agrees_changes_nothing(scheme, text):
    assert choose(scheme, text) is scheme


@pytest.mark.parametrize("text", ["W4A16KV4", "W8g32A16KV4", "W16A16KV4", "W8A8KV4"])
def test_a_precision_of_other_weights(text):
    message = (
        f"precision is {text}, but folder is a GPTQ checkpoint of W4g32 that .*: ask for W4g32"
    )
    with pytest.raises(ValueError, match=f"^{message}A16KV4, or load a 16-bit checkpoint$"):
        choose(GPTQScheme(4, 32), text)


@pytest.mark.parametrize("scheme", [FP8, STATIC])
def test_a_precision_chooses_the_activations(scheme):
    assert choose(scheme, "WFP8A16KV8").activations is None
    assert choose(scheme, "WFP8g128AFP8KV8") == FP8
    with pytest.raises(ValueError, match="an FP8 checkpoint of WFP8 that can't be quantised "):
        choose(scheme, "W4A16KV8")


def test_activations_that_somebody_must_choose():
    assert choose(FP8, "A16KV8") is FP8
    for text in (None, "A16KV8"):
        message = (
            "json: the checkpoint was made for activations in FP8 with static scales, .* ask for"
        )
        with pytest.raises(CheckpointError, match=message):
            choose(STATIC, text)


def test_names():
    assert agreement.names(AWQScheme(None), KVFormat.parse("KV8")) == "W4gKA16KV8"
    names = "WFP8A16KV16 or WFP8g128AFP8KV16"
    assert agreement.names(STATIC, KVFormat()) == names
