"""Static quantisation: activations that are rounded with a scale from a calibration."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import as_array, is_known, require_type, shown
from mpjax.kernels.product_format import ActivationFormat


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale"], meta_fields=["format"])
@dataclasses.dataclass(frozen=True)
class StaticRows:
    """How the activations x [..., K] of one weight are rounded with one scale for all tokens.

    Values out of range are clamped. The scale is an array, so that layers that differ only in it
    share compiled programs.

    format: of the activations, which would otherwise have a scale for each row. scale: float32 [1].

    Raises ValueError for another format.
    """

    format: ActivationFormat
    scale: jax.Array

    def __post_init__(self) -> None:
        require_type("the format of static rows", self.format, ActivationFormat)
        if not self.scales_rows:
            raise ValueError(
                f"the format of static rows is {shown(str(self.format))}: expected int8 or float8"
            )

    @property
    def values(self) -> str | None:
        """`int8` or `float8`."""
        return self.format.values

    @property
    def scales_rows(self) -> bool:
        """Whether activations become codes with one scale per row of x: always true here."""
        return self.format.scales_rows

    def checked(self, operation: str) -> StaticRows:
        """The same with an array instead of a number.

        operation: the function that takes it, for messages. Raises ValueError unless the scale is a
        single number, and if it is known, positive and finite.
        """
        scale = as_array(f"{operation}: scale of static rows", self.scale)
        if scale.size != 1:
            raise ValueError(
                f"{operation}: the scale of static rows has shape {scale.shape}: expected one "
                "number"
            )
        scale = scale.reshape(1).astype(jnp.float32)
        require_positive(f"{operation}: the scale of static rows", scale)
        return StaticRows(self.format, scale)


def require_positive(name: str, scale: Any) -> None:
    """Raises ValueError unless all elements, if they are known, are positive and finite."""
    if not is_known(scale):
        return
    numbers = np.asarray(scale).reshape(-1)
    if (wrong := numbers[~((numbers > 0) & (numbers < np.inf))]).size:
        raise ValueError(f"{name} is {wrong[0]}: expected positive and finite")
