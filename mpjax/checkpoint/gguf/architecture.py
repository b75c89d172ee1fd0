"""The differences between GGUF's and Hugging Face's files of one architecture.

Source: llama.cpp, gguf-py/gguf/constants.py, and its conversion of Hugging Face's files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from mpjax.checkpoint.gguf import delta, hybrids
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.names import NAMES, TABLES

Change = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A value of `general.architecture`.

    hugging_face, model_type: `architectures` and `model_type` of config.json.
    names: names of a layer's modules. interleaved: whether the rows of query and key maps are
        ordered for interleaved RoPE.
    offset_norms: whether norm weights are larger by 1 than in Hugging Face's files.
    arrays: full names of a layer's tensors that have no `.weight` in GGUF or Hugging Face.
    tables: names of modules outside layers. layers: the prefix of layers in Hugging Face's names.
    is_mixed: whether layers may have no KV heads, or no MLP.
    is_uneven: whether layers may differ in KV heads and MLPs, whose sizes `more` reads.
    is_rotated: whether attention has RoPE; without it, rope.dimension_count isn't checked.
    is_latent: whether attention has latents (MLA), whose head sizes have keys of their own.
    epsilon: config.json's key of the norms' epsilon; all keys but `rms_norm_eps` are of LayerNorm.
    yarn_unit: what rope.scaling.yarn_log_multiplier is multiplied by to get YaRN's
        `mscale_all_dim`; None if the architecture doesn't have the key.
    grows: whether query scales grow with positions, as in Ministral 3.
    more: a function from metadata and tensors to further keys of config.json, which replace those
        of `read_config`.
    numbers: a function from metadata to arrays that Hugging Face's files have as tensors; or None.
    joins: whether gate and up projections are one map in Hugging Face's files.
    turns: whether Hugging Face's files have the transpose of experts' 16-bit weights. alternates:
        whether the outputs of gate and up alternate, if they are one map.
    delta: of linear layers, how files order value heads: `tiled`, or `joint` for Hugging Face's
        order with rates and decays in one map; None for architectures without such layers.
    """

    hugging_face: str
    model_type: str
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: NAMES)
    interleaved: bool = False
    offset_norms: bool = False
    arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, str] = dataclasses.field(default_factory=lambda: TABLES)
    layers: str = "model.layers"
    is_mixed: bool = False
    is_uneven: bool = False
    is_rotated: bool = True
    is_latent: bool = False
    epsilon: str = "rms_norm_eps"
    yarn_unit: float | None = None
    grows: bool = False
    more: Callable[[Metadata, Mapping[str, Tensor]], dict[str, Any]] = lambda metadata, tensors: {}
    numbers: Callable[[Metadata], Mapping[str, np.ndarray]] | None = None
    joins: bool = False
    turns: bool = False
    alternates: bool = False
    delta: Literal["tiled", "joint"] | None = None

    def translate(self, name: str) -> str:
        """Translates a GGUF module name to Hugging Face's. Unknown names are returned unchanged.

        name: an expert's module has its number at the end, such as `blk.3.ffn_up_exps.7`. Modules
            of multi-token prediction layers begin with `draft.`.
        """
        if name == "output":
            return "lm_head"
        if name in self.tables:
            return self.tables[name]
        if name.startswith("draft.0.nextn."):
            return delta.DRAFT_NAMES.get(name.removeprefix("draft.0."), name)
        match = re.fullmatch(r"(?:blk|draft)\.(\d+)\.([\w.]+?)(?:\.(\d+))?", name)
        own = None if match is None else self.names.get(match[2])
        if match is None or own is None or ("{expert}" in own) != (match[3] is not None):
            return name
        layers = "mtp.layers" if name.startswith("draft.") else self.layers
        return f"{layers}.{match[1]}.{own.format(expert=match[3])}"

    def array(self, name: str) -> str | None:
        """Hugging Face's name of a tensor in `arrays`; None for other tensors."""
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        own = None if match is None else self.arrays.get(match[2])
        return None if match is None or own is None else f"{self.layers}.{match[1]}.{own}"

    def change(self, name: str, config: Mapping[str, Any]) -> Change | None:
        """The conversion of a module's values to Hugging Face's; None if they are equal.

        name: GGUF's. The function takes and returns an array whose first axis is rows.
        """
        kind = name.split(".", 2)[-1]
        if kind == "ssm_a":
            order = delta.change(kind, config) if self.delta == "tiled" else None
            return lambda rates: hybrids.log_rates(rates if order is None else order(rates))
        if self.delta == "tiled" and (order := delta.change(kind, config)):
            return order
        if self.delta == "joint" and kind in ("ssm_beta", "ssm_alpha"):
            heads, number = delta.Heads.of(config), int(kind == "ssm_alpha")
            return lambda rows: heads.half(rows, number)
        if self.interleaved and kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            return lambda rows: _separate(rows, heads)
        if self.offset_norms and kind.endswith("norm") and kind != "ssm_norm":
            return lambda weight: weight - np.float32(1)
        return None


def _separate(rows: np.ndarray, heads: int) -> np.ndarray:
    """Moves the even rows of each head before the odd ones."""
    if rows.shape[0] % (2 * heads):  # an invalid shape, which `make_plan` refuses
        return rows
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(pairs, 1, 2)).reshape(rows.shape)
