"""The static activation scale of a module.

The tensor `input_scale` is one number, [1] in compressed-tensors and [] in ModelOpt. A product
rounds its input x to the codes nearest to x / input_scale, and clamps values out of range.
Source: compressed-tensors, quantization/lifecycle/forward.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.tensors import Specs
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes
from mpjax.kernels.checks import is_known

SUFFIX = "input_scale"


def check(specs: Specs, name: str) -> None:
    """Raises CheckpointError unless a module has a valid `input_scale`."""
    shape = tuple(specs[SUFFIX].shape) if SUFFIX in specs else (1,)
    expected = {SUFFIX: (shape if shape == () else (1,), checks.SCALE_DTYPES)}
    checks.check_tensors(name, specs, expected, "input_activations")


def read(tensors: Mapping[str, Any], name: str) -> jax.Array:
    """The scale, float32 [1]. Raises CheckpointError unless it is positive and finite."""
    scale = jnp.asarray(tensors[SUFFIX]).astype(jnp.float32).reshape(1)
    if is_known(scale) and not 0 < float(scale[0]) < float("inf"):
        raise CheckpointError(
            f"{name}.{SUFFIX} is {float(scale[0])}: expected a positive, finite scale; the "
            "checkpoint is damaged"
        )
    return scale


def written(plain: PlainCodes) -> dict[str, Any]:
    """The tensor `input_scale` of a module by suffix; empty without a static activation scale."""
    return {} if plain.activation_scale is None else {SUFFIX: plain.activation_scale}
