"""The new tokens of a ragged batch, and their positions in the cache."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.checks import are_between, as_arrays, is_known, require_type, static_number


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["block_tables", "starts", "counts", "residual_pages", "encoded"],
    meta_fields=["fresh", "longest"],
)
@dataclasses.dataclass(frozen=True)
class Span:
    """The new tokens of a batch in a paged cache; the same for all layers.

    The new tokens are an array [batch, tokens, ...], in which the first counts[b] tokens of row b
    are real and the others padding. Or they are varlen, [tokens, ...]: the tokens of all sequences,
    one sequence after another, without padding between sequences.

    block_tables: int32 [batch, pages per sequence]; entry p of a sequence is the page of its tokens
        from position p · page size on.
    starts: int32 [batch], the position of each sequence's first new token.
    counts: int32 [batch], the number of each sequence's new tokens.
    fresh: whether all starts are known to be 0 (static).
    longest: an upper bound of the counts (static), so that no more programs than needed are
        launched for varlen tokens. By default one sequence may have all varlen tokens.
    residual_pages: int32 [batch, 1], for formats with blocks: the page of each sequence's residual.
        By default the residual has a page for each sequence, in their order.
    encoded: int32 [batch], for formats with blocks: the number of tokens, in whole blocks, that are
        already in encoded pages although they end at the start, such as a shared prefix. By default
        a block is encoded when the first token after it is appended.

    Arrays may also be lists or NumPy arrays. Under `jit` a span can be an argument, as a pytree.

    Raises ValueError for a `longest` below 1. Arrays are checked by the operation that takes the
    span (`read`).
    """

    block_tables: jax.Array
    starts: jax.Array
    counts: jax.Array
    fresh: bool = False
    longest: int | None = None
    residual_pages: jax.Array | None = None
    encoded: jax.Array | None = None

    def __post_init__(self) -> None:
        # Arrays are not checked here: the leaves of a pytree may be any object.
        require_type("Span: fresh", self.fresh, bool, np.bool)
        longest = static_number("Span: longest", self.longest, operator.index, "a number of tokens")
        object.__setattr__(self, "fresh", bool(self.fresh))
        object.__setattr__(self, "longest", longest)

    @property
    def ends(self) -> jax.Array:
        """The position after each sequence's last new token, int32 [batch]."""
        return self.starts + self.counts

    @property
    def offsets(self) -> jax.Array:
        """The index of each sequence's first token among varlen tokens, int32 [batch]."""
        return jnp.cumsum(self.counts) - self.counts

    @property
    def most_tokens(self) -> int:
        """The `longest` of a span, which is never None in a result of `read`."""
        assert self.longest is not None, "Span.read was not called"
        return self.longest

    def read(self, operation: str, new: tuple[int, ...]) -> Span:
        """The span with int32 arrays, so that positions are int32, and with a `longest`.

        operation: the function that takes the span, for messages.
        new: the shape [batch, tokens] of the new tokens, or [tokens] if varlen.

        Raises ValueError for arrays that are not integers or don't fit the tokens, and, if their
        values are known, for values out of range.
        """
        block_tables, starts, counts = as_arrays(
            operation, block_tables=self.block_tables, starts=self.starts, counts=self.counts
        )
        sequences, *_ = (*block_tables.shape, 0)
        for name, array, shape in (
            ("block_tables", block_tables, "[batch, pages per sequence]"),
            ("starts", starts, "[batch]"),
            ("counts", counts, "[batch]"),
        ):
            is_fitting = array.ndim == len(shape.split(",")) and array.shape[0] == sequences
            if not (is_fitting and jnp.issubdtype(array.dtype, jnp.integer)):
                raise ValueError(
                    f"{operation}: {name} is {array.dtype} of shape {array.shape}: expected int32 "
                    f"{shape}, and the batch of block_tables is {sequences}"
                )
        if len(new) == 2 and new[0] != sequences:
            raise ValueError(
                f"{operation}: tokens are of a batch of {new[0]}: expected {sequences}, that of "
                "block_tables, starts and counts"
            )
        self._require_limits(operation, starts, counts, new)
        block_tables, starts, counts = (
            jnp.asarray(array, jnp.int32) for array in (block_tables, starts, counts)
        )
        longest = new[-1]
        if len(new) == 1 and self.longest is not None:
            longest = min(self.longest, longest)
        others = (
            self._read_optional(operation, name, value, shape)
            for name, value, shape in (
                ("residual_pages", self.residual_pages, (sequences, 1)),
                ("encoded", self.encoded, (sequences,)),
            )
        )
        return Span(block_tables, starts, counts, self.fresh, max(1, longest), *others)

    @staticmethod
    def _read_optional(
        operation: str, name: str, value: Any, shape: tuple[int, ...]
    ) -> jax.Array | None:
        """A field that may be None, as int32. Raises ValueError for another shape or dtype."""
        if value is None:
            return None
        (array,) = as_arrays(operation, **{name: value})
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{operation}: {name} is {array.dtype} of shape {array.shape}: expected int32 of "
                f"shape {shape}"
            )
        return jnp.asarray(array, jnp.int32)

    def _require_limits(
        self, operation: str, starts: jax.Array, counts: jax.Array, new: tuple[int, ...]
    ) -> None:
        """Raises ValueError for known starts and counts that are out of range."""
        is_varlen, most, limits = len(new) == 1, new[-1], f"0 to {new[-1]}, the new tokens"
        if self.longest is not None and self.longest < most:
            most, limits = self.longest, f"0 to {self.longest}, the longest of the span"
        if is_varlen:
            limits += f", and no more than {new[-1]} in all"
        is_fitting = are_between(counts, 0, most)
        if is_varlen and is_known(counts):
            is_fitting = is_fitting and int(np.asarray(counts).sum()) <= new[-1]
        latest, expected = (0, "0 in a fresh span") if self.fresh else (2**31 - 1, "0 or above")
        for name, array, is_right, limit in (
            ("starts", starts, are_between(starts, 0, latest), expected),
            ("counts", counts, is_fitting, limits),
        ):
            if not is_right:
                raise ValueError(
                    f"{operation}: {name} are {np.asarray(array).tolist()}: expected {limit}"
                )
