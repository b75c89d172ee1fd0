"""Accepts or rejects proposed tokens, so that the distribution is that of plain decoding.

Deterministic proposals (without probabilities): each position draws a token from the model's
distribution p with the random numbers of plain decoding, and proposed tokens are accepted up to the
first that differs. So the tokens equal those of plain decoding, seed by seed. This is the rule
below with q(d) = 1: d is accepted with probability p(d), else a token is drawn from p without d.

Proposals drawn from distributions q: token d is accepted with probability min(1, p(d) / q(d)).
Otherwise a token is drawn from max(p − q, 0), normalised. (Leviathan et al., "Fast inference from
transformers via speculative decoding", 2023; Chen et al., "Accelerating large language model
decoding with speculative sampling", 2023.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.proposer import Proposal
from mpjax.sampling.random_keys import gumbel_noise, step_keys

# Folded into a position's key to get independent keys; plain decoding uses the key itself.
DRAFTING, ACCEPTING = 1, 2


def count_leading(is_right: jax.Array) -> jax.Array:
    """The number of true values before the first false one in bool [batch, k], int32 [batch]."""
    return jnp.cumprod(is_right.astype(jnp.int32), axis=1).sum(axis=1)


def is_proposed(proposal: Proposal) -> jax.Array:
    """Whether each of a row's k tokens is proposed (not padding), bool [batch, k]."""
    return jnp.arange(proposal.tokens.shape[1])[None] < proposal.counts[:, None]


def count_agreeing(drawn: jax.Array, proposal: Proposal) -> jax.Array:
    """The number of proposed tokens before the first that differs from `drawn`, int32 [batch].

    drawn: int32 [batch, k + 1], the token drawn from the model at each position.
    """
    same = drawn[:, :-1] == proposal.tokens
    return count_leading(same & is_proposed(proposal))


def accept(
    p: jax.Array, proposal: Proposal, keys: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepts tokens of a proposal with probabilities, and draws the next token.

    p: float32 [batch, k + 1, vocabulary], the model's distribution at each position.
    proposal: with probabilities q, [batch, k, vocabulary].
    keys: typed PRNG keys [batch]. counts: int32 [batch], new tokens before the proposal.

    Returns tokens int32 [batch, k + 1]: the accepted ones, the drawn one, then meaningless ones;
    and the number of accepted ones, int32 [batch].
    """
    assert proposal.probabilities is not None
    drafts, q = proposal.tokens, proposal.probabilities
    batch, k = drafts.shape
    p_of, q_of = (jnp.take_along_axis(x, drafts[..., None], axis=2)[..., 0] for x in (p[:, :k], q))
    position = counts[:, None] + jnp.arange(k)[None]
    coin = jax.vmap(_coins)(keys, position)
    accepted = count_leading((coin * q_of < p_of) & is_proposed(proposal))
    # The position after the accepted tokens: a rejected token, or the end of the proposal.
    row = jnp.arange(batch)
    here = p[row, accepted]
    is_rejected = accepted < proposal.counts
    rest = jnp.maximum(here - q[row, jnp.minimum(accepted, k - 1)], 0)
    # If p and q differ by rounding alone, max(p − q, 0) may be all zeros.
    takes_rest = is_rejected & (rest.sum(axis=1) > 0)
    weights = jnp.where(takes_rest[:, None], rest, here)
    drawn = draw(weights, step_keys(keys, counts + accepted))
    column = jnp.arange(k + 1)[None]
    tokens = jnp.where(
        column < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), drawn[:, None]
    )
    return tokens, accepted


def draw(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Draws a token from each row of unnormalised probabilities [rows, vocabulary]."""
    noise = gumbel_noise(keys, weights.shape[1])
    return jnp.argmax(jnp.log(weights) + noise, axis=-1).astype(jnp.int32)


def _coins(key: jax.Array, positions: jax.Array) -> jax.Array:
    """A uniform float32 number for each position of a row."""

    def coin(position: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, position.astype(jnp.uint32))
        return jax.random.uniform(jax.random.fold_in(own, ACCEPTING), (), jnp.float32)

    return jax.vmap(coin)(positions)
