"""A small model that repeats itself, and prompts that end before, at and behind a block's end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.models import Decoder
from tests.models.small import small_config, small_model

SIZES: dict[str, Any] = {"head_dim": 64, "max_position_embeddings": 512}


@pytest.fixture(scope="package")
def model() -> Decoder:
    """One layer in float32, a vocabulary of 50 tokens."""
    return small_model(small_config(windows=(None,), **SIZES))


@pytest.fixture(scope="package")
def prompts() -> tuple[jax.Array, jax.Array]:
    """Texts that repeat a part of themselves, int32 [4, 128], and their lengths."""
    rng = np.random.default_rng(0)
    texts = np.stack([np.resize(rng.integers(1, 50, size), 128) for size in (20, 33, 50, 128)])
    return jnp.asarray(texts, jnp.int32), jnp.asarray([100, 127, 128, 122], jnp.int32)
