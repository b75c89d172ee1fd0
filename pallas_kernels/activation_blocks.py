"""Mixed 4- and 8-bit activations: COMET's FMPQ, which chooses the width for blocks of channels."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import are_between, is_known, optional_array, shown
from mpjax.kernels.codes import int4
from mpjax.kernels.product_format import ActivationFormat

BLOCK = int4.GROUP  # channels of a token that share a scale
WIDTHS = (4, 8)  # the bits that a block can have
FORMAT = ActivationFormat("int8", BLOCK)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["bits", "permutation"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class ActivationBlocks:
    """How the activations x [..., K] of one weight are rounded in blocks of 128 channels.

    A block has a scale for each token, and codes of 4 bits (−7 … 7) or of 8 bits (−127 … 127), both
    stored as int8. Few channels of a language model have outliers, and they are the same for all
    tokens: a permutation gathers them in few blocks, and only these blocks need 8 bits (Liu et al.,
    "COMET", 2025, §3.2). Widths and permutation are arrays, so that layers that differ only in them
    share compiled programs.

    bits: uint8 [blocks], 4 or 8 for each block; the last block may have fewer channels. None for 8
        bits in all blocks.
    permutation: int32 [K]; channel i of the codes is channel permutation[i] of x. None keeps the
        order.
    """

    bits: jax.Array | None = None
    permutation: jax.Array | None = None

    @property
    def format(self) -> ActivationFormat:
        """The format of the codes and scales, `int8:g128`."""
        return FORMAT

    def checked(self, operation: str, channels: int) -> ActivationBlocks:
        """These blocks with lists converted to arrays.

        operation: the function that takes them, for messages. channels: K.

        Raises ValueError for arrays that aren't integers or don't fit K, and, if values are known,
        for widths other than 4 and 8 and for channels out of range.
        """
        found: dict[str, jax.Array | None] = {}
        for name, size in (("bits", FORMAT.groups(channels)), ("permutation", channels)):
            array = optional_array(f"{operation}: {name} of the blocks", getattr(self, name))
            if array is not None and (
                array.shape != (size,) or not jnp.issubdtype(array.dtype, jnp.integer)
            ):
                raise ValueError(
                    f"{operation}: the blocks have {name} {shown(array)}, and there are {channels} "
                    f"channels: expected integers of shape ({size},)"
                )
            found[name] = array
        bits, permutation = found["bits"], found["permutation"]
        if bits is not None:
            require_widths(f"{operation}: bits of the blocks", bits)
        if permutation is not None and not are_between(permutation, 0, channels - 1):
            raise ValueError(
                f"{operation}: permutation of the blocks must be from 0 to {channels - 1}"
            )
        return ActivationBlocks(bits, permutation)

    def largest_codes(self, channels: int) -> jax.Array:
        """The largest code of each block of x [..., channels], 7 or 127, float32 [blocks]."""
        if self.bits is None:
            return jnp.full(FORMAT.groups(channels), 127.0, jnp.float32)
        return jnp.where(self.bits == WIDTHS[0], jnp.float32(7), jnp.float32(127))


def require_widths(name: str, bits: jax.Array) -> None:
    """Raises ValueError for bits other than 4 and 8, if they are known."""
    if is_known(bits) and (wrong := np.setdiff1d(np.asarray(bits), WIDTHS)).size:
        raise ValueError(f"{name}: there is {wrong[0]}: expected 4 or 8 for each group")
