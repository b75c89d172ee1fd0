"""Random plain codes that a scheme can hold, and the writer of a config.json's format."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.writing import Writer
from mpjax.kernels import PlainCodes, WeightFormat

E4M3 = ml_dtypes.float8_e4m3fn


def random_plain(
    format: WeightFormat | str, shape, seed=0, *, least_zero=0, permuted=False, rows=1
) -> PlainCodes:
    """Codes of every value, with zero points from `least_zero` on.

    permuted: channels in another order, ascending in each group. rows: output channels of FP8 that
    share a scale.
    """
    rng, format = np.random.default_rng(seed), WeightFormat.of(format)
    channels, outputs = shape
    groups = format.groups(channels)
    scales = rng.uniform(0.01, 0.1, (groups, -(-outputs // rows)))
    scales = np.repeat(scales, rows, axis=1)[:, :outputs].astype(np.float32)
    if format.codes == "float8":
        codes = rng.integers(0, 256, shape, np.uint8)
        codes[codes % 128 == 127] = 0  # the NaNs
        return PlainCodes(format, jnp.asarray(codes.view(E4M3)), jnp.asarray(scales))
    if format.codes == "float4":
        codes = rng.integers(0, 16, shape, np.uint8)
        scales = jnp.asarray(2.0 ** rng.integers(-126, 100, scales.shape), jnp.bfloat16)
        return PlainCodes(format, jnp.asarray(codes), scales)
    if format.codes == "int8":
        codes = rng.integers(-128, 128, shape, np.int8)
        return PlainCodes(format, jnp.asarray(codes), jnp.asarray(scales))
    codes = rng.integers(0, 2**format.bits, shape, np.uint8)
    middle = np.full((groups, outputs), 2 ** (format.bits - 1))
    zeros = rng.integers(least_zero, 2**format.bits, middle.shape)
    zeros = (middle if format.symmetric else zeros).astype(np.uint16)
    permutation = None
    if permuted:
        size = format.group_size or channels
        order = np.argsort(rng.permutation(np.arange(channels) // size), kind="stable")
        permutation = jnp.asarray(order, jnp.int32)
    return PlainCodes(
        format,
        jnp.asarray(codes),
        jnp.asarray(scales, jnp.float16),
        jnp.asarray(zeros),
        permutation,
    )


def writer_of(config, plain: PlainCodes, name="a") -> Writer:
    """The writer of the layout that a `quantization_config` names, for one module."""
    writing = registry.read(config).part(name).scheme.writing
    layout = config.get("checkpoint_format") or config.get("format") or config["quant_method"]
    layout = layout if layout in writing.layouts else writing.layouts[0]
    return writing.begin(layout, {name: plain})
