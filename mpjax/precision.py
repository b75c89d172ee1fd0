"""Precisions, written as the papers write them: `W4A16KV8`."""

from __future__ import annotations

import dataclasses
import re

from mpjax.kernels import KVFormat, WeightFormat

EXPECTED = (
    "expected W{16|8|4|FP8|NF4|NF3|NF2}[gSIZE][sym]A{16|8|FP8}KV{16|8|8s|4|4t|4c|2|2t|fp8}, or "
    "K…V… in place of KV…, for example W4A16KV8, WNF3g128A16KV4c, W4A8K8V4 or W8gKsymA16KVfp8"
)
DEFAULT_GROUP_SIZE = 128  # of integers beside 16-bit activations
# The weight format and its usual group size, by the W and the A part.
_FORMATS: dict[tuple[str, str], tuple[str, int | None]] = {
    ("16", "16"): ("bfloat16", None),
    ("8", "16"): ("uint8", DEFAULT_GROUP_SIZE),
    ("4", "16"): ("uint4", DEFAULT_GROUP_SIZE),
    ("NF4", "16"): ("table4", 64),
    ("NF3", "16"): ("table3", 64),
    ("NF2", "16"): ("table2", 64),
    ("FP8", "16"): ("float8", 128),
    ("FP8", "FP8"): ("float8", None),
    ("8", "8"): ("int8", None),
    ("4", "8"): ("liquid4", 64),
}
_ACTIVATIONS = {"16": None, "8": "int8", "FP8": "float8"}


@dataclasses.dataclass(frozen=True)
class Precision:
    """How weights, activations and the KV cache are held; hashable.

    weights: the format of the decoder layers' linear maps, which says how activations meet them. A
        16-bit format means the dtype that the model computes in; None means as they are in the
        checkpoint.
    kv: how keys and values are cached.

    `str` writes what `parse` reads.
    """

    weights: WeightFormat | None = None
    kv: KVFormat = KVFormat()  # noqa: RUF009 (frozen)

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Reads `W…A…KV…` and `W…A…K…V…`.

        W is 16; 8 or 4 (integers); FP8 (e4m3); NF4, NF3 or NF2 (normal float). A is 16, or what
        activations are rounded to on the fly: 8 beside W8 (W8A8) and W4 (LiquidQuant), FP8 beside
        WFP8. KV, or K and V apart as in K8V4, is 16, 8 or 4 (integers), fp8 (e4m3), 4c or 2
        (integers whose keys have scales of channels, and in K4cV4c values, too), 2t (of tokens), 4t
        (4 without a Hadamard transform of the keys) or 8s (static scales of channels, from a
        calibration): see KVFormat. `gSIZE` is the number of input channels that share a scale, or K
        for all; `sym` fixes an integer zero point in the middle. Without the W part, as in
        `A16KV8`, linear maps stay as they are in the checkpoint, with the activations that it says
        if it is FP8. Raises ValueError that names what can't be read.
        """
        match = re.fullmatch(r"(?:W([A-Z]*\d+)(?:g(\d+|K))?(sym)?)?A([A-Z]*\d+)(K\w*V\w+)", text)
        if match is None:
            raise ValueError(f"can't read the precision {text!r}: {EXPECTED}")
        weights, size, symmetric, activations, kv = match.groups()
        try:
            format = _parse_weights(weights, size, symmetric is not None, activations)
            return cls(format, KVFormat.parse(kv))
        except ValueError as error:
            raise ValueError(f"precision {text!r}: {error}") from error

    @property
    def activations(self) -> str:
        """The A part: `16`, `8` or `FP8`."""
        quantized = None if self.weights is None else self.weights.activations
        return next(name for name, value in _ACTIVATIONS.items() if value == quantized)

    def __str__(self) -> str:
        weights = "" if self.weights is None else describe_weights(self.weights)
        return weights + ("A16" if self.activations == "16" else "") + str(self.kv)


def describe_weights(format: WeightFormat) -> str:
    """The W part of a precision, `W4`, `W4g32`, `WNF3`, `W16`; with an A part unless it is A16."""
    if not format.is_packed:
        return "W16"
    for (weights, activations), (codes, usual) in _FORMATS.items():
        if (codes, _ACTIVATIONS[activations]) == (format.codes, format.activations):
            size = "K" if format.group_size is None else format.group_size
            group = "" if format.group_size == usual else f"g{size}"
            suffix = "" if activations == "16" else f"A{activations}"
            return f"W{weights}{group}" + ("sym" if format.symmetric else "") + suffix
    raise AssertionError(f"unreachable: every format has a name, {format} too")


def _parse_weights(
    weights: str | None, size: str | None, symmetric: bool, activations: str
) -> WeightFormat | None:
    if activations not in _ACTIVATIONS:
        raise ValueError(f"A{activations} is not implemented: activations can be A16, A8 or AFP8")
    if weights is None:
        if activations != "16":
            raise ValueError(f"A{activations} needs a W part: it says what activations meet")
        return None
    if (weights, activations) not in _FORMATS:
        possible = ", ".join(f"W{w}A{a}" for w, a in _FORMATS)
        raise ValueError(f"W{weights}A{activations} is not implemented: there are {possible}")
    codes, usual = _FORMATS[weights, activations]
    if codes == "bfloat16":
        if size or symmetric:
            raise ValueError("16-bit weights take no group size and no sym")
        return WeightFormat(codes)
    group_size = usual if size is None else None if size == "K" else int(size)
    return WeightFormat(codes, group_size, symmetric, _ACTIVATIONS[activations])
