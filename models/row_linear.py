"""A linear map whose input channels are divided among devices (row-parallel)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import ActivationFormat, QuantizedTensor, WeightFormat, matmul, matmul_terms
from mpjax.models.layers import Activations, Linear, Rounding

# Sums of up to so many bytes take the time of a signal between devices, in float32 as in 16 bits:
# between two H100s by NVLink, where `mpjax bench sums --devices 2` measured them.
LATENCY_BYTES = 256 << 10


class RowLinear(Linear):
    """One device's share of a Linear: its kernel has some input channels, its bias is the whole.

    It is called under `shard_map`, and adds the products of all devices of the mesh axis `axis`.
    With a permutation, whose channels are places in the x of all devices, x is gathered first.

    whole_format: the format of the whole kernel, whose groups may be larger; None for a plain one.
    """

    def __init__(
        self,
        kernel: jax.Array | QuantizedTensor,
        bias: jax.Array | None,
        axis: str,
        whole_format: WeightFormat | None,
    ) -> None:
        super().__init__(kernel, bias)
        self.axis, self.whole_format = axis, whole_format

    @property
    def format(self) -> WeightFormat | None:
        """The format of the whole kernel."""
        return self.whole_format

    @property
    def activations(self) -> Rounding:
        """How the kernel's input is rounded; 16 bits with a permutation, as x is gathered first."""
        kernel: Any = self.kernel.get_value()
        is_permuted = isinstance(kernel, QuantizedTensor) and kernel.permutation is not None
        return ActivationFormat() if is_permuted else super().activations

    def __call__(self, x: Activations) -> jax.Array:
        """Maps a share of x [..., in] to the whole [..., out]."""
        y = self.product(x)
        if self.bias is None:
            return y
        return y + jax.lax.broadcast_to_rank(self.bias.get_value(), y.ndim).astype(y.dtype)

    def product(self, x: Activations) -> jax.Array:
        """The sum of all devices' products of x [..., in] and the kernel, without the bias.

        In x's dtype, or in float32 where that takes no longer.
        """
        kernel: Any = self.kernel.get_value()
        shape, outputs = _shape(x), kernel.shape[-1]
        dtype = summing_dtype(math.prod(shape[:-1]) * outputs, x.dtype)
        if not isinstance(kernel, QuantizedTensor):
            return jax.lax.psum(matmul(x, kernel, out_dtype=dtype), self.axis)
        if kernel.permutation is not None:
            assert isinstance(x, jax.Array)  # `activations` asks for 16 bits
            everybody = jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)
            x = jnp.take(everybody, kernel.permutation, axis=-1)
            kernel = dataclasses.replace(kernel, permutation=None)
        [total] = self.add_shares(matmul_terms(x, kernel, out_dtype=dtype), x.dtype)
        return total

    def add_shares(self, terms: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The one term [1, ..., out] that is the sum of terms [splits, ..., out] of all devices.

        dtype: of activations.
        """
        total = terms.sum(0)
        return jax.lax.psum(total.astype(summing_dtype(total.size, dtype)), self.axis)[None]

    def terms(self, x: Activations) -> jax.Array:
        """The one term [1, ..., out], x · kernel + bias."""
        return self(x)[None]


def summing_dtype(size: int, dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which devices add arrays of `size` numbers; dtype: of activations."""
    return jnp.dtype(jnp.float32 if size * 4 <= LATENCY_BYTES else dtype)


def _shape(x: Activations) -> tuple[int, ...]:
    return x.shape
