"""Linear maps of a device's experts, where experts are spread over devices (expert-parallel)."""

from __future__ import annotations

import jax

from mpjax.kernels import LocalExperts, QuantizedTensor
from mpjax.models.device_sums import add_terms
from mpjax.models.layers import Linear


class SpreadLinear(Linear):
    """One device's experts [experts, in, out] of a stack, all of each of them.

    It is called under `shard_map`, where each device of the mesh axis `axis` has as many experts,
    in the order of the devices.
    """

    def __init__(
        self, kernel: jax.Array | QuantizedTensor, bias: jax.Array | None, axis: str
    ) -> None:
        super().__init__(kernel, bias)
        self.axis = axis

    def own(self, experts: jax.Array) -> LocalExperts:
        """The experts int32 [..., k] of tokens, by their places in this stack."""
        count = self.kernel.get_value().shape[0]
        first, total = jax.lax.axis_index(self.axis) * count, jax.lax.axis_size(self.axis) * count
        return LocalExperts.of(experts, first, count, total)

    def add_shares(self, terms: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The one term [1, ..., out] that is the sum of terms [splits, ..., out] of all devices.

        dtype: of activations.
        """
        return add_terms(terms, dtype, self.axis)
