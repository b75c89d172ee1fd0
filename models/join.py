"""Joins linear maps of one input into one product, if their formats allow it, and splits it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mpjax.kernels import QuantizedTensor
from mpjax.kernels.quantized_tensor import concatenate
from mpjax.kernels.quantized_tensor import split as split_outputs
from mpjax.models.layers import Linear

Kernel = jax.Array | QuantizedTensor


def join(maps: Sequence[Linear]) -> list[Linear]:
    """Joins maps along their output channels, in their order, into one Linear.

    If their formats differ, the result is a list of the separate maps.
    """
    kernels = _with_one_symmetry([linear.kernel.get_value() for linear in maps])
    biases = [None if linear.bias is None else linear.bias.get_value() for linear in maps]
    joint = _join(kernels)
    if joint is None:
        return [Linear(kernel, bias) for kernel, bias in zip(kernels, biases, strict=True)]
    given = [bias for bias in biases if bias is not None]
    return [Linear(joint, jnp.concatenate(given) if given else None)]


def split(linear: Linear, sizes: Sequence[int]) -> list[Linear]:
    """Splits a joined map into maps with these numbers of outputs, in the same format."""
    kernel: Kernel = linear.kernel.get_value()
    ends = list(itertools.accumulate(sizes))[:-1]
    kernels: Sequence[Kernel] = (
        split_outputs(kernel, sizes)
        if isinstance(kernel, QuantizedTensor)
        else jnp.split(kernel, ends, axis=1)
    )
    biases: Sequence[jax.Array | None] = [None] * len(sizes)
    if linear.bias is not None:
        biases = jnp.split(linear.bias.get_value(), ends)
    return [Linear(*each) for each in zip(kernels, biases, strict=True)]


def _with_one_symmetry(kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    """Declares symmetric kernels asymmetric if any kernel is, so that they can be joined.

    The weights stay the same: their zero points are all the middle of the codes.
    """
    packed = [kernel for kernel in kernels if isinstance(kernel, QuantizedTensor)]
    if all(kernel.format.symmetric for kernel in packed):
        return kernels
    return [
        dataclasses.replace(kernel, format=dataclasses.replace(kernel.format, symmetric=False))
        if isinstance(kernel, QuantizedTensor)
        else kernel
        for kernel in kernels
    ]


def _join(kernels: Sequence[Kernel]) -> Kernel | None:
    """One kernel with all output channels, or None if the kernels' formats differ."""
    if len(kernels) == 1:
        return kernels[0]
    packed = [kernel for kernel in kernels if isinstance(kernel, QuantizedTensor)]
    plain = [kernel for kernel in kernels if not isinstance(kernel, QuantizedTensor)]
    if packed and plain:
        return None
    return concatenate(packed) if packed else jnp.concatenate(plain, axis=1)
