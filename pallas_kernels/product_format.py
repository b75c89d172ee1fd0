"""The format of a product: of its weight, and of its activations."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax.numpy as jnp

from mpjax.kernels.checks import did_you_mean, nearest, require_type, shown
from mpjax.kernels.codes import float8, int4
from mpjax.kernels.formats import WeightFormat

# Possible group sizes by kind of activations: the input channels of a row that share a scale.
_GROUP_SIZES: dict[str | None, tuple[int | None, ...]] = {
    None: (None,),
    "int8": (None, int4.GROUP),
    "float8": (None, float8.GROUP),
}
_SIXTEEN_BITS = "16-bit"
_NAMES = f"{_SIXTEEN_BITS}, int8, int8:g{int4.GROUP}, float8 or float8:g{float8.GROUP}"


@dataclasses.dataclass(frozen=True)
class ActivationFormat:
    """The format to which the activations x [..., K] of a product are quantised on the fly.

    Written as `16-bit`, `int8`, `int8:g128`, `float8` or `float8:g128`; static and hashable. With
    `int8:g128`, `ActivationBlocks` defines which blocks of channels have codes of 4 bits.

    values: `int8` or `float8` (e4m3) codes, or None for x unquantised, in 16 bits.
    group_size: the number of input channels of a row that share a scale, or None for all.

    Raises ValueError for fields that can't be combined.
    """

    values: str | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        known = self.values is None or isinstance(self.values, str)
        size_is_whole = self.group_size is None or type(self.group_size) is int
        sizes = _GROUP_SIZES.get(self.values, ()) if known and size_is_whole else ()
        if self.group_size not in sizes:
            raise ValueError(
                f"activations whose values are {shown(self.values)} and whose group_size is "
                f"{shown(self.group_size)}: expected those of {_NAMES}"
            )

    @classmethod
    def parse(cls, text: str) -> ActivationFormat:
        """Parses the string form (`str`); ignores case and surrounding spaces.

        Raises ValueError for any other string.
        """
        require_type("the format of activations", text, str, hint=", such as 'int8'")
        lower = text.strip().lower()
        match = re.fullmatch(r"(16-bit|int8|float8)(?::g(\d+|k))?", lower)
        if match is None:
            hint = did_you_mean(nearest(lower, (_SIXTEEN_BITS, "int8", "float8")))
            raise ValueError(
                f"can't read the format of activations {text!r}{hint}: expected {_NAMES}"
            )
        values, size = match.groups()
        return cls(
            None if values == _SIXTEEN_BITS else values, None if size in (None, "k") else int(size)
        )

    @classmethod
    def of(cls, format: ActivationFormat | ProductFormat | WeightFormat | str) -> ActivationFormat:
        """Converts any kind of format, or its string form, to an activation format.

        format: an activation format; a product format; a weight format, for the activations that
            multiply its operand; or the string form of one, such as `float8` or `int8/int8`.

        Raises ValueError for a string that names no format.
        """
        if isinstance(format, ActivationFormat):
            return format
        if isinstance(format, ProductFormat | WeightFormat):
            return ProductFormat.of(format).activations
        try:
            return cls.parse(format)
        except ValueError:
            with contextlib.suppress(ValueError):
                return ProductFormat.of(format).activations
            raise

    def __str__(self) -> str:
        group = "" if self.group_size is None else f":g{self.group_size}"
        return (self.values or _SIXTEEN_BITS) + group

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the codes. Raises ValueError for 16 bits, which have no codes."""
        if self.values is None:
            raise ValueError("activations in 16 bits keep their dtype: there are no codes")
        return jnp.dtype(jnp.int8 if self.values == "int8" else jnp.float8_e4m3fn)

    @property
    def scales_rows(self) -> bool:
        """Whether activations become codes with one scale for each row of x."""
        return self.values is not None and self.group_size is None

    def groups(self, input_channels: int) -> int:
        """The number of scales of a row of x, of `input_channels` channels."""
        return 1 if self.group_size is None else -(-input_channels // self.group_size)


@dataclasses.dataclass(frozen=True)
class ProductFormat:
    """The format of a product over a run of input channels: its weight's and its activations'.

    Written as only the weight's format, such as `uint4:g128` or `int8/int8`, since the weight's
    operand determines the activations that multiply it.

    Raises ValueError for activations that can't multiply the weight's operand.
    """

    weight: WeightFormat
    activations: ActivationFormat

    def __post_init__(self) -> None:
        require_type("the weight's format", self.weight, WeightFormat)
        require_type("the activations' format", self.activations, ActivationFormat)
        if self.activations != (expected := _default_activations(self.weight)):
            raise ValueError(
                f"{self.weight} multiplies activations in {expected}, not in {self.activations}: "
                "quantise the weight to a format of another operand, or leave the activations out"
            )

    @classmethod
    def of(
        cls,
        format: ProductFormat | WeightFormat | str,
        activations: ActivationFormat | str | None = None,
    ) -> ProductFormat:
        """The format of a product with a weight and activations.

        format: of the weight, or of a product with this weight.
        activations: their format; by default the one that fits the weight's operand. Activations of
            float8 operands, and of `int4` weights, have the weight's group size.

        Raises ValueError for a string that is not a format, and for activations that don't fit.
        """
        if isinstance(format, ProductFormat) and activations is None:
            return format
        weight = format.weight if isinstance(format, ProductFormat) else WeightFormat.of(format)
        if activations is None:
            return cls(weight, _default_activations(weight))
        return cls(weight, ActivationFormat.of(activations))

    def __str__(self) -> str:
        return str(self.weight)


def _default_activations(weight: WeightFormat) -> ActivationFormat:
    is_grouped = weight.operand == "float8" or weight.codes == "int4"
    return ActivationFormat(weight.operand, weight.group_size if is_grouped else None)
