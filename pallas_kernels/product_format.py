"""What a product multiplies: a weight format, and what activations become."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax.numpy as jnp

from mpjax.kernels.checks import did_you_mean, nearest, require_type, shown
from mpjax.kernels.formats import FLOAT8_GROUP, WeightFormat

# The codes that activations can become, and the input channels that can share a scale of a row.
_GROUP_SIZES: dict[str | None, tuple[int | None, ...]] = {
    None: (None,),
    "int8": (None,),
    "float8": (None, FLOAT8_GROUP),
}
_SIXTEEN_BITS = "16-bit"
_NAMES = f"{_SIXTEEN_BITS}, int8, float8 or float8:g{FLOAT8_GROUP}"


@dataclasses.dataclass(frozen=True)
class ActivationFormat:
    """What the activations x [..., K] of a product become on the fly; static, hashable.

    Written as `16-bit`, `int8`, `float8` or `float8:g128`.
    values: `int8` or `float8` (e4m3) codes, or None for x as it is, in 16 bits.
    group_size: input channels of a row that share a scale, or None for all of them.
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
        """Reads what `str` writes; capitals and spaces around it don't matter."""
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
        """An activation format as it is; that of a product; or what meets a weight by default.

        A text is one that `parse` reads, such as `float8`, or a product's, such as `int8/int8`.
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
        """The dtype of the codes. Raises ValueError for 16 bits, which have none."""
        if self.values is None:
            raise ValueError("activations in 16 bits keep their dtype: there are no codes")
        return jnp.dtype(jnp.int8 if self.values == "int8" else jnp.float8_e4m3fn)

    @property
    def scales_rows(self) -> bool:
        """Whether activations become codes with one scale for each row."""
        return self.values is not None and self.group_size is None

    def groups(self, channels: int) -> int:
        """Scales of a row of so many channels."""
        return 1 if self.group_size is None else -(-channels // self.group_size)


@dataclasses.dataclass(frozen=True)
class ProductFormat:
    """The format of a product over a run of input channels: of its weight × of its activations.

    Written as the weight's, whose operand says what activations it meets: `uint4:g128`,
    `int8/int8`.

    Raises ValueError for activations that the weight's operand can't meet.
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
        """A product's format as it is, or that of a product with a weight of some format.

        activations: by default those of the operand that the weight's codes are decoded to; float8
            ones share scales as the codes do.
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
    return ActivationFormat(
        weight.operand, weight.group_size if weight.operand == "float8" else None
    )
