"""Precisions, written as the papers write them: `W4A16KV8`."""

from __future__ import annotations

import dataclasses
import re

from pallas_kernels import KVFormat, WeightFormat

DEFAULT_GROUP_SIZE = 128
EXPECTED = "expected W{16|8|4}[gSIZE][sym]A16KV{16|8|4}, for example W4A16KV8 or W8gKsymA16KV16"


@dataclasses.dataclass(frozen=True)
class Precision:
    """How many bits weights, activations and the KV cache have; hashable.

    weights: the format of the decoder layers' linear maps. A 16-bit format means the dtype that
        the model computes in; None means as they are in the checkpoint.
    activations: bits of the activations; 16 so far.
    kv: how keys and values are cached.

    `str` writes what `parse` reads. Raises ValueError for activations of other than 16 bits.
    """

    weights: WeightFormat | None = None
    activations: int = 16
    kv: KVFormat = KVFormat()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if self.activations != 16:
            raise ValueError(
                f"activations of {self.activations} bits (A{self.activations}) are not implemented "
                "yet: only A16 is"
            )

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Reads `W{16|8|4}[gSIZE][sym]A16KV{16|8|4}`.

        SIZE is the number of input channels that share a scale, 32, 64, 128 (the default) or K for
        all; `sym` fixes the zero point in the middle. Without the W part, as in `A16KV8`, weights
        stay as they are in the checkpoint. Raises ValueError that names what can't be read.
        """
        match = re.fullmatch(r"(?:W(\d+)(?:g(\d+|K))?(sym)?)?A(\d+)KV(\d+)", text)
        if match is None:
            raise ValueError(f"can't read the precision {text!r}: {EXPECTED}")
        bits, size, symmetric, activations, kv_bits = match.groups()
        try:
            kv = KVFormat(int(kv_bits))
            return cls(_parse_weights(bits, size, symmetric is not None), int(activations), kv)
        except ValueError as error:
            raise ValueError(f"precision {text!r}: {error}") from error

    def __str__(self) -> str:
        weights = "" if self.weights is None else describe_weights(self.weights)
        return f"{weights}A{self.activations}{self.kv}"


def describe_weights(format: WeightFormat) -> str:
    """The W part of a precision: `W4`, `W4g32`, `W8gKsym`, `W16`."""
    if not format.is_packed:
        return "W16"
    size = "K" if format.group_size is None else format.group_size
    group = "" if size == DEFAULT_GROUP_SIZE else f"g{size}"
    return f"W{format.bits}{group}" + ("sym" if format.symmetric else "")


def _parse_weights(bits: str | None, size: str | None, symmetric: bool) -> WeightFormat | None:
    if bits is None:
        return None
    if bits == "16":
        if size or symmetric:
            raise ValueError("16-bit weights take no group size and no sym")
        return WeightFormat("bfloat16")
    if bits not in ("4", "8"):
        raise ValueError(f"W{bits} is not implemented: weights can be W16, W8 or W4")
    group_size = None if size == "K" else int(size or DEFAULT_GROUP_SIZE)
    return WeightFormat(f"uint{bits}", group_size, symmetric)
