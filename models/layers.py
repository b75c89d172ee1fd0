"""Layers that decoders are made of. Calling a layer never changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import (
    ActivationBlocks,
    ActivationFormat,
    DividedRows,
    LocalExperts,
    QuantizedActivations,
    QuantizedTensor,
    StaticRows,
    WeightFormat,
    add_rms_norm,
    matmul,
    matmul_terms,
    quantize_rows,
    rms_norm,
)
from mpjax.kernels.checks import as_array, as_dtype, norm_epsilon, require_type, shown, whole_number
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.rounding import narrow
from mpjax.kernels.rowwise.projection import project, project_rms_norm
from mpjax.kernels.rowwise.reference import row_means
from mpjax.models.config import DecoderConfig
from mpjax.models.low_rank import LowRank
from mpjax.models.maps import LinearMaps
from mpjax.models.state import WHOLE, StepContext

Activations = jax.Array | QuantizedActivations
# How activations are rounded: to a format; to a format by devices that have parts of each row;
# to a weight's blocks; or with a weight's static scale.
Rounding = ActivationFormat | ActivationBlocks | DividedRows | StaticRows


class Projection(NamedTuple):
    """Requests that a norm also multiplies its result by a matrix, such as a router's.

    matrix: [outputs, hidden].
    """

    matrix: jax.Array


class Projected(NamedTuple):
    """Activations [..., hidden] in 16 bits, and their products with a Projection, float32."""

    values: jax.Array
    products: jax.Array


def as_activations(name: str, x: Any) -> Activations:
    """x, converted to an array unless it is quantised activations.

    name: of the argument, for the message. Raises ValueError for anything else.
    """
    return x if isinstance(x, QuantizedActivations) else as_array(name, x)


def rounded(x: jax.Array, format: Rounding | None) -> Activations:
    """X [..., K] rounded to the format, with row scales or in blocks; x if format is None."""
    if format is None or (isinstance(format, ActivationFormat) and not format.scales_rows):
        return x
    return quantize_rows(x, format)


def joined_terms(*parts: jax.Array) -> jax.Array:
    """Terms float32 whose sum is that of several outputs' terms [terms, ...].

    In a batch-invariant context one for each output, since the number of an output's terms may
    depend on the number of rows, and with it the order of a sum over all.
    """
    wide = [part.astype(jnp.float32) for part in parts]
    if is_batch_invariant():
        # Without the barrier, XLA would fuse products into this sum in some programs only.
        wide = [part.sum(0, keepdims=True) for part in jax.lax.optimization_barrier(wide)]
    return jnp.concatenate(wide)


def _as_array_or_shape(name: str, value: Any) -> Any:
    """The value if it has a shape (such as a ShapeDtypeStruct), else the value as an array."""
    return value if hasattr(value, "shape") else as_array(name, value)


class Packed(nnx.Variable):
    """A QuantizedTensor in a module: not an nnx.Param, since codes have no derivative."""


class Linear(nnx.Module):
    """Linear map x · kernel + bias, with a kernel [in, out] in any weight format.

    A packed kernel is a Packed variable, a plain array an nnx.Param. The context of a call selects
    the adapter of each token's sequence.

    adapter: changes of the map, beside the kernel; None without adapters.
    """

    adapter: LowRank | None = None

    def __init__(self, kernel: jax.Array | QuantizedTensor, bias: jax.Array | None = None):
        self.kernel: nnx.Variable
        if isinstance(kernel, QuantizedTensor):
            self.kernel = Packed(kernel)
        else:
            self.kernel = nnx.Param(_as_array_or_shape("Linear: kernel", kernel))
        self.bias = None if bias is None else nnx.Param(_as_array_or_shape("Linear: bias", bias))

    @classmethod
    def create(cls, shape: tuple[int, int], *, bias: bool, dtype: str, rngs: nnx.Rngs) -> Linear:
        """A randomly initialised map (normal, σ = 0.02) of `shape` [in, out]."""
        require_type("Linear: rngs", rngs, nnx.Rngs, hint=", such as nnx.Rngs(0)")
        parameter_dtype = as_dtype("Linear: dtype", dtype)
        if not isinstance(shape, tuple | list) or len(shape) != 2:
            raise ValueError(f"Linear: shape is {shown(shape)}: expected [in, out]")
        shape = whole_number("Linear: shape", shape[0]), whole_number("Linear: shape", shape[1])
        kernel = nnx.initializers.normal(0.02)(rngs.params(), shape, parameter_dtype)
        return cls(kernel, jnp.zeros(shape[1], parameter_dtype) if bias else None)

    def __call__(self, x: Activations, context: StepContext = WHOLE) -> jax.Array:
        """Maps x [..., in] to [..., out]."""
        y = self.product(x)
        if self.adapter is not None:
            y = self.adapter.add(y, x, context)
        if self.bias is None:
            return y
        return y + jax.lax.broadcast_to_rank(self.bias.get_value(), y.ndim)

    def product(self, x: Activations) -> jax.Array:
        """Product of x and the kernel, without the bias: [..., in] to [..., out].

        A float32 kernel multiplies 16-bit x in float32; the product has the dtype of x.
        """
        kernel: Any = self.kernel.get_value()
        is_wide = not isinstance(kernel, QuantizedTensor) and kernel.dtype == jnp.float32
        if is_wide and isinstance(x, jax.Array) and x.dtype in (jnp.bfloat16, jnp.float16):
            return matmul(x.astype(kernel.dtype), kernel).astype(x.dtype)
        return matmul(x, kernel)

    def terms(self, x: Activations, context: StepContext = WHOLE) -> jax.Array:
        """Terms [splits, ..., out] whose sum is x · kernel + bias, for `RMSNorm.add` to add."""
        kernel: Any = self.kernel.get_value()
        if self.bias is None and isinstance(kernel, QuantizedTensor):
            if self.adapter is not None:
                return self.adapter.terms(x, kernel, context)
            return matmul_terms(x, kernel)
        return self(x, context)[None]

    def add_shares(self, terms: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The same terms [splits, ..., out]: this map is not divided among devices."""
        return terms

    def own(self, experts: jax.Array) -> jax.Array | LocalExperts:
        """The same experts int32 [..., k]: this map has all experts."""
        return experts

    def routed(
        self, x: jax.Array, experts: jax.Array
    ) -> tuple[jax.Array, QuantizedTensor | jax.Array]:
        """The inputs [..., k, in] of k experts, permuted if needed, and the stack of kernels.

        experts: int32 [..., k], the experts' indices.
        """
        return x, self.kernel.get_value()

    @property
    def divided_rows(self) -> DividedRows | None:
        """None: each input has whole rows here; see RowLinear."""
        return None

    @property
    def format(self) -> WeightFormat | None:
        """The format of a packed kernel; None for a plain one."""
        kernel: Any = self.kernel.get_value()
        return kernel.format if isinstance(kernel, QuantizedTensor) else None

    @property
    def activations(self) -> Rounding:
        """How the kernel's input is rounded.

        To 16 bits for a plain kernel, beside an adapter, which needs x unrounded, and for a
        permuted kernel, since channels move first (except with activation blocks: rounding moves
        them).
        """
        kernel: Any = self.kernel.get_value()
        if not isinstance(kernel, QuantizedTensor) or self.adapter is not None:
            return ActivationFormat()
        found: Rounding = kernel.activations
        has_moved = isinstance(found, ActivationBlocks) or kernel.permutation is None
        return found if has_moved else ActivationFormat()


