"""LanguageModel: a decoder with its tokenizer and the format of its KV cache."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.activation_widths import count_blocks
from mpjax.kernels import KVFormat, QuantizedTensor, WeightFormat
from mpjax.kernels.kv_cache.layout import read_page_size
from mpjax.models import Decoder, DecoderConfig, LinearPlace
from mpjax.precision import Precision, describe_weights
from mpjax.tokenizer import Tokenizer
from mpjax.tokenizer_files import explain_missing

MEGABYTE = 1e6


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder with its tokenizer, and the format and page size of its KV cache.

    tokenizer: None for a checkpoint without tokenizer.json. source: the folder of the checkpoint.
    page_size: tokens in a page of the cache: 16, 32, 64, 128 or 256.

    Raises ValueError for another page size, and for one that the KV format can't have.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    kv_format: KVFormat
    source: Path
    page_size: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size", read_page_size(self.page_size, self.kv_format))

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        return self.model.config

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError, which says what to do, for a model without one."""
        if self.tokenizer is None:
            raise ValueError(
                f"{explain_missing(self.source)} Without it there is no text: generate_tokens "
                "takes token ids."
            )
        return self.tokenizer

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in device memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.model)))

    @property
    def num_parameters(self) -> int:
        """Number of the model's weights; a packed weight counts as one, whatever its bits."""
        total = sum(math.prod(place.shape) for place in self.model.array_places(self.config))
        for place in self.model.linear_places(self.config):
            total += sum(math.prod(kernel.shape) for kernel in place.kernels(self.model))
            total += sum(shape[1] for shape in place.shapes if place.bias)
        return total

    @property
    def precision(self) -> str:
        """The model's precision, such as `W4A16KV8`, or `W16+W4A16KV8` where linear maps differ.

        It comes from the weights themselves. `load(path, precision=...)` accepts it for the
        checkpoint that the model came from.
        """
        bits = jnp.dtype(self.config.dtype).itemsize * 8
        return str(Precision.mixed(weight_formats(self.model), self.kv_format, bits))

    def summary(self) -> dict[str, Any]:
        """Facts about the model in JSON's types, as `mpjax info --json` prints them.

        `linear_maps` has, for each path in a layer (such as `mlp.down`), the number of layers with
        each weight format. `eight_bit_blocks` is the number of blocks of activations in 8 bits, and
        of all, in W4Ax, and otherwise None.
        """
        config, places = self.config, self.model.linear_places(self.config)
        counts: dict[str, dict[str, int]] = {}
        for place in places:
            count = counts.setdefault(place.path.split(".", 2)[2], {})
            formats = " | ".join(_formats(self.model, place))
            count[formats] = count.get(formats, 0) + 1
        kernels = [kernel for place in places for kernel in place.kernels(self.model)]
        packed = sum(kernel.nbytes for kernel in kernels if isinstance(kernel, QuantizedTensor))
        return {
            "model": type(self.model).__name__,
            "source": str(self.source),
            "precision": self.precision,
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "max_position_embeddings": config.max_position_embeddings,
            "parameters": self.num_parameters,
            "packed_bytes": packed,
            "other_bytes": self.nbytes - packed,
            "dtype": config.dtype,
            "cache_scales": self._cache_scales(),
            "linear_maps": counts,
            "eight_bit_blocks": count_blocks(self.model),
        }

    def describe(self) -> list[tuple[str, str]]:
        """The summary as labels and texts, in the order in which `mpjax info` prints them."""
        found = self.summary()
        scales = {
            None: "none",
            "heads": "for each head, for KVfp8",
            "channels": "for each channel, for KV8s",
        }
        rows = [
            ("model", f"{found['model']} from {found['source']}"),
            ("precision", found["precision"]),
            ("layers", str(found["num_layers"])),
            ("hidden size", str(found["hidden_size"])),
            ("heads", f"{found['num_heads']}, {found['num_kv_heads']} for keys and values"),
            ("longest context", str(found["max_position_embeddings"])),
            ("parameters", f"{found['parameters'] / 1e6:,.1f} million"),
            ("packed weights", f"{found['packed_bytes'] / MEGABYTE:,.1f} MB"),
            ("other weights", f"{found['other_bytes'] / MEGABYTE:,.1f} MB in {found['dtype']}"),
            ("cache scales", scales[found["cache_scales"]]),
        ]
        if (blocks := found["eight_bit_blocks"]) is not None:
            share = f"{blocks.wide} of {blocks.total} blocks, {blocks.wide / blocks.total:.1%}"
            rows.append(("activations in 8 bits", f"{share}; the others in 4"))
        for kind, count in found["linear_maps"].items():
            text = ", ".join(
                f"{name} in {layers} layer{'s' if layers > 1 else ''}"
                for name, layers in count.items()
            )
            rows.append((kind, text))
        return rows

    def _cache_scales(self) -> str | None:
        if self.model.cache_scales is None:
            return None
        return "heads" if self.model.cache_scales.get_value().ndim == 3 else "channels"


def weight_formats(model: Decoder) -> set[WeightFormat]:
    """Weight formats of a model's linear maps; a plain kernel of any dtype counts as bfloat16."""
    return {
        kernel.format if isinstance(kernel, QuantizedTensor) else WeightFormat("bfloat16")
        for place in model.linear_places(model.config)
        for kernel in place.kernels(model)
    }


def _formats(model: Decoder, place: LinearPlace) -> list[str]:
    """The W part of the precision, such as `W4`, of each part of a linear map."""
    return [
        describe_weights(kernel.format)
        if isinstance(kernel, QuantizedTensor)
        else f"W{kernel.dtype.itemsize * 8}"
        for kernel in place.kernels(model)
    ]
