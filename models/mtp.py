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

from mpjax.kernels.plans import conditions as plan_conditions
from mpjax.models.config import ConfigError, DecoderConfig, LayerSpec
from mpjax.models.draft_layer import DraftMixer, DraftSpec, has_hidden
from mpjax.models.layer import DecoderLayer, apply
from mpjax.models.layers import RMSNorm
from mpjax.models.parameters import Names
from mpjax.models.state import StepContext

_LAYER, _OWN_LAYER = "model.layers.{layer}.", "mtp.layers.0."


@dataclasses.dataclass(frozen=True)
class MTPSpec(DraftSpec):
    """Spec of the mixer of an MTP layer: attention to pairs of a hidden state and a token."""

    kind: ClassVar[str] = "mtp"

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> MTP:
        """An MTP module with random weights."""
        return MTP(config, self, rngs)

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


class MTP(DraftMixer):
    """The mixer of an MTP layer, the map and norms before the layer, and the norm after it."""

    def __init__(self, config: DecoderConfig, spec: MTPSpec, rngs: nnx.Rngs):
        super().__init__(config, spec, rngs)
        norm = functools.partial(RMSNorm.of, config, config.hidden_size)
        shape = config.hidden_size, 2 * config.hidden_size
        joint = nnx.initializers.normal(0.02)(rngs.params(), shape)
        self.joint = nnx.Param(joint.astype(config.dtype))
        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()

    def features(self, hidden: jax.Array, seen: list[jax.Array]) -> jax.Array:
        """The hidden states after the final norm."""
        return hidden

    def run(
        self,
        layer: DecoderLayer,
        pair: tuple[jax.Array, jax.Array],
        context: StepContext,
        state: Any,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the layer on the joint map's output; see DraftMixer."""
        embedded, hidden = pair
        both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        wide = jnp.matmul(both, self.joint.get_value().T, preferred_element_type=jnp.float32)
        stream = jnp.where(has_hidden(context, embedded.shape[:-1]), wide, 0).astype(embedded.dtype)
        return apply(plan_conditions(), layer, stream[None], None, context, state)

    def finish(self, terms: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The stream after the layer and the norm, as both results."""
        _, found = self.norm.add(terms, residual, None)
        assert isinstance(found, jax.Array)
        return found, found

    def logits(self, model: Any, hidden: jax.Array, context: StepContext) -> jax.Array:
        """The decoder's head."""
        found: jax.Array = model._logits(hidden, context)
        return found
