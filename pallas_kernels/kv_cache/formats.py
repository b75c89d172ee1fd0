"""KV formats: a kind of codes for keys, and one for values."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from pallas_kernels.kv_cache.codes import KINDS, KVCodes

KindName = Literal["fp8"] | int
EXPECTED = "expected KV16, KV8, KV4 or KVfp8, or one for each as in K8V4"


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored, by the names of their codes.

    16: as they are. 8, 4: TurboMind's integers, per token and head, asymmetric, x ≈ code · scale +
    zero with scale = (max − min) / (2**bits − 1) and zero = min. "fp8": e4m3 with a scale that each
    head is given (PagedKVCache.create), x ≈ e4m3(code) · scale. Keys are stored after the rotary
    embedding. Without `values`, they are stored as keys are.
    """

    keys: KindName = 16
    values: KindName | None = None

    def __post_init__(self) -> None:
        if self.values is None:
            object.__setattr__(self, "values", self.keys)
        if unknown := {str(self.keys), str(self.values)} - set(KINDS):
            raise ValueError(f"KV{min(unknown)} is not a KV format: {EXPECTED}")

    @classmethod
    def parse(cls, text: str) -> KVFormat:
        """Reads `KV16`, `KV8`, `KV4`, `KVfp8`, or one for each: `K16V8`, `K8V4`."""
        match = re.fullmatch(r"K(\d+|fp8)?V(\d+|fp8)", text)
        if match is None:
            raise ValueError(f"can't read the KV format {text!r}: {EXPECTED}")
        keys, values = (_kind_name(name) for name in (match[1] or match[2], match[2]))
        return cls(keys, values)

    def __str__(self) -> str:
        return f"KV{self.keys}" if self.keys == self.values else f"K{self.keys}V{self.values}"

    @property
    def key_codes(self) -> KVCodes:
        """What keys are stored as."""
        return KINDS[str(self.keys)]

    @property
    def value_codes(self) -> KVCodes:
        """What values are stored as."""
        return KINDS[str(self.values)]


def _kind_name(text: str) -> KindName:
    return "fp8" if text == "fp8" else int(text)
