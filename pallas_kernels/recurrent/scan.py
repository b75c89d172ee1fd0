"""The scan of a selective state space (Mamba2), padded or varlen, from a given state.

Source: Dao and Gu, "Transformers are SSMs", 2024, section 6.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_arrays, optional_array, require_floats, shown
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.recurrent import scan_chunks
from mpjax.kernels.recurrent.chunks import read_flat, read_in_chunks
from mpjax.kernels.recurrent.counts import read_counts
from mpjax.kernels.recurrent.scan_chunks import ScanTokens

Tokens = tuple[jax.Array, ...]  # x, steps, b and c, each [..., tokens, ...]


def state_space_scan(
    x: jax.Array,
    steps: jax.Array,
    rates: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array | None = None,
    counts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scans tokens into the state S of each head: S ← exp(step · rate) · S + step · x bᵀ, y = S c.

    x: [batch, tokens, heads, channels], padded on the right, or varlen [tokens, heads, channels].
    steps: [..., tokens, heads], 0 or more. rates: [heads], 0 or less.
    b, c: [..., tokens, groups, states], each group of which serves heads / groups heads.
    state: float32 [batch, heads, channels, states]; None for zeros.
    counts: int32 [batch], the real tokens of each sequence; None: all. Varlen x needs counts.

    Returns y in the shape of x, and the state after each sequence's real tokens, both as exact as
    in float32. Tokens are processed in chunks of dense products: on a GPU by a kernel for x, b and
    c in bfloat16, else in plain jnp, as are gradients. Padding may have any values: they affect
    neither real tokens nor the state, nor gradients.

    Raises ValueError for shapes and dtypes that don't fit, and for known counts out of range.
    """
    name = "state_space_scan"
    x, steps, rates, b, c = as_arrays(name, x=x, steps=steps, rates=rates, b=b, c=c)
    state = optional_array(f"{name}: state", state)
    require_floats(name, x=x, steps=steps, rates=rates, b=b, c=c)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{name}: x is {shown(x)}: expected [batch, tokens, heads, channels], or varlen "
            "[tokens, heads, channels]"
        )
    counts = read_counts(name, counts, x.shape[:-2])
    batch = len(x) if counts is None else len(counts)
    _require_shapes(x, steps, rates, b, c)
    shape = batch, *x.shape[-2:], b.shape[-1]
    if state is None:
        state = jnp.zeros(shape, jnp.float32)
    elif state.shape != shape or state.dtype != jnp.float32:
        raise ValueError(
            f"{name}: state is {shown(state)}: expected float32 [batch, heads, channels, states], "
            f"which is {shape}"
        )
    steps, rates = steps.astype(jnp.float32), rates.astype(jnp.float32)
    chosen = choose(
        name,
        None,
        "triton" if x.shape[-3] > 1 and batch else "reference",
        ("triton", "reference"),
        lambda _: device.why_triton_cannot_run() or scan_chunks.why_not(x, b, c),
    )
    arguments = (x, steps, b, c), rates, state, counts
    if chosen == "reference":
        return plain(*arguments)
    found: tuple[jax.Array, jax.Array] = with_gradients_of(plain, _by_kernel, *arguments)
    return found


def plain(
    tokens: Tokens, rates: jax.Array, state: jax.Array, counts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The scan in plain jnp."""
    places = tokens[0].shape[:-2]
    tokens = tuple(array.astype(jnp.float32) for array in tokens)
    state, y = read_in_chunks(
        lambda state, chunk: _read_chunk(state, rates, chunk), state, tokens, counts, places
    )
    return y, state


def _by_kernel(
    tokens: Tokens, rates: jax.Array, state: jax.Array, counts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The scan by the kernel."""
    places = tokens[0].shape[:-2]

    def read(
        tokens: Tokens, state: jax.Array, begins: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, steps, b, c = tokens
        given = ScanTokens(x, steps, rates, b, c)
        return scan_chunks.read(given, state, begins, counts, longest=places[-1])

    state, y = read_flat(read, state, tokens, counts, places)
    return y, state


def _read_chunk(state: jax.Array, rates: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk of tokens, and their outputs.

    state: [batch, heads, channels, states]. tokens: [batch, tokens, ...].
    Log-decays are summed for each pair of tokens: a difference of prefix sums would lose small
    decays after a large one.
    """
    x, steps, b, c = tokens
    batch, size, heads, channels = x.shape
    groups, states = b.shape[2:]
    grouped = batch, groups, heads // groups
    order = jnp.arange(size)
    is_after = order[:, None] > order[None]  # [m, j]
    logs = (jnp.moveaxis(steps, 1, 2) * rates[None, :, None])[..., None]  # [batch, heads, m, 1]
    between = jnp.cumsum(jnp.where(is_after, logs, 0.0), axis=-2)  # of j + 1 … i, at [i, j]
    is_causal = order[:, None] >= order[None]
    decays = jnp.exp(jnp.where(is_causal, between, -jnp.inf)).reshape(*grouped, size, size)
    since = jnp.exp(jnp.cumsum(logs[..., 0], -1)).reshape(*grouped, size)
    x = (x * steps[..., None]).reshape(batch, size, groups, heads // groups, channels)
    before = state.reshape(*grouped, channels, states)
    weights = _product("bigs,bjgs->bgij", c, b)[:, :, None] * decays
    y = _product("bghij,bjghp->bighp", weights, x)
    y += _product("bigs,bghps->bighp", c, before) * jnp.moveaxis(since, -1, 1)[..., None]
    added = _product("bghj,bjghp,bjgs->bghps", decays[..., -1, :], x, b)
    after = before * since[..., -1, None, None] + added
    return after.reshape(state.shape), y.reshape(batch, size, heads, channels)


def _product(axes: str, *arrays: jax.Array) -> jax.Array:
    found: jax.Array = jnp.einsum(axes, *arrays, precision=jax.lax.Precision.HIGHEST)
    return found


def _require_shapes(
    x: jax.Array, steps: jax.Array, rates: jax.Array, b: jax.Array, c: jax.Array
) -> None:
    """Raises ValueError for shapes that don't fit together."""
    tokens, heads = x.shape[:-2], x.shape[-2]
    expected = {"steps": (steps, (*tokens, heads)), "rates": (rates, (heads,))}
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"state_space_scan: {name} is {shown(array)}: expected {shape}")
    is_grouped = b.ndim == x.ndim and b.shape[:-2] == tokens and b.shape[-2] > 0
    if not is_grouped or heads % b.shape[-2] or c.shape != b.shape:
        raise ValueError(
            f"state_space_scan: b and c are {shown(b)} and {shown(c)}: expected one shape "
            f"{(*tokens, 'groups', 'states')}, with a divisor of {heads} as groups"
        )
