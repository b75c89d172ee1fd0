from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, quantize
from mpjax.models import symmetry
from mpjax.models.symmetry import formats_of_all, shared_symmetry, with_symmetry

SYMMETRIC, ASYMMETRIC = (WeightFormat.parse(text) for text in ("uint4:g32:sym", "uint4:g32"))


def test_a_kernel_that_is_declared_asymmetric_keeps_its_numbers(rng):
    kernel = quantize(jnp.asarray(rng.standard_normal((64, 8)), jnp.float32), SYMMETRIC)
    declared = with_symmetry(kernel, ASYMMETRIC)
    assert declared.format == ASYMMETRIC
    np.testing.assert_array_equal(declared.dequantize(), kernel.dequantize())
    plain = kernel.dequantize()
    assert with_symmetry(plain, ASYMMETRIC) is plain
    assert with_symmetry(kernel, None) is kernel


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ([SYMMETRIC, SYMMETRIC], SYMMETRIC),
        ([SYMMETRIC, ASYMMETRIC], ASYMMETRIC),
        ([None, None], None),
    ],
)
def test_one_asymmetric_format_makes_all_so(formats, expected):
    assert shared_symmetry(formats) == expected


def test_the_zero_points_of_another_process_count(monkeypatch):
    formats = [SYMMETRIC, SYMMETRIC, None]
    assert formats_of_all(formats) == formats

    def gather(mine):
        return np.stack([mine, np.array([False, True, True])])

    monkeypatch.setattr(symmetry.multihost_utils, "process_allgather", gather)
    assert formats_of_all(formats) == [ASYMMETRIC, SYMMETRIC, None]