def shared(roundings: Sequence[Rounding]) -> Rounding:
    """How the input of several maps is rounded: 16 bits unless all have one ActivationFormat."""
    if len(roundings) == 1:
        return roundings[0]
    formats = [each for each in roundings if isinstance(each, ActivationFormat)]
    are_equal = len(formats) == len(roundings) and len(set(formats)) == 1
    return formats[0] if are_equal else ActivationFormat()


class FusedLinear(nnx.Module):
    """Linear maps of one input, computed as one product if their formats allow it.

    parts: one Linear over the output channels of all maps, or one Linear for each map if formats
    differ. sizes: output channels of each map. factors: as in LinearMaps. adapter: changes of all
    maps, before the factors; None without.
    """

    adapter: LowRank | None = None

    def __init__(
        self, parts: Sequence[Linear], sizes: tuple[int, ...], factors: tuple[float, ...] = ()
    ):
        self.parts = nnx.List(parts)
        self.sizes, self.factors = sizes, factors

    @classmethod
    def create(cls, maps: LinearMaps, dtype: str, rngs: nnx.Rngs) -> FusedLinear:
        """Randomly initialised maps, as one Linear."""
        sizes = tuple(outputs for _, outputs in maps.shapes)
        shape = maps.shapes[0][0], sum(sizes)
        linear = Linear.create(shape, bias=maps.bias, dtype=dtype, rngs=rngs)
        return cls([linear], sizes, maps.factors)

    @property
    def activations(self) -> Rounding:
        """How the input of all parts is rounded: 16 bits unless all have one ActivationFormat.

        Also 16 bits beside an adapter, which needs x unrounded.
        """
        if self.adapter is not None:
            return ActivationFormat()
        return shared([part.activations for part in self.parts])

    @property
    def _packed(self) -> Any:
        """The packed kernel of all maps, if there is one, and no bias; else None."""
        first, *others = self.parts
        is_one = not others and first.bias is None and first.format is not None
        return first.kernel.get_value() if is_one else None

    def gated(self, x: Activations, context: StepContext, activation: str) -> jax.Array | None:
        """activation(gate) · up, if this is fused with an adapter's change of both; else None."""
        adapter, kernel = self.adapter, self._packed
        if adapter is None or kernel is None or self.factors or adapter.axis is not None:
            return None
        if not adapter.is_in_kernels(context):
            return None
        return adapter.gated(x, kernel, context, activation)

    def terms(self, x: Activations, context: StepContext = WHOLE) -> jax.Array:
        """Terms [splits, ..., sum of sizes] whose sum is the concatenated outputs of all maps."""
        kernel = self._packed
        if self.adapter is not None and kernel is not None:
            return self._scaled(self.adapter.terms(x, kernel, context))
        if len(self.parts) == 1:
            terms = self.parts[0].terms(x, context)
        else:
            terms = jnp.concatenate([part(x, context) for part in self.parts], -1)[None]
        if self.adapter is not None:
            terms = self.adapter.add_terms(terms, x, context, self._bias)
        return self._scaled(terms)

    @property
    def _bias(self) -> jax.Array | None:
        """The concatenated biases of all maps; None if they have none."""
        biases = [part.bias.get_value() for part in self.parts if part.bias is not None]
        return jnp.concatenate(biases) if biases else None

    def __call__(self, x: Activations, context: StepContext = WHOLE) -> list[jax.Array]:
        """Maps x [..., in] to a list with one array [..., size] for each of `sizes`."""
        outputs = [part(x, context) for part in self.parts]
        if len(outputs) == len(self.sizes) and self.adapter is None:
            factors = self.factors or [1] * len(outputs)
            return [
                each if factor == 1 else each * jnp.asarray(factor, each.dtype)
                for each, factor in zip(outputs, factors, strict=True)
            ]
        joined = jnp.concatenate(outputs, -1) if len(outputs) > 1 else outputs[0]
        if self.adapter is not None:
            joined = self.adapter.add(joined, x, context, self._bias)
        joined = self._scaled(joined)
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        return jnp.split(joined, ends, axis=-1)

    def _scaled(self, outputs: jax.Array) -> jax.Array:
        """The outputs [..., sum of sizes] of all maps times their factors."""
        if not self.factors:
            return outputs
        factors = np.repeat(np.asarray(self.factors, np.float32), self.sizes)
        wide = jax.lax.broadcast_to_rank(jnp.asarray(factors, outputs.dtype), outputs.ndim)
        return outputs * wide


