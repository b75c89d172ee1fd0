"""Marks of tests."""

from __future__ import annotations

import jax
import pytest

interpreted_here = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="JAX 0.10's interpreter wants every thread to see every phase of a barrier",
)
