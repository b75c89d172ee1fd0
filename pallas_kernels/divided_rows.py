"""Rounding of activations whose rows are divided among devices, with scales of whole rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import require_type, shown
from mpjax.kernels.product_format import ActivationFormat


@dataclasses.dataclass(frozen=True)
class DividedRows:
    """How x [..., K] is rounded if each device of a mesh axis has some of the K channels.

    The scale of a row follows from its largest magnitude on all devices, so that codes and scales
    equal those of one device with the whole row. The devices exchange one float32 for each row.
    Only for use under `shard_map`; static and hashable.

    format: of the activations, with one scale for each row. axis: the name of the mesh axis.

    Raises ValueError for another format.
    """

    format: ActivationFormat
    axis: str

    def __post_init__(self) -> None:
        require_type("the format of divided rows", self.format, ActivationFormat)
        require_type("the axis of divided rows", self.axis, str)
        if not self.scales_rows:
            raise ValueError(
                f"the format of divided rows is {shown(str(self.format))}: expected one that has a "
                "scale for each row, int8 or float8"
            )

    @property
    def values(self) -> str | None:
        """`int8` or `float8`."""
        return self.format.values

    @property
    def scales_rows(self) -> bool:
        """Whether activations become codes with one scale per row of x: always true here."""
        return self.format.scales_rows

    def largest(self, peaks: jax.Array) -> jax.Array:
        """The largest of all devices' peaks, float32 ≥ 0 or NaN, which counts as the largest.

        Peaks are compared as integers, since collectives may ignore NaN.
        """
        order = jax.lax.bitcast_convert_type(peaks, jnp.int32) & jnp.int32(0x7FFFFFFF)
        return jax.lax.bitcast_convert_type(jax.lax.pmax(order, self.axis), jnp.float32)
