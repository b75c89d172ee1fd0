"""Log-probabilities for a trainer, and how far those of a sampler are from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_array, require_type, shown
from mpjax.models import Decoder
from mpjax.models.deterministic import in_own_mode
from mpjax.models.routes import Routes, read_routes
from mpjax.models.step_checks import read_tokens
from mpjax.sampling.draw import logprobs

HEAD_VALUES = 1 << 26  # the most logits that exist at a time, in float32
KINDS = ("truncate", "mask")


def token_logprobs(
    model: Decoder,
    tokens: Any,
    lengths: Any = None,
    *,
    temperature: float = 1.0,
    routes: Any = None,
) -> jax.Array:
    """The log-probability of each token given those before it: float32 [batch, tokens − 1].

    Entry i is of token i + 1, and 0 where that is padding. It is differentiable with respect to all
    of the model that can be trained (`mpjax.trainable`): adapters, learned scales, 16-bit weights;
    packed maps are multiplied as the sampler multiplies them. Use it under `jit`.

    tokens: int [batch, tokens], padded on the right. lengths: int [batch], the tokens of each row
        before the padding; None for all.
    routes: the experts of each token by layer, int [batch, tokens or tokens − 1, k], such as
        `captured["router"]` of `generate_tokens`; their weights are the model's own. In other
        layers, and with None, routers choose.
    temperature: divides the logits first; with 1, results are comparable to those of `generate`.

    To save memory, logits are computed for a chunk of tokens at a time, and recomputed in the
    backward pass, unless the model is divided among devices.

    Raises ValueError for arguments that don't fit.
    """
    require_type("model", model, Decoder, hint=", such as lm.model")
    tokens = read_tokens(model.config, as_array("tokens", tokens))
    if tokens.shape[1] < 2:
        raise ValueError("tokens have one column: expected a token and one behind it")
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {shown(temperature)}: expected a number above 0")
    following = tokens[:, 1:]
    read = tokens[:, :-1]
    chosen = read_routes(model, routes, (read.shape[0], read.shape[1]))
    found = _of_tokens(model, read, following, temperature, chosen)
    if lengths is None:
        return found
    lengths = as_array("lengths", lengths)
    if lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths are {shown(lengths)}: expected integers of shape {tokens.shape[:1]}"
        )
    is_token = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]
    return jnp.where(is_token, found, 0.0)


@in_own_mode
def _of_tokens(
    model: Decoder,
    tokens: jax.Array,
    following: jax.Array,
    temperature: float,
    routes: Routes | None,
) -> jax.Array:
    """The log-probabilities of `following`, int [batch, tokens], given `tokens`."""
    if model.mesh is not None:
        return logprobs(model(tokens) / temperature, following)
    return _of_chunks(model, model.hidden(tokens, routes=routes), following, temperature)


def _of_chunks(
    model: Decoder, hidden: jax.Array, following: jax.Array, temperature: float
) -> jax.Array:
    """The log-probabilities of tokens int [batch, tokens] by normed states, a chunk at a time."""
    count = following.size
    size = min(count, max(1, HEAD_VALUES // model.config.vocab_size))
    padding = -count % size
    states = jnp.pad(hidden.reshape(count, -1), ((0, padding), (0, 0)))
    tokens = jnp.pad(following.reshape(count), (0, padding))

    @jax.checkpoint
    def of_some(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.logits(chunk[0], normed=True)[..., : model.config.vocab_size]
        return logprobs(logits / temperature, chunk[1])

    chunks = states.reshape(-1, size, states.shape[-1]), tokens.reshape(-1, size)
    found = jax.lax.map(of_some, chunks)
    return found.reshape(-1)[:count].reshape(following.shape)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """How far log-probabilities of a trainer are from those of the sampler that drew the tokens.

    tokens: how many were compared. mean: of |δ|, where δ is the trainer's log-probability minus the
    sampler's. largest: the largest |difference of probabilities|. kl: an estimate of the KL
    divergence of the trainer's distribution from the sampler's in nats per token, the mean of
    exp(δ) − 1 − δ (Schulman's k3). effective: the effective sample size (Σw)² / Σw² of the weights
    w = exp(δ), as a share of the tokens.
    """

    tokens: int
    mean: float
    largest: float
    kl: float
    effective: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: mean |difference| of log-probabilities {self.mean:.2e}, "
            f"largest of probabilities {self.largest:.2e}, KL {self.kl:.2e}, "
            f"effective sample size {self.effective:.1%}"
        )


def mismatch(sampler: Any, trainer: Any, mask: Any = None) -> Mismatch:
    """Compares the log-probabilities of drawn tokens, by a sampler and by a trainer.

    sampler, trainer: float, of one shape. mask: bool of that shape, the tokens that count; None for
        all.

    Raises ValueError for other shapes, and where no token counts.
    """
    given, found, is_counted = _read("mismatch", sampler, trainer, mask)
    if not (count := int(is_counted.sum())):
        raise ValueError("mismatch: the mask has no token: expected one or more")
    delta = jnp.where(is_counted, found - given, 0.0)
    weights = jnp.where(is_counted, jnp.exp(delta), 0.0)
    difference = jnp.where(is_counted, jnp.exp(found) - jnp.exp(given), 0.0)
    return Mismatch(
        count,
        mean=float(jnp.abs(delta).sum()) / count,
        largest=float(jnp.abs(difference).max()),
        kl=float((jnp.expm1(delta) - delta).sum()) / count,
        effective=float(weights.sum() ** 2 / (weights**2).sum()) / count,
    )


def importance_weights(
    sampler: Any, trainer: Any, *, cap: float = 2.0, kind: str = "truncate"
) -> jax.Array:
    """The weights exp(trainer − sampler) of tokens drawn by a slightly different model, float32.

    They are factors of a token's loss, through which no gradient passes.

    sampler, trainer: log-probabilities of one shape. cap: the largest weight. kind: of larger ones:
        `truncate` makes them `cap` (truncated importance sampling), `mask` makes them 0.

    Raises ValueError for other shapes, a cap that is not above 0 and another kind.
    """
    given, found, _ = _read("importance_weights", sampler, trainer, None)
    is_number = isinstance(cap, int | float) and not isinstance(cap, bool)
    if not is_number or not cap > 0:
        raise ValueError(f"cap is {shown(cap)}: expected a number above 0")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind is {shown(kind)}: expected {' or '.join(map(repr, KINDS))}")
    weights = jax.lax.stop_gradient(jnp.exp(found - given))
    return jnp.where(weights > cap, cap if kind == "truncate" else 0.0, weights)


def _read(
    name: str, sampler: Any, trainer: Any, mask: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities in float32, and which count. Raises ValueError for other shapes."""
    given, found = (
        as_array(f"{name}: {what}", x).astype(jnp.float32)
        for what, x in (("sampler", sampler), ("trainer", trainer))
    )
    is_counted = jnp.ones(given.shape, bool) if mask is None else as_array(f"{name}: mask", mask)
    for what, array in (("trainer", found), ("mask", is_counted)):
        if array.shape != given.shape:
            raise ValueError(
                f"{name}: {what} has shape {array.shape}, and sampler {given.shape}: expected the "
                "same, an entry for each token"
            )
    return given, found, is_counted.astype(bool)
