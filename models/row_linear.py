"""A linear map whose input channels are divided among devices (row-parallel)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import (
    ActivationFormat,
    DividedRows,
    QuantizedActivations,
    QuantizedTensor,
    WeightFormat,
    matmul,
    matmul_terms,
    quantize_rows,
)
from mpjax.kernels.quantized_tensor import with_scales
from mpjax.models.device_sums import (
    add_over_devices,
    add_terms,
    needs_no_gradient,
    summing_dtype,
)
from mpjax.models.layers import Activations, Linear, Rounding
from mpjax.models.state import WHOLE, StepContext


class RowLinear(Linear):
    """One device's share of a Linear: some of the kernel's input channels, and the whole bias.

    It is called under `shard_map`, and sums the products over the mesh axis `axis`. A permutation
    covers the channels of all devices, so with one x is gathered first.

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
        """How the kernel's input is rounded; 16 bits with a permutation, as x is gathered first.

        A row's scale covers its channels on all devices.
        """
        kernel: Any = self.kernel.get_value()
        is_permuted = isinstance(kernel, QuantizedTensor) and kernel.permutation is not None
        if is_permuted or self.adapter is not None:
            return ActivationFormat()
        return self.divided_rows or super().activations

    @property
    def divided_rows(self) -> DividedRows | None:
        """How parts of rows are rounded with one scale per whole row; None without row scales."""
        kernel: Any = self.kernel.get_value()
        found = kernel.activations if isinstance(kernel, QuantizedTensor) else ActivationFormat()
        if isinstance(found, ActivationFormat) and found.scales_rows:
            return DividedRows(found, self.axis)
        return None

    def __call__(self, x: Activations, context: StepContext = WHOLE) -> jax.Array:
        """Maps this device's channels of x [..., in] to the whole output [..., out]."""
        y = self.product(x)
        if self.adapter is not None:
            y = self.adapter.add(y, x, context)
        if self.bias is None:
            return y
        return y + jax.lax.broadcast_to_rank(self.bias.get_value(), y.ndim).astype(y.dtype)

    def product(self, x: Activations) -> jax.Array:
        """The sum of all devices' products of x [..., in] and the kernel, without the bias.

        In x's dtype, or in float32 if the sum takes no longer. With float32, sums of int8 products
        are scaled after the all-reduce: the result equals one device's bit for bit, as long as the
        sums stay below 2**24.
        """
        kernel: Any = self.kernel.get_value()
        shape, outputs = _shape(x), kernel.shape[-1]
        dtype = summing_dtype(math.prod(shape[:-1]) * outputs, x.dtype)
        if not isinstance(kernel, QuantizedTensor):
            return add_over_devices(matmul(x, kernel, out_dtype=dtype), self.axis)
        if kernel.permutation is not None:
            assert isinstance(x, jax.Array)  # `activations` asks for 16 bits
            x = jnp.take(self._of_all_devices(x), kernel.permutation, axis=-1)
            kernel = dataclasses.replace(kernel, permutation=None)
        rows = self.divided_rows
        if rows is not None and rows.values == "int8" and dtype == jnp.float32:
            multiply = _multiply_exactly if needs_no_gradient() else _exact_product
            return multiply(rows, x, kernel)
        terms = matmul_terms(x, kernel, out_dtype=dtype, activations=rows)
        [total] = self.add_shares(terms, x.dtype)
        return total

    def routed(self, x: jax.Array, experts: jax.Array) -> tuple[jax.Array, Any]:
        """The inputs of k experts, permuted if needed, and the kernels without permutation."""
        kernel: Any = self.kernel.get_value()
        if not isinstance(kernel, QuantizedTensor) or kernel.permutation is None:
            return x, kernel
        order = kernel.permutation[experts]  # [..., k, in]
        x = jnp.take_along_axis(self._of_all_devices(x), order, axis=-1)
        return x, dataclasses.replace(kernel, permutation=None)

    def _of_all_devices(self, x: jax.Array) -> jax.Array:
        """All devices' channels of x [..., in], concatenated."""
        return jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)

    def add_shares(self, terms: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """All-reduces the sum of terms [splits, ..., out] to one term [1, ..., out].

        dtype: of activations.
        """
        return add_terms(terms, dtype, self.axis)

    def terms(self, x: Activations, context: StepContext = WHOLE) -> jax.Array:
        """One term [1, ..., out]: x · kernel + bias, summed over devices."""
        return self(x, context)[None]


def _multiply_exactly(rows: DividedRows, x: Activations, kernel: QuantizedTensor) -> jax.Array:
    """The sum of all devices' products in x's dtype, scaled after the all-reduce.

    Float32 represents sums of int8 products below 2**24 exactly, so their order doesn't matter.
    """
    if not isinstance(x, QuantizedActivations):
        x = quantize_rows(x, rows)
    scales = kernel.scales()[0] if kernel.channel_scales is None else kernel.channel_scales
    ones = jnp.ones_like(scales)
    if kernel.channel_scales is None:
        kernel = with_scales(kernel, ones[None])
    else:
        kernel = dataclasses.replace(kernel, channel_scales=ones)
    codes = dataclasses.replace(x, scales=jnp.ones_like(x.scales))
    sums = add_over_devices(matmul(codes, kernel, out_dtype=jnp.float32), rows.axis)
    return (sums * x.scales * jax.lax.broadcast_to_rank(scales, sums.ndim)).astype(x.dtype)


_exact_product = jax.custom_vjp(_multiply_exactly, nondiff_argnums=(0,))


def _forward(rows: DividedRows, x: Activations, kernel: QuantizedTensor) -> tuple[Any, Any]:
    return _exact_product(rows, x, kernel), (x, kernel)


def _backward(rows: DividedRows, saved: Any, gradient: jax.Array) -> Any:
    """The derivative of the sum of scaled products, with rounding as the identity."""

    def scaled(x: Activations, kernel: QuantizedTensor) -> jax.Array:
        product = matmul(x, kernel, out_dtype=jnp.float32, activations=rows)
        return jax.lax.psum(product, rows.axis).astype(x.dtype)

    return jax.vjp(scaled, *saved)[1](gradient)


_exact_product.defvjp(_forward, _backward)


def _shape(x: Activations) -> tuple[int, ...]:
    return x.shape
