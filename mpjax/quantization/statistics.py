"""Statistics of the inputs of a linear map, summed over the tokens of calibration text."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mpjax.models.mlp import RoutedInputs

PRECISION = jax.lax.Precision.HIGHEST


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "products", "magnitudes", "largest", "smallest", "samples"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sums over the inputs x [K] of a linear map; a pytree.

    tokens: float32 [], the number of inputs. products: float32 [K, K], the sum of x xᵀ.
    magnitudes: float32 [K], the sum of |x|.
    largest, smallest: float32 [K], maximum and minimum over all inputs and 0. samples: float32 [S,
    K], some inputs, evenly spread over the text.
    """

    tokens: jax.Array
    products: jax.Array
    magnitudes: jax.Array
    largest: jax.Array
    smallest: jax.Array
    samples: jax.Array

    @classmethod
    def of(cls, inputs: jax.Array, is_real: jax.Array, samples: int) -> Statistics:
        """Sums over inputs [batch, tokens, K].

        is_real: bool [batch, tokens], False for padding, which is not counted. samples: number of
        inputs to keep. If fewer are real, the last is repeated.
        """
        x = inputs.reshape(-1, inputs.shape[-1]).astype(jnp.float32)
        real = is_real.reshape(-1)
        x = jnp.where(real[:, None], x, 0.0)
        # Real inputs come first in `order`; every n-th of them is kept.
        order, last = jnp.argsort(~real, stable=True), jnp.maximum(real.sum() - 1, 0)
        kept = jnp.minimum(jnp.arange(samples) * jnp.maximum(real.sum() // samples, 1), last)
        return cls(
            real.sum().astype(jnp.float32),
            jnp.matmul(x.T, x, precision=PRECISION),
            jnp.abs(x).sum(0),
            x.max(0, initial=0.0),
            x.min(0, initial=0.0),
            x[order[kept]],
        )

    @classmethod
    def of_experts(cls, inputs: RoutedInputs, is_real: jax.Array, samples: int) -> Statistics:
        """Sums over the inputs of each expert, with a leading axis of experts in every array.

        inputs: for tokens [batch, tokens]. is_real: bool [batch, tokens].
        """
        own_rows = inputs.x.ndim > inputs.experts.ndim
        batch, channels = len(is_real), inputs.x.shape[-1]

        def of_expert(number: jax.Array) -> Statistics:
            is_routed = (inputs.experts == number) & is_real[..., None]  # [batch, tokens, k]
            real = is_routed.reshape(batch, -1) if own_rows else is_routed.any(-1)
            return cls.of(inputs.x.reshape(batch, -1, channels), real, samples)

        return jax.lax.map(of_expert, jnp.arange(inputs.total))

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both sets of inputs together."""
        return Statistics(
            self.tokens + other.tokens,
            self.products + other.products,
            self.magnitudes + other.magnitudes,
            jnp.maximum(self.largest, other.largest),
            jnp.minimum(self.smallest, other.smallest),
            jnp.concatenate([self.samples, other.samples], -2),
        )

    def __truediv__(self, scales: jax.Array) -> Statistics:
        """The statistics of the inputs divided by positive scales [K].

        scales: [K], or [experts, K] with separate scales for each expert.
        """
        scales = jnp.broadcast_to(scales, self.magnitudes.shape)
        row = scales[..., None, :]
        return Statistics(
            self.tokens,
            self.products / (row * scales[..., None]),
            self.magnitudes / scales,
            self.largest / scales,
            self.smallest / scales,
            self.samples / row,
        )

    @property
    def hessian(self) -> jax.Array:
        """The mean of x xᵀ, float32 [K, K]: half the second derivative of the squared error."""
        return self.products / jnp.maximum(self.tokens, 1.0)

    @property
    def mean_square(self) -> jax.Array:
        """The mean of x², float32 [K]."""
        return jnp.diagonal(self.products) / jnp.maximum(self.tokens, 1.0)

    @property
    def largest_magnitude(self) -> jax.Array:
        """The largest |x|, float32 [K]."""
        return jnp.maximum(self.largest, -self.smallest)


def squared_error(difference: jax.Array, hessian: jax.Array) -> jax.Array:
    """The mean over inputs x of |x · difference|², float32 [N], for each output channel.

    difference: float32 [K, N], of two weights. hessian: float32 [K, K], the mean of x xᵀ.
    """
    return (difference * jnp.matmul(hessian, difference, precision=PRECISION)).sum(0)