class RMSNorm(nnx.Module):
    """Norm x / √(mean(x²) + ε) · weight over the last axis, computed in float32.

    is_offset: whether files store the weight minus 1 (Gemma); the module's weight is then float32,
    which represents the sum exactly.
    """

    def __init__(self, size: int, epsilon: float, dtype: str, *, is_offset: bool = False):
        size = whole_number("RMSNorm: size", size)
        self.dtype = as_dtype("RMSNorm: dtype", dtype).name
        self.is_offset = is_offset
        self.weight = nnx.Param(jnp.ones(size, "float32" if is_offset else self.dtype))
        self.epsilon = norm_epsilon("RMSNorm: epsilon", epsilon)

    @classmethod
    def of(cls, config: DecoderConfig, size: int, epsilon: float | None = None) -> RMSNorm:
        """A norm over `size` channels, of the kind that the model has.

        epsilon: None for the model's.
        """
        epsilon = config.rms_norm_eps if epsilon is None else epsilon
        if config.centered_norms:
            return LayerNorm(size, epsilon, config.dtype, has_bias=config.norm_bias)
        return cls(size, epsilon, config.dtype, is_offset=config.offset_norms)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x over its last axis; the same shape and dtype."""
        x = as_array("RMSNorm: x", x)
        return rms_norm(x, self.weight.get_value(), self.epsilon).astype(x.dtype)

    def scaled(self, x: jax.Array, mean: jax.Array) -> jax.Array:
        """Normalises a part x of the channels. mean: float32 [..., 1], the mean square of all."""
        weight = self.weight.get_value().astype(jnp.float32)
        wide = x.astype(jnp.float32) * jax.lax.rsqrt(mean + self.epsilon)
        return (wide * jax.lax.broadcast_to_rank(weight, wide.ndim)).astype(x.dtype)

    def add(
        self, terms: jax.Array, residual: jax.Array | None, format: Rounding | str | None
    ) -> tuple[jax.Array, Activations]:
        """Adds the sum of terms [splits, ..., size] to the residual stream [..., size].

        Returns the new residual stream and its norm. format: how the norm is rounded; None for 16
        bits. See `add_rms_norm`.
        """
        weight = self.weight.get_value()
        return add_rms_norm(
            terms, residual, weight, self.epsilon, format=format, dtype=self._dtype(weight)
        )

    def project(
        self, terms: jax.Array, residual: jax.Array | None, projection: Projection
    ) -> tuple[jax.Array, Projected]:
        """As `add` in 16 bits, and also multiplies the norm by a projection's matrix."""
        weight = self.weight.get_value()
        stream, *found = project_rms_norm(
            *(terms, residual, weight, projection.matrix),
            epsilon=self.epsilon,
            dtype=self._dtype(weight),
        )
        return stream, Projected(*found)

    def _dtype(self, weight: jax.Array) -> str | None:
        """The dtype of results if it differs from the weight's, as with an offset; else None."""
        return self.dtype if self.is_offset and weight.dtype == jnp.float32 else None


