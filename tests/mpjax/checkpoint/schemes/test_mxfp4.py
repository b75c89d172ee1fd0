"""MXFP4's scales, and that writing undoes reading; see test_schemes."""

from __future__ import annotations

import numpy as np

from mpjax.checkpoint.schemes.mxfp4 import SCHEME, MXFP4Reader
from mpjax.kernels import pack, unpack


def test_writing_undoes_reading(rng):
    tensors = {
        "blocks": rng.integers(0, 256, (5, 3, 16)).astype(np.uint8),
        "scales": np.arange(15, dtype=np.uint8).reshape(5, 3),  # subnormal ones among them
    }
    tensors["scales"][4] = [126, 127, 254]
    plain = MXFP4Reader().decode(tensors, "module", (96, 5))
    writer = SCHEME.writing.begin("mxfp4", {"module": plain})
    written = writer.encode(unpack(pack(plain)), "module")
    assert written.keys() == tensors.keys()
    for suffix, tensor in tensors.items():
        assert written[suffix].dtype == tensor.dtype
        np.testing.assert_array_equal(written[suffix], tensor)


def test_all_scales_are_powers_of_two_but_one_that_is_none():
    scales = np.arange(256, dtype=np.uint8)[:, None]
    blocks = np.zeros((256, 1, 16), np.uint8)
    found = MXFP4Reader().decode({"blocks": blocks, "scales": scales}, "module").scales[0]
    found = np.asarray(found).astype(np.float64)
    np.testing.assert_array_equal(found[:255], 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(found[255])
