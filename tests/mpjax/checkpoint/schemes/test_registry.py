from __future__ import annotations

import numpy as np
import pytest

from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.checkpoint.schemes.awq_gemv import AWQGemvScheme
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.checkpoint.schemes.int_quantized import IntQuantizedScheme
from mpjax.checkpoint.schemes.pack_quantized import PackQuantizedScheme
from mpjax.checkpoint.schemes.registry import SCHEMES, layouts, of_module, read
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    FP8,
    GPTQ,
    compressed_fp8,
    compressed_integers,
)

WORDS = np.zeros((64, 8), np.int32)


@pytest.mark.parametrize(
    ("written", "scheme"),
    [
        (AWQ, AWQScheme),
        (AWQ | {"version": "gemv"}, AWQGemvScheme),
        (GPTQ, GPTQScheme),
        ({"method": "gptq", "bits": 4, "group_size": 32}, GPTQScheme),
        (FP8, FP8Scheme),
        (compressed_fp8("channel", "token"), FP8Scheme),
        (compressed_integers(), PackQuantizedScheme),
        (compressed_integers("int-quantized"), IntQuantizedScheme),
    ],
)
def test_read(written, scheme):
    assert type(read(written)) is scheme
    assert sum(one.matches(written) for one in SCHEMES) == 1


@pytest.mark.parametrize("written", [{}, {"quant_method": ["awq"]}, {"quant_method": "higgs"}])
def test_what_is_not_supported(written):
    message = (
        r"is not supported: load an AWQ, AWQ gemv, GPTQ, NVFP4, .*GGUF or "
        r"16-bit checkpoint of the model \(a 16-b"
    )
    with pytest.raises(CheckpointError, match=message):
        read(written)


@pytest.mark.parametrize(
    ("tensors", "scheme"),
    [
        ({"qweight": WORDS, "scales": np.zeros((2, 64))}, AWQScheme),
        ({"qweight": WORDS, "scales": np.zeros((2, 8))}, GPTQScheme),
        ({"qweight": WORDS, "scales": WORDS, "qzeros": WORDS}, AWQGemvScheme),
        ({"qweight": WORDS}, GPTQScheme),  # whose checks find what is missing
        ({"weight": WORDS, "weight_scale_inv": WORDS}, FP8Scheme),
        ({"weight_packed": WORDS, "weight_scale": WORDS}, PackQuantizedScheme),
        ({"weight": WORDS.astype(np.int8), "weight_scale": WORDS}, IntQuantizedScheme),
        ({"weight": WORDS, "scales": WORDS}, None),
        ({}, None),
    ],
)
def test_of_module(tensors, scheme):
    assert of_module(tensors) is scheme
    assert sum(one.holds(tensors) for one in SCHEMES) == (scheme is not None)


def test_every_layout_has_one_scheme():
    assert sum(len(scheme.layouts) for scheme in SCHEMES) == len(layouts())
    assert layouts()["gptq_v2"] is GPTQScheme


def test_a_scheme_that_is_read_alone():
    scheme = next(scheme for scheme in SCHEMES).__mro__[1]
    assert scheme.layouts == ()
    with pytest.raises(ValueError, match="is read and not written"):
        type("Read", (scheme,), {"title": "this one"}).of_layout("x", {})
