from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint.schemes import static_activations
from mpjax.errors import CheckpointError

SUFFIX = static_activations.SUFFIX


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_number(shape, dtype):
    tensors = {SUFFIX: np.full(shape, 0.25, dtype)}
    static_activations.check(tensors, "a")
    found = static_activations.read(tensors, "a")
    assert (found.dtype, found.shape, float(found[0])) == (np.float32, (1,), 0.25)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "a has no tensor input_scale: expected"),
        ({SUFFIX: np.ones(2, np.float32)}, r"a\.input_scale is float32 \[2\]: expected .* \[1\]"),
        ({SUFFIX: np.ones(1, np.int8)}, r"a\.input_scale is int8 \[1\]: expected"),
    ],
)
def test_tensor_errors(tensors, message):
    with pytest.raises(CheckpointError, match=message):
        static_activations.check(tensors, "a")


@pytest.mark.parametrize("value", [0, -1, np.inf, np.nan])
def test_scales_that_no_quantiser_writes(value):
    with pytest.raises(CheckpointError, match="expected a positive, finite scale"):
        static_activations.read({SUFFIX: np.full(1, value, np.float32)}, "a")
