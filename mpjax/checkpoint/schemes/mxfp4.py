"""Reads and writes MXFP4 (gpt-oss): e2m1 codes with a power-of-two scale per 32 input channels.

With K input and N output channels, a module has `blocks` uint8 [N, K / 32, 16] and `scales` uint8
[N, K / 32]. The low four bits of a byte are the code of the even channel, and the weight is
e2m1(code) · 2**(scale − 127). Source: gpt_oss/torch/weights.py of OpenAI's gpt-oss, and OCP's
Microscaling Formats v1.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import checks, writing
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.codes import float4

METHOD = "mxfp4"  # also the name of the export layout
FORMAT = WeightFormat("float4", 32)
GROUP, GROUP_BYTES = 32, 16


@dataclasses.dataclass(frozen=True)
class MXFP4Reader(Reader):
    """MXFP4 in gpt-oss's published layout."""

    suffixes: ClassVar[tuple[str, ...]] = ("blocks", "scales")

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has uint8 `blocks`."""
        return "blocks" in specs and str(specs["blocks"].dtype) == "uint8"

    @property
    def weights(self) -> WeightFormat:
        """The weight format of all modules."""
        return FORMAT

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks the shapes and dtypes of a module's tensors and returns the weight's (K, N)."""
        outputs, groups = (*getattr(specs.get("blocks"), "shape", ()), 0, 0)[:2]
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

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Decodes one module to plain codes."""
        channels, outputs = self.check(tensors, name, shape)
        codes, scales = _decode(jnp.asarray(tensors["blocks"]), jnp.asarray(tensors["scales"]))
        return PlainCodes(FORMAT, codes.reshape(outputs, channels).T, scales.T)


def write(layout: str, modules: writing.Modules) -> writing.Writer:
    """The writer of MXFP4, lossless."""
    writing.require_codes(layout, modules, (FORMAT.codes,), permuted=writing.REMEDY)

    def config(plain: Sequence[str], cache: str | None) -> dict[str, Any]:
        return {"quant_method": METHOD, "modules_to_not_convert": list(plain)}

    return writing.Writer(config, _encode)


SCHEME = Scheme(
    title="MXFP4",
    article="an",
    methods=(METHOD,),
    reader=MXFP4Reader,
    read=lambda config: MXFP4Reader(),  # the config has no settings
    writing=writing.Writing((METHOD,), write, default_for=(FORMAT.codes,), joins_experts=True),
)


def _encode(plain: PlainCodes, name: str) -> dict[str, Any]:
    """The tensors of one module."""
    channels, outputs = plain.codes.shape
    blocks, scales = _pack(plain.codes.T, plain.scales.astype(jnp.bfloat16).T)
    blocks = blocks.reshape(outputs, channels // GROUP, GROUP_BYTES)
    return {"blocks": blocks, "scales": scales}


@jax.jit
def _decode(blocks: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes uint8 [N, K / 32, 16, 2], and scales bfloat16 [N, K / 32]."""
    codes = jnp.stack([blocks & jnp.uint8(15), blocks >> jnp.uint8(4)], -1)
    return codes, float4.scales_of(scales)


@jax.jit
def _pack(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `_decode`: bytes uint8 [N, K / 2], and exponents uint8 [N, K / 32]."""
    return codes[:, ::2] | codes[:, 1::2] << jnp.uint8(4), float4.exponents_of(scales)
