"""The masks of attention, besides causality, and the scale of its scores."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import jax

from mpjax.kernels.checks import as_array, shown, static_number


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sinks"],
    meta_fields=["scale", "window", "softcap", "chunked"],
)
@dataclasses.dataclass(frozen=True)
class Masks:
    """The scale, the window, the softcap and the sinks of attention's scores.

    scale: the positive factor of scores; None for 1/√(head dim).
    window: the number of keys that a query attends to, its own included (sliding window); None for
        all.
    chunked: whether the window is instead the chunk of positions of which a query attends to its
        own (Llama 4): a query at position p to keys from window · ⌊p / window⌋ on.
    softcap: a scaled score s becomes softcap · tanh(s / softcap) (Gemma 2); None for no cap.
    sinks: [query heads], a learned score of each head that is added to its softmax without a value,
        neither scaled nor capped (gpt-oss); None for no sinks.

    Kernels are compiled for scale, window, chunked and softcap, which are static under `jit`.

    Raises ValueError unless scale, window and softcap are positive numbers, and the window a whole
    number; and for chunked without a window.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    chunked: bool = False

    def __post_init__(self) -> None:
        for name, read, expected in (
            ("scale", float, "a positive number"),
            ("window", operator.index, "a number of keys"),
            ("softcap", float, "a positive number"),
        ):
            number = static_number(f"Masks: {name}", getattr(self, name), read, expected)
            object.__setattr__(self, name, number)
        if not isinstance(self.chunked, bool) or (self.chunked and self.window is None):
            raise ValueError(
                f"Masks: chunked is {shown(self.chunked)} and window {self.window}: expected a "
                "bool, and a window for chunks"
            )

    def first_key(self, position: jax.Array) -> jax.Array:
        """The first key to which a query at a position attends, of a window; may be negative."""
        assert self.window is not None
        if self.chunked:
            return position // self.window * self.window
        return position - (self.window - 1)

    @property
    def is_causal(self) -> bool:
        """Whether causality is the only mask."""
        return self.window is None and self.softcap is None and self.sinks is None

    def scale_for(self, head_dim: int) -> float:
        """The scale of the scores of heads with `head_dim` channels."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def read(self, operation: str, heads: int) -> Masks:
        """The masks with their sinks converted to an array.

        operation: the function that takes the masks, for messages.

        Raises ValueError unless there is one sink for each of `heads` query heads.
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
