"""All-reduces of a divided decoder: every sum over devices is in this file."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpjax.kernels import Inbox, device, open_inbox, sum_over_devices
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.sums.api import why_no_inbox
from mpjax.kernels.sums.layout import MOST_BYTES
from mpjax.kernels.sums.plans import Problem, plan_of
from mpjax.models.state import StepContext

if TYPE_CHECKING:
    from mpjax.models.decoder import Decoder

# Sums of at most this many bytes may be float32 at no cost: latency dominates, as in 16 bits.
# Measured between two H100s by NVLink (`mpjax bench sums --devices 2`).
LATENCY_BYTES = 256 << 10
_inbox = contextvars.ContextVar[Inbox | None]("inbox", default=None)


def summing_dtype(size: int, dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype for a sum of `size` elements over devices; dtype: of activations.

    In a batch-invariant context it doesn't depend on the size.
    """
    is_wide = is_batch_invariant() or size * 4 <= LATENCY_BYTES
    return jnp.dtype(jnp.float32 if is_wide else dtype)


def step(
    share: Decoder, tokens: jax.Array, context: StepContext, states: Any, *, every_position: bool
) -> tuple[jax.Array, tuple[Any, ...]]:
    """`Decoder.forward` for a device's share, with an inbox if sums are planned to use one.

    Only with a cache, since then no gradient is needed, and not in deterministic mode.
    """
    config, axis = share.config, str(share.axis)
    size = tokens.size * config.hidden_size
    most_bytes = size * summing_dtype(size, config.dtype).itemsize
    can_open = context.starts is not None and share.deterministic is None
    if can_open and why_no_inbox(axis) is None:
        problem = Problem(jax.lax.axis_size(axis), most_bytes, device.limits())
        if plan_of(problem).implementation == "mosaic" and most_bytes <= MOST_BYTES:
            context = dataclasses.replace(context, inbox=open_inbox(axis, most_bytes))
    with summing_by(context.inbox):
        return share.forward(tokens, context, states, every_position=every_position)


@contextlib.contextmanager
def summing_by(inbox: Inbox | None) -> Iterator[None]:
    """Sums that are traced in this context use the inbox, in this thread; None: they are XLA's."""
    token = _inbox.set(inbox)
    try:
        yield
    finally:
        _inbox.reset(token)


def needs_no_gradient() -> bool:
    """Whether sums use an inbox, and so have no gradient."""
    return _inbox.get() is not None


def add_over_devices(x: jax.Array, axis: str) -> jax.Array:
    """All-reduces x over a mesh axis, in x's dtype."""
    return sum_over_devices(x, axis, _inbox.get())


def add_terms(terms: jax.Array, dtype: jax.typing.DTypeLike, axis: str) -> jax.Array:
    """All-reduces the sum of terms [splits, ..., out] to one term [1, ..., out].

    dtype: of activations; see `summing_dtype`.
    """
    if is_batch_invariant():  # or XLA would fuse the sum with factors in some programs only
        terms = jax.lax.optimization_barrier(terms)
    size = terms[0].size
    if terms.dtype != (wanted := summing_dtype(size, dtype)):
        terms = terms.sum(0, keepdims=True).astype(wanted)
    return sum_over_devices(terms, axis, _inbox.get(), has_terms=True)
