"""Reads quantised weights whose encoding has no equivalent in mpjax.

They are dequantised and rounded to a format of mpjax (8 bits by default) when loaded.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import ClassVar

import jax

from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.tensors import Shape, Tensors
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.grid import fit
from mpjax.precision import describe_weights

# Half a step of 8 bits is 1/510 of the range; rounding a scale to float16 moves the largest value
# by up to another eighth of a step.
ROUNDED = WeightFormat("uint8", 32)
BOUND = ": by about 1/400 of the range of 32 weights and zero at most"


def describe_rounding(target: WeightFormat | None) -> str:
    """A phrase for messages: the target format, or ROUNDED with its error bound."""
    return f"{describe_weights(target or ROUNDED)}{BOUND if target is None else ''}"


@dataclasses.dataclass(frozen=True)
class RoundedReader(Reader):
    """Reads weights by dequantising and rounding them. `dequantize` is exact.

    target: the format to which all weights of the checkpoint are rounded, including those in 16
        bits; None: ROUNDED, only for quantised weights.
    """

    decoding_bytes: ClassVar[int] = 9  # float32, its rounding, and codes

    target: WeightFormat | None = dataclasses.field(default=None, kw_only=True)

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules on the device."""
        return self.target or ROUNDED

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        checks.require_groups(name, channels, self.weights)
        return self.weights

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """The codes nearest to the weights of one module."""
        values = self.dequantize(tensors, name, shape)
        return round_to(values, self.format(name, values.shape[0]))

    @abc.abstractmethod
    def dequantize(self, tensors: Tensors, name: str, shape: Shape | None = None) -> jax.Array:
        """The weight float32 [K, N] of one module, exact; see Reader.decode."""

    @property
    def contents(self) -> str:
        """A description of the format of the loaded weights."""
        return f"rounded to {describe_weights(dataclasses.replace(self.weights, operand=None))}"


@functools.partial(jax.jit, static_argnames="format")
def round_to(values: jax.Array, format: WeightFormat) -> PlainCodes:
    """The codes of a format nearest to values float32 [K, N]."""
    return fit(values, format).round(values)
