"""The layer of a multi-token-prediction (MTP) head, which proposes the tokens after the next one.

From the model's hidden state h after a token, after the final norm, and the embedding e of the
token that follows, the head computes

    u = joint · [embedding_norm(e); hidden_norm(h)]        g = norm(layer(u))

where `layer` is a decoder layer with attention to earlier such pairs. The model's head gives the
logits of the token after e's from g, and (g, that token) is the pair from which the head proposes
the next one. Source: Qwen3-Next and Qwen3.5, as in vLLM's qwen3_5_mtp.py and in llama.cpp; Gloeckle
et al., Better & Faster Large Language Models via Multi-token Prediction (arXiv 2404.19737).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels.kv_cache.varlen import tokens_of
from mpjax.models.config import ConfigError, DecoderConfig, LayerSpec, MixerSpec
from mpjax.models.layers import Activations, RMSNorm, Rounding
from mpjax.models.maps import Fold
from mpjax.models.mixer import Mixer
from mpjax.models.parallel import JointSpec, JointState
from mpjax.models.parameters import Names
from mpjax.models.recurrent import RecurrentMixer
from mpjax.models.share import HeadShares
from mpjax.models.state import SequenceState, StepContext

_LAYER, _OWN_LAYER = "model.layers.{layer}.", "mtp.layers.0."


@dataclasses.dataclass(frozen=True)
class MTPSpec(JointSpec):
    """Spec of the mixer of an MTP layer: attention to pairs of a hidden state and a token.

    attention: the spec of that attention.
    """

    kind: ClassVar[str] = "mtp"
    drafts: ClassVar[bool] = True
    paths: ClassVar[tuple[str, ...]] = ("attention",)
    attention: MixerSpec

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> MTP:
        """An MTP module with random weights."""
        return MTP(config, self, rngs)

    def state(self, config: DecoderConfig) -> JointState:
        """The attention's state, and the hidden state after each sequence's last token."""
        last = SequenceState(((config.hidden_size,),), config.dtype)
        return JointState((self.attention.state(config), last))

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the joint map [hidden, 2 · hidden], of the norms, and of attention's arrays.

        The joint map is an array, since the files of quantised models hold it in 16 bits.
        """
        hidden = (config.hidden_size,)
        norms = ("embedding_norm", "hidden_norm", "norm")
        return {
            **super().arrays(config),
            "joint": (*hidden, 2 * config.hidden_size),
            **{f"{norm}.weight": hidden for norm in norms},
        }

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """No folds: quantisers leave the layer as it is."""
        return ()


def with_mtp(config: DecoderConfig, names: Names) -> DecoderConfig:
    """The configuration with the layer of an MTP head after the others.

    The layer is like the last one with attention. names: `Decoder.draft_names` of the family.

    Raises ConfigError for a family whose head is not implemented, and for layers without attention.
    """
    if not names:
        raise ConfigError("mtp: no MTP head of this family is implemented: load it without mtp")
    mixed = [it for it in config.layers if it.attention is not None and it.attention.ropes]
    if not mixed:
        raise ConfigError(
            f"mtp: none of the {config.num_layers} layers has attention: expected one or more, "
            "which the layer of an MTP head is like"
        )
    like = mixed[-1]
    assert like.attention is not None
    layer = LayerSpec(MTPSpec(like.attention), like.mlp, like.norms)
    return dataclasses.replace(config, layers=(*config.layers, layer))


def mtp_names(names: Names) -> Names:
    """The tensor names of an MTP layer in Qwen's files, from those of the family's layers."""

    def moved(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(name, str):
            return name.replace(_LAYER, _OWN_LAYER)
        return tuple(each.replace(_LAYER, _OWN_LAYER) for each in name)

    found = {path: moved(name) for path, name in names.items()}
    inner = {path: name for path, name in found.items() if path.startswith("attention.")}
    return {
        **found,
        **{f"attention.{path}": name for path, name in inner.items()},
        "attention.joint": "mtp.fc.weight",
        "attention.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "attention.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "attention.norm.weight": "mtp.norm.weight",
    }


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


class MTP(nnx.Module):
    """The mixer of an MTP layer, the map and norms before the layer, and the norm after it."""

    def __init__(self, config: DecoderConfig, spec: MTPSpec, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm.of, config, config.hidden_size)
        self.attention: Mixer = spec.attention.build(config, rngs)
        self.last = LastHidden()
        shape = config.hidden_size, 2 * config.hidden_size
        joint = nnx.initializers.normal(0.02)(rngs.params(), shape)
        self.joint = nnx.Param(joint.astype(config.dtype))
        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()

    def join(self, embedded: jax.Array, hidden: jax.Array, context: StepContext) -> jax.Array:
        """The residual stream that enters the layer, of pairs of a hidden state and a token.

        embedded: embeddings of tokens [..., hidden]. hidden: the hidden state before each.

        No hidden state is before a sequence's first token: there the stream is zeros. Its key then
        has the score 0 and its value is 0, so that it scales the result of attention by
        Z / (Z + 1), where Z is the sum of the exponentials of the other scores.
        """
        both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        wide = jnp.matmul(both, self.joint.get_value().T, preferred_element_type=jnp.float32)
        is_behind = (context.positions(embedded.shape[:-1]) > 0)[..., None]
        return jnp.where(is_behind, wide, 0).astype(embedded.dtype)

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
