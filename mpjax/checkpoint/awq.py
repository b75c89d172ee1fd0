"""Decodes AWQ checkpoints in the `gemm` layout: 4 bits, packed along the output channels.

With K input and N output channels in G groups, a module has `qweight` int32 [K, N / 8], `qzeros`
int32 [G, N / 8] and `scales` [G, N]; the weight is (code − zero) · scale. Source: AutoAWQ,
awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.checkpoint import packed_module
from mpjax.checkpoint.packed_module import TensorSpec
from mpjax.errors import CheckpointError
from mpjax.checkpoint.linear import check_middle, uniform_format, unpack_words
from mpjax.checkpoint.packed_module import TensorSpec
from mpjax.kernels import PlainCodes

SUFFIXES = ("qweight", "qzeros", "scales")
SOURCE = "quantization_config of an AWQ checkpoint"
BITS = 4
CODES_PER_WORD = 8
# Column j of eight lies in field FIELD_OF_COLUMN[j] of its word, lowest bits first.
FIELD_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True)
class AWQConfig:
    """The part of an AWQ `quantization_config` that decoding depends on.

    group_size: input channels per group; None means one group of all.
    zero_point: whether zero points differ; else the layout stores 8 for all of them.

    `modules_to_not_convert` is not needed: the tensors of a module say whether it is packed.
    """

    group_size: int | None
    zero_point: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AWQConfig:
        """Reads config.json's `quantization_config`, in the spelling of AutoAWQ or GPTQModel.

        Raises CheckpointError when it isn't AWQ, isn't 4 bits, or isn't the `gemm` layout.
        """
        method = config.get("quant_method")
        if method != "awq":
            raise CheckpointError(f"{SOURCE}: quant_method is {method!r}: expected 'awq'")
        bits = packed_module.parse_integer(config, ("bits", "w_bit"), SOURCE)
        if bits != BITS:
            raise CheckpointError(f"{SOURCE}: bits is {bits}: only 4 bits are supported")
        layouts = [
            str(config[key]).lower()
            for key in ("version", "format", "checkpoint_format")
            if config.get(key) is not None
        ]
        if config.get("backend") == "llm-awq":
            layouts.append("llm-awq")
        for layout in layouts:
            if layout != "gemm":
                raise CheckpointError(
                    f"{SOURCE}: the layout {layout!r} (AWQ version) is not supported: "
                    "only 'gemm' is; look for a 'gemm' checkpoint of the model"
                )
        return cls(
            packed_module.parse_group_size(config, ("group_size", "q_group_size"), SOURCE),
            packed_module.parse_switch(config, "zero_point", SOURCE) is not False,
        )


def matches(specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a module's tensors, by suffix, are packed as AWQ packs them."""
    return packed_module.packing(specs) == "awq"


def check(
    specs: Mapping[str, TensorSpec],
    config: AWQConfig,
    name: str,
    shape: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Checks a module's tensors by shape and dtype and returns its (K, N).

    specs: the tensors or their descriptions, by suffix. name: the module, for messages.
    shape: the (K, N) that the model expects, if known. Raises CheckpointError.
    """
    packed_module.check_packing(name, specs, "awq")
    if "qzeros" not in specs and not config.zero_point:
        raise CheckpointError(
            f"{name} has no tensor qzeros and the config says zero_point: false: AWQ's gemm layout "
            "always stores zero points, and without them it isn't defined where zero lies"
        )
    rows, columns = specs["qweight"].shape[0], specs["scales"].shape[1]
    packed_module.check_weight_shape(name, (rows, columns), shape, config.group_size)
    groups = 1 if config.group_size is None else rows // config.group_size
    packed_module.check_tensors(
        name,
        specs,
        {
            "qweight": ((rows, columns // CODES_PER_WORD), ("int32",)),
            "qzeros": ((groups, columns // CODES_PER_WORD), ("int32",)),
            "scales": ((groups, columns), packed_module.SCALE_DTYPES),
        },
        f"group_size {config.group_size or -1}",
    )
    return rows, columns


def decode(
    tensors: Mapping[str, Any],
    config: AWQConfig,
    name: str,
    shape: tuple[int, int] | None = None,
) -> PlainCodes:
    """Unpacks one module on the arrays' device; may be called inside `jax.jit`.

    tensors: the arrays as in the file, by suffix. name: the module, for messages.
    shape: the (K, N) that the model expects, if known. Raises CheckpointError as `check` does, and
    for zero points that contradict the config.
    """
    check(tensors, config, name, shape)
    codes, zeros = _unpack(jnp.asarray(tensors["qweight"]), jnp.asarray(tensors["qzeros"]))
    if not config.zero_point:
        check_middle(name, zeros, BITS, "zero_point: false")
    scales = jnp.asarray(tensors["scales"])
    format = uniform_format(name, BITS, config.group_size, len(codes))
    return PlainCodes(format, codes, scales, zeros)


@jax.jit
def _unpack(qweight: jax.Array, qzeros: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpacks int32 [K, N / 8] and [G, N / 8] into codes uint8 [K, N] and zeros uint16 [G, N]."""
    codes = unpack_words(qweight, BITS, axis=1, order=FIELD_OF_COLUMN)
    zeros = unpack_words(qzeros, BITS, axis=1, order=FIELD_OF_COLUMN)
    return codes, zeros.astype(jnp.uint16)