class LayerNorm(RMSNorm):
    """Norm (x − mean(x)) / √(variance(x) + ε) · weight + bias over the last axis, in float32."""

    def __init__(self, size: int, epsilon: float, dtype: str, *, has_bias: bool):
        super().__init__(size, epsilon, dtype)
        self.bias = nnx.Param(jnp.zeros(size, self.dtype)) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x over its last axis; the same shape and dtype."""
        wide = as_array("LayerNorm: x", x).astype(jnp.float32)
        wide -= row_means(wide)
        normed = rms_norm(wide, self.weight.get_value(), self.epsilon)
        if self.bias is not None:
            bias = self.bias.get_value().astype(jnp.float32)
            normed += jax.lax.broadcast_to_rank(bias, normed.ndim)
        return normed.astype(x.dtype)

    def add(
        self, terms: jax.Array, residual: jax.Array | None, format: Rounding | str | None
    ) -> tuple[jax.Array, Activations]:
        """The new residual stream and its norm, as RMSNorm returns them, computed by XLA."""
        wide = terms.astype(jnp.float32).sum(0)
        if residual is not None:
            wide += residual.astype(jnp.float32)
        stream = narrow(wide, jnp.dtype(self.dtype))
        format = ActivationFormat.of(format) if isinstance(format, str) else format
        return stream, rounded(self(stream), format)

    def project(
        self, terms: jax.Array, residual: jax.Array | None, projection: Projection
    ) -> tuple[jax.Array, Projected]:
        """As `add` in 16 bits, and also multiplies the norm by a projection's matrix."""
        stream, x = self.add(terms, residual, None)
        assert isinstance(x, jax.Array)
        return stream, Projected(x, project(x, projection.matrix))
