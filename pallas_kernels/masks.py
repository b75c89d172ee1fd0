"""What attention does to its scores, besides causality."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import jax

from mpjax.kernels.checks import as_array, static_number


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sinks"],
    meta_fields=["scale", "window", "softcap"],
)
@dataclasses.dataclass(frozen=True)
class Masks:
    """How scores are scaled, hidden and capped; None is none of it.

    scale: of the scores, positive; 1/√(head dim) by default. It, window and softcap are numbers
        that kernels are compiled for, static under `jit`.
    window: how many keys a query sees, itself included (sliding window); None for all.
    softcap: a scaled score s becomes softcap · tanh(s / softcap) (Gemma 2).
    sinks: [query heads], a learned score of each head that joins its softmax without having a
        value, neither scaled nor capped (gpt-oss).

    Raises ValueError for numbers that make no sense.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None

    def __post_init__(self) -> None:
        for name, read, expected in (
            ("scale", float, "a positive number"),
            ("window", operator.index, "a number of keys"),
            ("softcap", float, "a positive number"),
        ):
            number = static_number(f"Masks: {name}", getattr(self, name), read, expected)
            object.__setattr__(self, name, number)

    @property
    def is_causal(self) -> bool:
        """Whether causality is the only mask."""
        return self.window is None and self.softcap is None and self.sinks is None

    def scale_for(self, head_dim: int) -> float:
        """The scale of scores of heads of so many channels."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def read(self, operation: str, heads: int) -> Masks:
        """The masks with sinks as an array.

        Raises ValueError, which names the operation, unless there is a sink for each of `heads`.
        """
        if self.sinks is None:
            return self
        sinks = as_array(f"{operation}: sinks", self.sinks)
        if sinks.shape != (heads,):
            raise ValueError(
                f"{operation}: sinks have shape {sinks.shape}: expected ({heads},), one for each "
                "query head"
            )
        return dataclasses.replace(self, sinks=sinks)


CAUSAL = Masks()
