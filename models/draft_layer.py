"""The state of layers that draft, their attention to earlier pairs, and what each kind defines.

Such a layer reads pairs of a token and the hidden state before it. `mtp.py` and `eagle.py` are the
two kinds; `drafts.py` runs them.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.models.config import DecoderConfig, MixerSpec
from mpjax.models.layer import DecoderLayer
from mpjax.models.layers import Activations, Rounding
from mpjax.models.maps import Fold
from mpjax.models.mixer import Mixer
from mpjax.models.parallel import JointSpec, JointState
from mpjax.models.parameters import Names
from mpjax.models.recurrent import RecurrentMixer
from mpjax.models.share import HeadShares
from mpjax.models.state import SequenceState, StepContext


@dataclasses.dataclass(frozen=True)
class DraftSpec(JointSpec):
    """Base class of the specs of the mixers of layers that draft.

    names: of the layer's tensors in files; empty for those of the family (`Decoder.draft_names`).
    attention: the spec of attention to earlier pairs.
    """

    drafts: ClassVar[bool] = True
    names: ClassVar[Names] = {}
    paths: ClassVar[tuple[str, ...]] = ("attention",)
    attention: MixerSpec

    def rotary_channels(self, config: DecoderConfig) -> int:
        """The channels of a head of attention."""
        return self.attention.rotary_channels(config)

    def state(self, config: DecoderConfig) -> JointState:
        """The attention's state, and the hidden state after each sequence's last token."""
        last = SequenceState(((config.hidden_size,),), config.dtype)
        return JointState((self.attention.state(config), last))

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """No folds: quantisers leave the layer as it is."""
        return ()


class LastHidden(RecurrentMixer):
    """Keeps the hidden state after each sequence's last token: a delay of one token."""

    def project(self, x: Activations, context: StepContext) -> Any:
        """The hidden states themselves, [batch, tokens, hidden] or varlen [tokens, hidden]."""
        return x

    def advance(
        self, inputs: Any, context: StepContext, state: tuple[jax.Array, ...] | None
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """The hidden state before each token, zeros before a sequence's first, and the state."""
        assert state is not None
        rows = context.rows(state[0])
        first = rows.take(state[0]).astype(inputs.dtype)
        if inputs.ndim == 3:
            before = jnp.concatenate([first[:, None], inputs[:, :-1]], 1)
        else:
            assert context.counts is not None
            found = tokens_of(context.counts, len(inputs))
            is_first = (found.number == 0)[:, None]
            before = jnp.where(is_first, first[found.sequence], jnp.roll(inputs, 1, 0))
        return before, (rows.put(state[0], context.last(inputs)),)


class DraftMixer(nnx.Module):
    """Base class of the mixers of layers that draft, which also run what is around the layer.

    taps: the layers of the decoder whose input streams the head reads; the number of layers is the
    stream after the last.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, config: DecoderConfig, spec: DraftSpec, rngs: nnx.Rngs):
        self.attention: Mixer = spec.attention.build(config, rngs)
        self.last = LastHidden()

    @abc.abstractmethod
    def features(self, hidden: jax.Array, seen: list[jax.Array]) -> jax.Array:
        """The hidden states [..., hidden] that pairs contain, of the decoder's tokens.

        hidden: the decoder's, after its final norm. seen: the streams of `taps`.
        """

    def embedding_of(self, tokens: jax.Array) -> jax.Array | None:
        """The head's own embeddings [..., hidden] of tokens; None: the decoder's are used."""
        return None

    @abc.abstractmethod
    def run(
        self,
        layer: DecoderLayer,
        pair: tuple[jax.Array, jax.Array],
        context: StepContext,
        state: Any,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the layer; returns its terms, its residual stream, and the state.

        layer: the layer whose mixer this is. pair: embeddings [..., hidden] of tokens, and the
        hidden state before each. No hidden state is before a sequence's first token: there the
        input of attention is zeros. Its key then has the score 0 and its value is 0, so that it
        scales the result of attention by Z / (Z + 1), where Z is the sum of the exponentials of the
        other scores.
        """

    @abc.abstractmethod
    def finish(self, terms: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The input of the head's table [..., hidden], and the hidden state of the next pair."""

    @abc.abstractmethod
    def logits(self, model: Any, hidden: jax.Array, context: StepContext) -> jax.Array:
        """Logits float32 [..., columns of the decoder's] from the first result of `finish`."""

    def before(self, context: StepContext, state: tuple[Any, ...]) -> jax.Array:
        """The hidden state before each sequence's next token, [batch, hidden]."""
        [last] = state[1]
        found: jax.Array = context.rows(last).take(last)
        return found

    @property
    def activations(self) -> Rounding:
        """How the input of attention is rounded."""
        return self.attention.activations

    def divide_norms(self, axis: str, heads: HeadShares) -> None:
        """Makes attention's joint norms cover the heads of all devices of a mesh axis."""
        self.attention.divide_norms(axis, heads)

    def mix(
        self, x: Activations, context: StepContext, state: tuple[Any, ...] | None = None
    ) -> tuple[Activations, tuple[Any, ...] | None]:
        """Attention without its last map, and the state; see `Mixer`."""
        mixed, pages = self.attention.mix(x, context, None if state is None else state[0])
        return mixed, None if state is None else (pages, state[1])

    def settle(self, state: tuple[Any, ...], context: StepContext) -> tuple[Any, ...]:
        """The state after a tentative step; only the last hidden state changes."""
        return state[0], self.last.settle(state[1], context)

    def terms(self, mixed: Activations, context: StepContext) -> jax.Array:
        """Terms [splits, ..., hidden] whose sum is the output map of the result of `mix`."""
        return self.attention.terms(mixed, context)

    def inputs(self, x: jax.Array, mixed: Any) -> dict[str, jax.Array]:
        """The input of each linear map, by its path; see `Mixer.inputs`."""
        return {f"attention.{path}": read for path, read in self.attention.inputs(x, mixed).items()}


def has_hidden(context: StepContext, shape: tuple[int, ...]) -> jax.Array:
    """Whether a hidden state is before each token of a shape, bool [*shape, 1]."""
    return (context.positions(shape) > 0)[..., None]
