"""MTP and Eagle, proposers by a head that is a layer of the model."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.generation.speculation.drafting import Drafting
from mpjax.generation.speculation.proposer import Context, Proposal, Proposer, read_k
from mpjax.generation.state import State
from mpjax.models import DecoderConfig

Static = functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["k"])


@dataclasses.dataclass(frozen=True)
class Head(Proposer):
    """Base class of proposers by a layer after the model's that reads the model's hidden states.

    The layer's keys and values are in the model's cache. The head samples with the model's
    settings, one token after another, and predicts the second and later tokens from its own hidden
    states.

    k: the most proposed tokens, 1 to 32. layer: the kind of the layer's mixer. lacking: in the
        error for another model, what it lacks and what to do.
    """

    k: int = 3
    always = True
    layer: ClassVar[str]
    lacking: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", read_k(type(self).__name__, self.k))

    def require_model(self, config: DecoderConfig) -> None:
        """Raises ValueError for a model without such a head."""
        last = config.layers[-1].attention
        if last is None or last.kind != self.layer:
            raise ValueError(f"speculate is {self.layer}, and the model has no {self.lacking}")

    def propose(self, context: Context) -> tuple[Proposal, Any]:
        """The proposal of `propose_to`; the proposer has no state of its own."""
        return self.propose_to(context)[0], None

    def propose_to(self, context: Context) -> tuple[Proposal, State]:
        """Runs the head on each row's newest token, and on each token that it draws but the last.

        The state has the cache in which the head's pages were written; verification overwrites
        them.
        """
        state, model, most = context.state, context.model, context.most
        divided = model.shards > 1
        first = (most > 0).astype(jnp.int32)
        logits, hidden, cache = model.draft(state.newest, first, state.cache)
        drafting = Drafting.begin(context, cache, self.k)

        def advance(number: jax.Array, carry: tuple[Drafting, jax.Array, jax.Array]) -> Any:
            drafting, logits, hidden = carry
            drafting, drawn = drafting.draw(logits, context, number, divided=divided)
            reads = (number + 1 < most).astype(jnp.int32)
            logits, hidden, cache = model.draft(drawn, reads, drafting.cache, hidden)
            return dataclasses.replace(drafting, cache=cache), logits, hidden

        carry = drafting, logits, hidden
        drafting, logits, _ = jax.lax.fori_loop(0, self.k - 1, advance, carry)
        drafting, _ = drafting.draw(logits, context, jnp.int32(self.k - 1), divided=divided)
        proposal = Proposal(drafting.tokens, most, drafting.probabilities)
        cache = model.forget(drafting.cache, state.cache)
        return proposal, dataclasses.replace(state, cache=cache)


@Static
@dataclasses.dataclass(frozen=True)
class MTP(Head):
    """Proposes tokens by the multi-token-prediction head of the model, loaded with `mtp=True`.

    The head reads the model's last hidden states. (Gloeckle et al., 2024.)

    k: the most proposed tokens, 1 to 32.

    Raises ValueError for another k.
    """

    layer = "mtp"
    lacking = (
        "multi-token-prediction head: load it with mtp=True, from files with tensors such as "
        "mtp.fc.weight"
    )


@Static
@dataclasses.dataclass(frozen=True)
class Eagle(Head):
    """Proposes tokens by an EAGLE-3 head, loaded with the model: `load(..., drafter="head/")`.

    The head reads the hidden states of several layers of the model. (Li et al., 2025.)

    k: the most proposed tokens, 1 to 32.

    Raises ValueError for another k.
    """

    layer = "eagle"
    lacking = "EAGLE-3 head: load it with drafter=..., the head's folder"


def read_head(text: str) -> Head | None:
    """The proposer that a text describes: `mtp`, or `eagle:4` with k = 4; None for another text.

    Raises ValueError for an invalid k.
    """
    found = re.fullmatch(r"(mtp|eagle)(?::(\d{1,9}))?", text, re.ASCII)
    if found is None:
        return None
    head = {"mtp": MTP, "eagle": Eagle}[found[1]]
    return head() if found[2] is None else head(int(found[2]))
