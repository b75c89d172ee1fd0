"""Every scheme decodes bit for bit what it encodes, and the reverse."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.checkpoint.schemes.int_quantized import IntQuantizedScheme
from mpjax.checkpoint.schemes.mxfp4 import MXFP4Scheme
from mpjax.checkpoint.schemes.pack_quantized import Group, PackQuantizedScheme
from mpjax.checkpoint.schemes.writing import Integers
from tests.mpjax.checkpoint.schemes.plain import random_plain

NAME = "model.layers.0.mlp.down_proj"
WORDS = (64, 40)  # [K, N] that every packing fills


def packed(bits, size, symmetric=False, order=False):
    return PackQuantizedScheme((Group(("Linear",), Integers(bits, size, symmetric), order),))


# The scheme, a weight's [K, N], and what `random_plain` is asked for.
CASES = {
    "awq": (AWQScheme(32), WORDS, {}),
    "awq-one-group": (AWQScheme(None), WORDS, {}),
    "gptq": (GPTQScheme(4, 32, symmetric=False), WORDS, {"least_zero": 1}),
    "gptq-8": (GPTQScheme(8, 64, symmetric=False), WORDS, {"least_zero": 1}),
    "gptq-v2": (GPTQScheme(4, 32, "gptq_v2", symmetric=False), WORDS, {}),
    "gptq-v2-act-order": (GPTQScheme(8, 32, "gptq_v2", True), WORDS, {"permuted": True}),
    "pack": (packed(4, 32), WORDS, {}),
    "pack-8": (packed(8, None), WORDS, {}),
    "pack-symmetric": (packed(4, 32, True), WORDS, {"symmetric": True}),
    "pack-act-order": (packed(4, 32, order=True), WORDS, {"permuted": True}),
    "pack-cut-words": (packed(4, None), (69, 5), {}),
    "pack-8-cut-words": (packed(8, 32), (96, 7), {}),
    "int": (IntQuantizedScheme(), (69, 5), {}),
    "int-weights-only": (IntQuantizedScheme(True, None), (69, 5), {"symmetric": True}),
    "int-one-scale": (IntQuantizedScheme(False), (69, 5), {"rows": 5}),
    "fp8-channels": (FP8Scheme("compressed-tensors", (1, None), "float8"), (69, 5), {}),
    "fp8-one-scale": (FP8Scheme("compressed-tensors", (None, None), None), (9, 5), {"rows": 5}),
    "fp8-blocks": (FP8Scheme("compressed-tensors", (128, 128), None), (200, 150), {"rows": 128}),
    "mxfp4": (MXFP4Scheme(), WORDS, {}),
    "fp8-fine-grained": (FP8Scheme("fp8", (128, 128), "float8"), (256, 256), {"rows": 128}),
}


def test_every_scheme_that_is_written_is_here():
    written = {scheme for scheme in registry.SCHEMES if scheme.layouts}
    assert written == {type(scheme) for scheme, *_ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32 - 1))
def test_decode_and_encode_are_inverses(case, seed):
    scheme, shape, asked = CASES[case]
    asked = dict(asked)
    symmetric = asked.pop("symmetric", False)
    format = dataclasses.replace(scheme.format(NAME, shape[0]), symmetric=symmetric)
    plain = random_plain(format, shape, seed, **asked)
    tensors = scheme.encode(plain, NAME)
    found = scheme.decode(tensors, NAME, shape)
    # That all zero points are the middle is seen by the reader, whatever it is called.
    found = dataclasses.replace(found, format=format)
    for field in dataclasses.fields(plain):
        one, other = getattr(plain, field.name), getattr(found, field.name)
        if isinstance(one, jax.Array):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), field.name
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), field.name
        else:
            assert one == other, field.name
    again = scheme.encode(found, NAME)
    assert again.keys() == tensors.keys()
    for suffix, array in tensors.items():
        assert np.asarray(again[suffix]).tobytes() == np.asarray(array).tobytes(), suffix


@pytest.mark.parametrize("case", CASES)
def test_encode_inside_jit_and_without_numbers(case):
    scheme, shape, asked = CASES[case]
    asked = {key: value for key, value in asked.items() if key != "symmetric"}
    plain = random_plain(scheme.format(NAME, shape[0]), shape, **asked)
    if case in ("pack-symmetric",):
        plain = dataclasses.replace(plain, zeros=plain.zeros * 0 + 8)
    eager = scheme.encode(plain, NAME)
    jitted = jax.jit(lambda plain: scheme.encode(plain, NAME))(plain)
    for suffix, spec in jax.eval_shape(lambda plain: scheme.encode(plain, NAME), plain).items():
        np.testing.assert_array_equal(eager[suffix], jitted[suffix])
        assert spec.shape == eager[suffix].shape
    scheme.check(eager, NAME, shape)
