"""The state of attention: keys and values of tokens, in pages."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.kernels import KVLayout, KVPages
from mpjax.kernels.kv_cache.cache import create_pages
from mpjax.kernels.kv_cache.reference import gather
from mpjax.models.config import DecoderConfig
from mpjax.models.state import Room


@dataclasses.dataclass(frozen=True)
class KVState:
    """The state of attention: keys and values in pages (`KVPages`).

    kv_heads, head_dim, dtype: as in KVLayout. window: as in StateSpec.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None
    is_paged: ClassVar[bool] = True
    keeps_sequences: ClassVar[bool] = False

    def create(self, room: Room, scales: jax.Array | None) -> KVPages:
        """Empty pages. scales: as `create_pages` takes them, of one layer; None for its default."""
        layout = KVLayout(
            *(self.kv_heads, self.head_dim, room.format, room.page_size), dtype=self.dtype
        )
        scales = None if scales is None else scales[None]
        sizes = {"pages": room.pages, "sequences": room.sequences}
        [pages] = create_pages(layout, layers=1, **sizes, scales=scales)
        return pages

    def largest(
        self, state: KVPages, table: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The largest magnitude of each channel in the cache, and whether all values are finite.

        table: int32 [1, pages], the block table of a sequence. count: its number of tokens.

        Returns float32 [2 (keys, values), KV heads, head dim] and a bool scalar.
        """
        sides = jnp.stack(gather(state, table))
        real = (jnp.arange(sides.shape[2]) < count)[None, None, :, None, None]
        sides = jnp.where(real, jnp.abs(sides), 0.0)
        # On a CPU, a maximum ignores NaN: only this check finds it.
        return sides.max((1, 2)), jnp.isfinite(sides).all()

    def copy(self, state: KVPages, source: jax.Array, target: jax.Array) -> KVPages:
        """The same state: a copied prefix ends at a whole block, so its residual is empty."""
        return state

    def forget(self, state: KVPages, before: KVPages) -> KVPages:
        """The state with the residual of `before`.

        Later tokens overwrite the other keys and values after a sequence's length.
        """
        return dataclasses.replace(state, residual=before.residual)

    def clear(self, state: KVPages, pages: jax.Array, slots: jax.Array) -> KVPages:
        """The state with zeros in these pages, and in the residuals of these slots."""

        def cleared(name: str, at: jax.Array, of: KVPages = state) -> jax.Array:
            array: jax.Array = getattr(of, name)
            return array.at[at].set(0, mode="drop")

        changed: dict[str, Any] = {}
        for name, codes in (("key", state.format.key_codes), ("value", state.format.value_codes)):
            changed[f"{name}s"] = cleared(f"{name}s", pages)
            if codes.keeps_scales:
                changed[f"{name}_parameters"] = cleared(f"{name}_parameters", pages)
        if (rest := state.residual) is not None:
            keys, values = (cleared(name, slots, rest) for name in ("keys", "values"))
            changed["residual"] = dataclasses.replace(rest, keys=keys, values=values)
        return dataclasses.replace(state, **changed)


def has_equal_heads(config: DecoderConfig) -> bool:
    """Whether all layers have keys and values with the same numbers of heads and channels."""
    usual = config.num_kv_heads, config.head_dim
    sizes = (getattr(layer.attention, "sizes", None) for layer in config.layers)
    alike = all(each(config)[1:] == usual for each in sizes if each is not None)
    return alike and not any(source is not None for source in config.sources)
