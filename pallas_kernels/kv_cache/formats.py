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
    """How keys and values are stored, by the names of their codes.

    16: as they are. 8, 4: TurboMind's integers, per token and head, asymmetric, x ≈ code · scale +
    zero with scale = (max − min) / (2**bits − 1) and zero = min. "fp8": e4m3 with a scale that each
    head is given (PagedKVCache.create), x ≈ e4m3(code) · scale. Keys are stored after the rotary
    embedding, and in 4 bits after a Hadamard transform of each head, which leaves no channel much
    larger than the rest (QuaRot); "4t": without it, as TurboMind's and QServe's are.

    "8s": LiquidServe's integers, symmetric, with a scale that each channel of a head is given (from
    a calibration), x ≈ code · scale with codes from −127 to 127, and nothing for a token.

    "4c", 2: BitDecoding's, whose keys have a scale and zero for each channel of 128 tokens, or of
    64 or 32 ("4cg64", "2g32"), since it is a few channels that are large, in all tokens. Values
    have them per token, unless they are "4c", too, as in COMET's K4cV4c; and so have the keys of
    "2t". The tokens of a block, 128 of them at four bits and 256 at two, wait in the compute dtype,
    and are encoded when the next one begins.

    Without `values`, they are stored in as many bits as keys are.
    """

    keys: KindName = 16
    values: KindName | None = None

    def __post_init__(self) -> None:
        if self.values is None:
            require_type("KVFormat: keys", self.keys, str, int)
            object.__setattr__(self, "values", _values_beside(self.keys))
        for field in ("keys", "values"):  # "8" is 8
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
        """Reads `KV16`, `KV8`, `KV8s`, `KV4`, `KV4t`, `KV4c`, `KV2`, `KV2t`, `KVfp8`; `K8V4`.

        Capitals and spaces around it don't matter. Raises ValueError for anything else.
        """
        require_type("the KV format", text, str, hint=", such as 'KV8'")
        match = re.fullmatch(rf"k(?:({_NAME})v({_NAME})|v({_NAME}))", text.strip().lower())
        if match is None:
            raise ValueError(f"can't read the KV format {text!r}: {EXPECTED}")
        keys, values, both = (name and _kind_name(name) for name in match.groups())
        return cls(keys if both is None else both, values)

    @classmethod
    def of(cls, format: KVFormat | str) -> KVFormat:
        """A format as it is, or as `parse` reads it: what functions that take one accept."""
        return format if isinstance(format, KVFormat) else cls.parse(format)

    def __str__(self) -> str:
        is_usual = self.values == _values_beside(self.keys)
        return f"KV{self.keys}" if is_usual else f"K{self.keys}V{self.values}"

    @property
    def key_codes(self) -> KVCodes:
        """What keys are stored as."""
        return KEY_KINDS[str(self.keys)]

    @property
    def value_codes(self) -> KVCodes:
        """What values are stored as."""
        return VALUE_KINDS[str(self.values)]

    @property
    def scaling(self) -> Literal["head", "static"] | None:
        """Whose scales a cache is given: of heads, of each of their channels, or none."""
        given = {codes.scaling for codes in (self.key_codes, self.value_codes)}
        return "head" if "head" in given else "static" if "static" in given else None

    @property
    def keeps_scales(self) -> bool:
        """Whether pages keep scales and zeros, in 16 bits, of keys or values."""
        return self.key_codes.keeps_scales or self.value_codes.keeps_scales

    @property
    def group(self) -> int | None:
        """Tokens that share a channel's scale, of keys or values; None if none do."""
        return self.key_codes.group or self.value_codes.group

    @property
    def block(self) -> int | None:
        """Tokens that wait in the compute dtype and are encoded together; None if none do."""
        blocks = [codes.block for codes in (self.key_codes, self.value_codes) if codes.block]
        return max(blocks, default=None)


def _kind_name(text: str) -> KindName:
    return int(text) if text.isdecimal() else text


def _values_beside(keys: KindName) -> KindName:
    if keys in ("8s", "fp8"):
        return keys
    digits = re.match(r"\d+", str(keys))
    return int(digits[0]) if digits else keys
