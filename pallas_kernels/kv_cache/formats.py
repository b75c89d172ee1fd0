"""KV formats: a kind of codes for keys, and one for values."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from mpjax.kernels.checks import require_type
from mpjax.kernels.kv_cache.codes import KEY_KINDS, VALUE_KINDS, KVCodes

KindName = str | int
EXPECTED = (
    "expected KV16, KV8, KV8s, KV4, KV4t, KV4c, KV2, KV2t or KVfp8, or one for each as in K8V4; "
    "behind KV4c and KV2, g64 or g32"
)
_NAME = r"\d+[cst]?(?:g\d+)?|fp8"


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """The storage formats of keys and of values, by the names of their kinds of codes.

    Keys are stored after the rotary embedding.

    16: unquantised, in the compute dtype.
    8, 4: TurboMind's asymmetric integers, x ≈ code · scale + zero, with scale =
        (max − min) / (2**bits − 1) and zero = min over a head of a token. Keys in 4 bits are stored
        after a Hadamard transform of each head, which leaves no channel much larger than the rest
        (QuaRot).
    "4t": 4 without the transform, like TurboMind's and QServe's keys.
    "8s": LiquidServe's symmetric integers, x ≈ code · scale, with codes from −127 to 127 and a
        static scale for each channel of a head, from a calibration. Tokens have no parameters.
    "fp8": x ≈ e4m3(code) · scale, with a static scale for each head (PagedKVCache.create).
    "4c", 2: BitDecoding's integers. Keys have a scale and a zero for each channel over a group of
        128 tokens, or of 64 or 32 ("4cg64", "2g32"), since a few channels are large in all tokens.
        Values have a scale and a zero for each token; values of "4c" have them for each channel,
        as in COMET's K4cV4c. The tokens of a block, 128 at four bits and 256 at two, are kept in
        the compute dtype, and encoded when the next block begins.
    "2t": 2 with a scale and a zero for each token's key.

    values: by default in as many bits as keys.

    Raises ValueError for names that are not formats, and for pairs that can't be combined.
    """

    keys: KindName = 16
    values: KindName | None = None

    def __post_init__(self) -> None:
        if self.values is None:
            require_type("KVFormat: keys", self.keys, str, int)
            object.__setattr__(self, "values", _values_beside(self.keys))
        for field in ("keys", "values"):  # the string "8" becomes the number 8
            require_type(f"KVFormat: {field}", getattr(self, field), str, int)
            object.__setattr__(self, field, _kind_name(str(getattr(self, field))))
        for name, kinds in ((self.keys, KEY_KINDS), (self.values, VALUE_KINDS)):
            if str(name) not in kinds:
                raise ValueError(f"KV{name} is not a KV format: {EXPECTED}")
        given = [codes for codes in (self.key_codes, self.value_codes) if codes.has_given_scales]
        if self.block is not None and given:
            raise ValueError(
                f"{self}: the tokens that wait in 16 bits have no place beside fp8 and 8s"
            )
        if len({codes.scaling for codes in given}) > 1:
            raise ValueError(f"{self}: scales are given for heads or for channels, not for both")
        if len({codes.group for codes in (self.key_codes, self.value_codes) if codes.group}) > 1:
            raise ValueError(f"{self}: channels of keys and values need groups of as many tokens")
        if self.block is not None and self.key_codes.hadamard:
            raise ValueError(
                f"{self}: keys of tokens that wait in 16 bits don't go through the Hadamard "
                f"transform; ask for K{self.keys}cV{self.values} or K{self.keys}tV{self.values}"
            )

    @classmethod
    def parse(cls, text: str) -> KVFormat:
        """Parses a name such as `KV8` or `KV4c`, or `K8V4` for different keys and values.

        Ignores case and surrounding spaces. Raises ValueError for a string that is not a format.
        """
        require_type("the KV format", text, str, hint=", such as 'KV8'")
        match = re.fullmatch(rf"k(?:({_NAME})v({_NAME})|v({_NAME}))", text.strip().lower())
        if match is None:
            raise ValueError(f"can't read the KV format {text!r}: {EXPECTED}")
        keys, values, both = (name and _kind_name(name) for name in match.groups())
        return cls(keys if both is None else both, values)

    @classmethod
    def of(cls, format: KVFormat | str) -> KVFormat:
        """The format itself, or the parsed string; for arguments that may be either."""
        return format if isinstance(format, KVFormat) else cls.parse(format)

    def __str__(self) -> str:
        is_usual = self.values == _values_beside(self.keys)
        return f"KV{self.keys}" if is_usual else f"K{self.keys}V{self.values}"

    @property
    def key_codes(self) -> KVCodes:
        """The kind of codes in which keys are stored."""
        return KEY_KINDS[str(self.keys)]

    @property
    def value_codes(self) -> KVCodes:
        """The kind of codes in which values are stored."""
        return VALUE_KINDS[str(self.values)]

    @property
    def scaling(self) -> Literal["head", "static"] | None:
        """The kind of a cache's static scales; None without static scales.

        "head" is one scale for each head, "static" one for each channel of a head.
        """
        given = {codes.scaling for codes in (self.key_codes, self.value_codes)}
        return "head" if "head" in given else "static" if "static" in given else None

    @property
    def keeps_scales(self) -> bool:
        """Whether pages keep 16-bit scales and zeros, of keys or of values."""
        return self.key_codes.keeps_scales or self.value_codes.keeps_scales

    @property
    def group(self) -> int | None:
        """The number of tokens that share a channel's scale; None if no channels have scales."""
        return self.key_codes.group or self.value_codes.group

    @property
    def block(self) -> int | None:
        """The number of tokens that are kept in the compute dtype until they are encoded together.

        None if each token is encoded immediately.
        """
        blocks = [codes.block for codes in (self.key_codes, self.value_codes) if codes.block]
        return max(blocks, default=None)


def _kind_name(text: str) -> KindName:
    return int(text) if text.isdecimal() else text


def _values_beside(keys: KindName) -> KindName:
    if keys in ("8s", "fp8"):
        return keys
    digits = re.match(r"\d+", str(keys))
    return int(digits[0]) if digits else keys
