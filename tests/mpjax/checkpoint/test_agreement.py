from __future__ import annotations

from pathlib import Path

import pytest

from mpjax.checkpoint import agreement
from mpjax.checkpoint.schemes import registry
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.precision import Precision
from tests.mpjax.checkpoint import write_checkpoint

FOLDER = Path("folder")
AWQ, GPTQ = map(registry.read, (write_checkpoint.AWQ, write_checkpoint.GPTQ))
STATIC = registry.read(write_checkpoint.FP8 | {"activation_scheme": "static"})


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


@pytest.mark.parametrize("scheme", [AWQ, GPTQ])
@pytest.mark.parametrize(
    "text", [None, "A16KV8", "W4g32A16KV8", "W4g32symA16KV8", "W16+W4g32A16KV8", "W16+W8A16KV8"]
)
def test_a_precision_that_agrees_changes_nothing(scheme, text):
    assert choose(scheme, text) == scheme


def test_names():
    one_group = registry.read(write_checkpoint.AWQ | {"group_size": -1})
    assert agreement.names(one_group, KVFormat.parse("KV8")) == "W4gKA16KV8"
    names = "WFP8A16KV16 or WFP8g128AFP8KV16"
    assert agreement.names(STATIC, KVFormat()) == names
