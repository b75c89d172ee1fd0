"""Named shapes of recurrent layers of published models, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class RecurrentShape:
    """The sizes of a recurrent layer, and of the model's attention layers.

    kind: `delta` for the gated delta rule, `scan` for Mamba2.
    groups: the number of groups of heads; a group shares a query and a key, or b and c.
    heads: the number of heads, each with a state [keys, values] (delta) or [values, keys] (scan).
    keys, values: the channels of a query, key, b or c, and of a value or x.
    attention: the numbers of query heads and KV heads, and of the channels of a head.
    by_channel: whether each key channel has a decay (Kimi Delta Attention).
    """

    name: str
    kind: str
    groups: int
    heads: int
    keys: int
    values: int
    attention: tuple[int, int, int]
    by_channel: bool = False

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a sequence's state."""
        last = (self.keys, self.values) if self.kind == "delta" else (self.values, self.keys)
        return self.heads, *last


PUBLISHED = (
    RecurrentShape("qwen3.6-27b", "delta", 16, 48, 128, 128, (24, 4, 256)),
    RecurrentShape("qwen3.6-35b-a3b", "delta", 16, 32, 128, 128, (16, 2, 256)),
    RecurrentShape("olmo-hybrid-7b", "delta", 30, 30, 96, 192, (30, 30, 128)),
    RecurrentShape("kimi-linear-48b-a3b", "delta", 32, 32, 128, 128, (32, 32, 128), True),
    RecurrentShape("granite-4.0-h-small", "scan", 1, 128, 128, 64, (32, 8, 128)),
    RecurrentShape("nemotron-h-8b", "scan", 8, 128, 128, 64, (32, 8, 128)),
)


def named(names: Iterable[str]) -> tuple[RecurrentShape, ...]:
    """The shapes of models, without repetition.

    Raises ValueError, which lists the known names, for an unknown name.
    """
    known = {shape.name: shape for shape in PUBLISHED}
    names = tuple(dict.fromkeys(names))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown shape {name!r}: expected one of {', '.join(known)}")
    return tuple(known[name] for name in names)
