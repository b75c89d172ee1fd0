"""FP8's blocks; see test_schemes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.fp8 import FP8Reader
from tests.mpjax.checkpoint.schemes.modules import NAME
from tests.mpjax.checkpoint.schemes.modules import fp8 as module
from tests.mpjax.checkpoint.write_checkpoint import FP8


@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 400), st.sampled_from([1, 7, 64, 128, 300, 10**12]))
def test_every_output_channel_has_the_scale_of_its_block(outputs, channels, size):
    """A block larger than any matrix takes no memory."""
    rng = np.random.default_rng(outputs)
    tensors, weight = module(
        rng, (channels, outputs), (min(size, outputs), 128), "weight_scale_inv"
    )
    plain = FP8Reader("fp8", (size, 128)).decode(tensors, NAME)
    np.testing.assert_array_equal(plain.dequantize(), weight)


def test_keys_that_older_files_leave_out():
    reader = registry.read(FP8).reader(NAME)
    older = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert registry.read(older).reader(NAME) == reader
    assert registry.read(FP8 | {"weight_block_size": [64, 128]}).reader(NAME).block == (64, 128)  # type: ignore[attr-defined]
