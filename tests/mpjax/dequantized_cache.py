"""Attention of decoding, in numpy, to keys and values as a cache holds them at each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mpjax.kernels import KVFormat
from mpjax.models import Decoder
from tests.models.small import attend, forward
from tests.pallas_kernels.oracles import KVSide, kv_keys, kv_values, softmax_attention

BLOCKS = {"4c": 128, "2": 256, "2t": 256}  # tokens that wait for one another (BitDecoding)
WHOLE = 256  # what all blocks and groups divide


@dataclasses.dataclass(frozen=True)
class DequantizedCache:
    """Attention over rounded keys and values; `small.forward` takes it in the place of `attend`.

    Each token finds everything rounded, itself too; or, where tokens wait for a block to be full,
    all blocks but its own.

    scales: float32 [layers, 2, KV heads, 1 or head dim], keys first, where
    the format is given any.
    """

    format: KVFormat
    scales: np.ndarray | None = None

    def __call__(
        self, layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None
    ) -> np.ndarray:
        """Attends in a layer; arguments and result are [batch, tokens, heads, head dim]."""
        tokens, dim = query.shape[1], query.shape[-1]
        of_keys, of_values = (None, None) if self.scales is None else self.scales[layer][:, :, None]
        rounded_key = _decoded(kv_keys, key, self.format.keys, of_keys)
        rounded_value = _decoded(kv_values, value, self.format.values, of_values)
        out = np.zeros(query.shape)
        for row in range(len(query)):
            for first, last, waiting in self._views(tokens):
                is_rounded = (np.arange(tokens) < waiting)[:, None, None]
                out[row, first:last] = softmax_attention(
                    query[None, row, first:last],
                    np.where(is_rounded, rounded_key[row], key[row])[None],
                    np.where(is_rounded, rounded_value[row], value[row])[None],
                    np.arange(first, last)[None],
                    np.array([tokens]),
                    dim**-0.5,
                    window,
                )[0]
        return out

    def _views(self, tokens: int) -> list[tuple[int, int, int]]:
        """Queries from and to which see the same, and where that stops to be rounded."""
        block = block_of(self.format)
        if block is None:
            return [(0, tokens, tokens)]
        return [(at, min(at + block, tokens), at) for at in range(0, tokens, block)]


def block_of(format: KVFormat) -> int | None:
    """Tokens that are rounded together, the larger of keys' and values'; from their names alone."""
    names = (str(name).split("g")[0] for name in (format.keys, format.values))
    return max((BLOCKS[name] for name in names if name in BLOCKS), default=None)


def largest_as_scales(model: Decoder, tokens: np.ndarray, format: KVFormat) -> np.ndarray | None:
    """Scales for DequantizedCache that make the largest keys and values the largest codes."""
    if not {"fp8", "8s"} & {format.keys, format.values}:
        return None
    found = []

    def watch(layer: int, query: np.ndarray, *sides: np.ndarray, window: int | None) -> np.ndarray:
        found.append([np.abs(x).max((0, 1)) for x in sides])
        return attend(layer, query, *sides, window=window)

    forward(model, tokens, watch)
    largest = np.array(found)
    if "8s" in (format.keys, format.values):
        return (largest / 127).astype(np.float32)
    return (largest.max(-1, keepdims=True) / 448).astype(np.float32)


def _decoded(
    stored: Callable[..., KVSide], x: np.ndarray, kind: str | int, scale: np.ndarray | None
) -> np.ndarray:
    """The values of x [batch, tokens, heads, head dim] once stored; a last block was padded."""
    padding = (0, 0), (0, -x.shape[1] % WHOLE), (0, 0), (0, 0)
    # In float32, as the model computes it.
    heads = np.pad(x, padding).astype(np.float32).swapaxes(1, 2)
    return stored(heads, str(kind), scale).decoded.swapaxes(1, 2)[:, : x.shape[1]]
