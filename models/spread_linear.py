"""Linear maps of the experts of one device, when experts are spread (expert-parallel)."""

from __future__ import annotations

import jax

from mpjax.kernels import LocalExperts, QuantizedTensor
from mpjax.models.device_sums import add_terms
from mpjax.models.layers import Linear


class SpreadLinear(Linear):
    """One device's whole experts [experts, in, out] of a stack.

    It is called under `shard_map`, where each device of the mesh axis `axis` has equally many
    experts, in the order of the devices.
    """

    def __init__(
        self, kernel: jax.Array | QuantizedTensor, bias: jax.Array | None, axis: str
    ) -> None:
        super().__init__(kernel, bias)
        self.axis = axis

    def own(self, experts: jax.Array) -> LocalExperts:
        """The experts int32 [..., k] of tokens as indices of this device's stack."""
        count = self.kernel.get_value().shape[0]
        first, total = jax.lax.axis_index(self.axis) * count, jax.lax.axis_size(self.axis) * count
        return LocalExperts.of(experts, first, count, total)

    def add_shares(self, terms: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """All-reduces the sum of terms [splits, ..., out] to one term [1, ..., out].

        dtype: of activations.
        """
        return add_terms(terms, dtype, self.axis)
