"""A model with all that generating text takes."""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.checkpoint.layout import LinearPlace, array_places, linear_kernels, linear_places
from mpjax.kernels import KVFormat, QuantizedTensor
from mpjax.models import Decoder, DecoderConfig
from mpjax.precision import describe_weights
from mpjax.tokenizer import Tokenizer
from mpjax.tokenizer_files import explain_missing

MEGABYTE = 1e6


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder with its tokenizer and the format of its KV cache.

    tokenizer: None where the folder has no tokenizer.json. source: the folder it was loaded from.
    """

    model: Decoder
    tokenizer: Tokenizer | None
    kv_format: KVFormat
    source: Path

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        return self.model.config

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError, with what to do, where there is none."""
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
        """Numbers that the weights stand for, however they are stored."""
        total = sum(math.prod(place.shape) for place in array_places(self.config))
        for place in linear_places(self.config):
            total += sum(math.prod(kernel.shape) for kernel in linear_kernels(self.model, place))
            total += sum(shape[1] for shape in place.shapes if place.bias)
        return total

    @property
    def precision(self) -> str:
        """What is really there, such as `W4A16KV8`; `W4+W16A16KV8` where linear maps differ."""
        names = weight_precisions(self.model)
        activations = f"A{jnp.dtype(self.config.dtype).itemsize * 8}"
        if not any("A" in name for name in names):
            return f"{'+'.join(names)}{activations}{self.kv_format}"
        each = [name if "A" in name else name + activations for name in names]
        return f"{'+'.join(each)}{self.kv_format}"

    def describe(self) -> list[tuple[str, str]]:
        """What `mpjax info` prints: labels and texts, in order."""
        config, places = self.config, linear_places(self.config)
        counts: dict[str, collections.Counter[str]] = {}
        for place in places:
            kind = place.path.split(".", 2)[2]
            formats = " | ".join(_formats(self.model, place))
            counts.setdefault(kind, collections.Counter())[formats] += 1
        kernels = [kernel for place in places for kernel in linear_kernels(self.model, place)]
        packed = sum(kernel.nbytes for kernel in kernels if isinstance(kernel, QuantizedTensor))
        rows = [
            ("model", f"{type(self.model).__name__} from {self.source}"),
            ("precision", self.precision),
            ("layers", str(config.num_layers)),
            ("hidden size", str(config.hidden_size)),
            ("heads", f"{config.num_heads}, {config.num_kv_heads} for keys and values"),
            ("longest context", str(config.max_position_embeddings)),
            ("parameters", f"{self.num_parameters / 1e6:,.1f} million"),
            ("packed weights", f"{packed / MEGABYTE:,.1f} MB"),
            ("other weights", f"{(self.nbytes - packed) / MEGABYTE:,.1f} MB in {config.dtype}"),
            ("cache scales", self._describe_cache_scales()),
        ]
        for kind, count in counts.items():
            text = ", ".join(
                f"{name} in {layers} layer{'s' if layers > 1 else ''}"
                for name, layers in count.items()
            )
            rows.append((kind, text))
        return rows

    def _describe_cache_scales(self) -> str:
        if self.model.cache_scales is None:
            return "none"
        of_heads = self.model.cache_scales.get_value().ndim == 3
        return "of heads, for KVfp8" if of_heads else "of channels, for KV8s"


def weight_precisions(model: Decoder) -> list[str]:
    """The W parts of the precisions that occur among a model's linear maps, in text order."""
    places = linear_places(model.config)
    return sorted({name for place in places for name in _formats(model, place)})


def _formats(model: Decoder, place: LinearPlace) -> list[str]:
    """The W part of the precision of each part of a linear map."""
    return [
        describe_weights(kernel.format)
        if isinstance(kernel, QuantizedTensor)
        else f"W{kernel.dtype.itemsize * 8}"
        for kernel in linear_kernels(model, place)
    ]
