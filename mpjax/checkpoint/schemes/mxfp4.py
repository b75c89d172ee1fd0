"""Reads and writes MXFP4: e2m1 codes with a power of two for every 32 input channels (gpt-oss).

With K input and N output channels, a module has `blocks` uint8 [N, K / 32, 16] and `scales` uint8
[N, K / 32]. The low four bits of a byte are the code of the even channel, and the weight is
e2m1(code) · 2**(scale − 127). Source: gpt_oss/torch/weights.py of OpenAI's gpt-oss, and OCP's
Microscaling Formats v1.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import checks, writing
from mpjax.checkpoint.schemes.base import Scheme, Specs
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.codes import float4

SOURCE = "quantization_config of an MXFP4 checkpoint"
FORMAT = WeightFormat("float4", 32)
GROUP, GROUP_BYTES = 32, 16


@dataclasses.dataclass(frozen=True)
class MXFP4Scheme(Scheme):
    """MXFP4 as gpt-oss is published in."""

    title: ClassVar[str] = "MXFP4"
    article: ClassVar[str] = "an"
    methods: ClassVar[tuple[str, ...]] = ("mxfp4",)
    suffixes: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    layouts: ClassVar[tuple[str, ...]] = ("mxfp4",)
    joins_experts: ClassVar[bool] = True
    default_for: ClassVar[tuple[str, ...]] = ("float4",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MXFP4Scheme:
        """Reads config.json's `quantization_config`, in which nothing depends on the file."""
        if (method := checks.method_of(config)) not in cls.methods:
            raise CheckpointError(f"{SOURCE}: quant_method is {method!r:.80}: expected 'mxfp4'")
        return cls()

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has blocks of bytes."""
        return "blocks" in specs and str(specs["blocks"].dtype) == "uint8"

    @property
    def weights(self) -> WeightFormat:
        """The weight format of all modules."""
        return FORMAT

    def format(self, name: str, channels: int) -> WeightFormat:
        """The weight format of a module."""
        return FORMAT

    def check(
        self, specs: Specs, name: str, shape: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Checks the shapes and dtypes of a module's tensors and returns the weight's (K, N)."""
        outputs, groups, *_ = (*specs["blocks"].shape, 0, 0)
        if shape is not None:
            groups, outputs = -(-shape[0] // GROUP), shape[1]
        checks.check_tensors(
            name,
            specs,
            {
                "blocks": ((outputs, groups, GROUP_BYTES), ("uint8",)),
                "scales": ((outputs, groups), ("uint8",)),
            },
        )
        found = groups * GROUP, outputs
        if shape is not None and found != shape:
            raise CheckpointError(
                f"{name} has {shape[0]} input channels by config.json, which groups of {GROUP} "
                "don't divide: the files and config.json are not of one checkpoint"
            )
        return found

    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """Decodes one module to plain codes."""
        channels, outputs = self.check(tensors, name, shape)
        codes, scales = _decode(jnp.asarray(tensors["blocks"]), jnp.asarray(tensors["scales"]))
        return PlainCodes(FORMAT, codes.reshape(outputs, channels).T, scales.T)

    @classmethod
    def of_layout(cls, layout: str, modules: writing.Modules) -> MXFP4Scheme:
        """The scheme, which depends on no module."""
        writing.require_codes(layout, modules, (FORMAT.codes,), permuted=writing.REMEDY)
        return cls()

    def quantization_config(self, plain: Sequence[str], cache: str | None = None) -> dict[str, Any]:
        """The `quantization_config` of an exported checkpoint; see Scheme."""
        return {"quant_method": self.quant_method, "modules_to_not_convert": list(plain)}

    def encode(self, plain: PlainCodes, name: str) -> dict[str, Any]:
        """The tensors of one module, bit for bit as they were read."""
        channels, outputs = plain.codes.shape
        blocks, scales = _encode(plain.codes.T, plain.scales.astype(jnp.bfloat16).T)
        return {
            "blocks": blocks.reshape(outputs, channels // GROUP, GROUP_BYTES),
            "scales": scales,
        }


@jax.jit
def _decode(blocks: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes uint8 [N, K / 32, 16, 2], and scales bfloat16 [N, K / 32]."""
    codes = jnp.stack([blocks & jnp.uint8(15), blocks >> jnp.uint8(4)], -1)
    return codes, float4.scales_of(scales)


@jax.jit
def _encode(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undoes `_decode`: bytes uint8 [N, K / 2] of codes [N, K], and exponents uint8 [N, K / 32]."""
    return codes[:, ::2] | codes[:, 1::2] << jnp.uint8(4), float4.exponents_of(scales)
