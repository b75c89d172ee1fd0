"""The layer of an EAGLE-3 head, which proposes tokens from hidden states of several layers.

The head reads the streams that enter some of the model's layers, and the embedding e of the token
that follows. With their concatenation s, it computes

    h = fc · s        x = [input_layernorm(e); hidden_norm(h)]        g = h + layer(x)

where `layer` is attention, whose queries, keys and values are maps of x, and a gated MLP. The
head's own table gives the logits of the tokens in its own vocabulary from norm(g), and (g, the
token that is drawn) is the pair from which it proposes the next one. Source: Li et al., EAGLE-3
(arXiv 2503.01840); SafeAILab's cnets.py, and speculators for the variants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.kernels.cutting import Run
from mpjax.models import tables
from mpjax.models.attention import Attention, GroupedQuerySpec
from mpjax.models.config import ConfigError, DecoderConfig, LayerSpec, RopeScaling
from mpjax.models.draft_layer import DraftMixer, DraftSpec, has_hidden
from mpjax.models.layer import DecoderLayer
from mpjax.models.layers import Linear, RMSNorm
from mpjax.models.llama import llama_layers
from mpjax.models.maps import LinearMaps
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import ArrayPlace, Names
from mpjax.models.share import Cut, Share
from mpjax.models.state import StepContext

_LAYER = "midlayer."
TOKENS = "d2t"  # the tensor with the token ids of the head's vocabulary, minus their indices


@dataclasses.dataclass(frozen=True)
class PairSpec(GroupedQuerySpec):
    """Attention whose queries, keys and values are maps of two vectors of each token.

    theta, scaling: of its rotary embedding, if `rope` is "draft".
    """

    kind: ClassVar[str] = "pair"
    theta: float = 1e4
    scaling: RopeScaling | None = None

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Attention:
        """An Attention module with random weights, which rotates whole heads."""
        return Attention(dataclasses.replace(config, rotary_dim=None), self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """As GroupedQuerySpec, with twice as many input channels of `qkv`."""
        qkv, output = super().linear_maps(config)
        shapes = tuple((2 * config.hidden_size, outputs) for _, outputs in qkv.shapes)
        return qkv._replace(shapes=shapes), output


@dataclasses.dataclass(frozen=True)
class EagleSpec(DraftSpec):
    """Spec of the mixer of an EAGLE-3 layer.

    taps: the layers whose input streams the head reads; the number of layers is the stream after
        the last.
    vocabulary: the number of tokens that the head can propose.
    norm_eps: the epsilon of the head's norms.
    own_embedding: whether the head has an embedding of its own, instead of the model's.
    norm_before_residual: whether the stream begins with the normed h.
    norm_before_fc: whether there is a norm of s. norm_output: whether the next pair has norm(g)
        instead of g.
    """

    kind: ClassVar[str] = "eagle"
    names: ClassVar[Names] = {
        "attention.fc": "fc",
        "attention.head": "lm_head",
        "attention.fc_norm.weight": "input_norm.weight",
        "attention.embedding": "embed_tokens.weight",
        "attention.embedding_norm.weight": f"{_LAYER}input_layernorm.weight",
        "attention.hidden_norm.weight": f"{_LAYER}hidden_norm.weight",
        "attention.attention.qkv": tuple(f"{_LAYER}self_attn.{x}_proj" for x in "qkv"),
        "attention.attention.output": f"{_LAYER}self_attn.o_proj",
        "mlp_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "mlp.gate_up": tuple(f"{_LAYER}mlp.{x}_proj" for x in ("gate", "up")),
        "mlp.down": f"{_LAYER}mlp.down_proj",
        "attention.norm.weight": "norm.weight",
    }
    attention: PairSpec
    taps: tuple[int, ...]
    vocabulary: int
    norm_eps: float = 1e-5
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    @property
    def reads_stream(self) -> bool:
        """The layer has no norm before the mixer, which norms both vectors itself."""
        return True

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Eagle:
        """An Eagle module with random weights."""
        return Eagle(config, self, rngs)

    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """The map `fc`, those of attention, and the `head`."""
        hidden = config.hidden_size
        return (
            LinearMaps("fc", ((len(self.taps) * hidden, hidden),)),
            *super().linear_maps(config),
            LinearMaps("head", ((hidden, self.vocabulary),)),
        )

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the norms' weights, and of an embedding of the head's own."""
        hidden = config.hidden_size
        norms = ("embedding_norm", "hidden_norm", "norm")
        found: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norms}
        if self.norm_before_fc:
            found["fc_norm.weight"] = (len(self.taps) * hidden,)
        if self.own_embedding:
            found["embedding"] = config.vocab_size, hidden
        return found

    def cuts(self, config: DecoderConfig, local: Self, share: Share) -> dict[str, Cut]:
        """The cuts of attention; the other maps are whole in every share."""
        whole = {"fc": config.hidden_size, "head": self.vocabulary}
        runs = {path: Cut(outputs=(Run(0, size, size),)) for path, size in whole.items()}
        return super().cuts(config, local, share) | runs


def with_eagle(
    config: DecoderConfig, head: DecoderConfig, taps: tuple[int, ...], **fields: Any
) -> DecoderConfig:
    """The configuration with the layer of an EAGLE-3 head after the others.

    head: of the head alone, as that of a Llama with one layer. taps, fields: of EagleSpec.

    Raises ConfigError, which names the key, for a head that doesn't fit the model.
    """
    for key in ("hidden_size", "vocab_size"):
        own, other = getattr(head, key), getattr(config, key)
        if own != other:
            raise ConfigError(f"{key} is {own}: expected {other}, as in the model")
    if config.depth < config.num_layers:
        raise ConfigError("the model has a head already: load it without mtp=True")
    if config.offset_norms or config.centered_norms or any(it.streams for it in config.layers):
        raise ConfigError("the model's norms or residual streams are of a kind that no head has")
    if config.scaling_by_length or head.scaling_by_length:
        raise ConfigError("rope_scaling depends on the length of a text: not implemented")
    [layer] = head.layers
    plain = GroupedQuerySpec()
    if layer.attention != plain or not isinstance(layer.mlp, GatedMLPSpec) or layer.mlp.bias:
        raise ConfigError("attention_bias, mlp_bias or a sliding window is set: expected none")
    if not taps or list(taps) != sorted({*taps}) or not 0 <= taps[0] <= taps[-1] <= config.depth:
        raise ConfigError(
            f"the layers whose inputs the head reads are {list(taps)}: expected rising numbers "
            f"from 0 to {config.depth}, the model's number of layers"
        )
    rope = "draft"
    if (head.rope_theta, head.rope_scaling) == (config.rope_theta, config.rope_scaling):
        rope = "global" if config.rotary_dim is None and config.head_dim == head.head_dim else rope
    attention = PairSpec(
        rope=rope,
        heads=head.num_heads,
        kv_heads=head.num_kv_heads,
        head_dim=head.head_dim,
        theta=head.rope_theta,
        scaling=head.rope_scaling,
    )
    spec = EagleSpec(attention, taps, norm_eps=head.rms_norm_eps, **fields)
    return dataclasses.replace(config, layers=(*config.layers, LayerSpec(spec, layer.mlp)))


def with_usual_eagle(config: DecoderConfig, vocabulary: int, taps: Any = None) -> DecoderConfig:
    """The configuration with a head of the model's own sizes, without a rotary scaling.

    vocabulary: of the head. taps: as for `with_eagle`; None for the usual ones.
    """
    head = dataclasses.replace(
        config,
        layers=llama_layers((None,), config.intermediate_size),
        rotary_dim=None,
        rope_scaling=None,
        tie_word_embeddings=False,
        packed_tables=(),
    )
    taps = usual_taps(config.depth) if taps is None else tuple(taps)
    return with_eagle(config, head, taps, vocabulary=vocabulary)


def usual_taps(depth: int) -> tuple[int, ...]:
    """The layers that a head reads if its files name none: near both ends, and in the middle.

    With fewer than 7 layers, these are layers at one and two thirds, and the stream after the last.
    """
    if depth < 7:
        return tuple(sorted({depth // 3, 2 * depth // 3, depth}))
    return 2, depth // 2, depth - 3


def tokens_place(config: DecoderConfig) -> ArrayPlace:
    """The place of the token ids of the head's vocabulary, which are not a tensor of the files."""
    spec = config.layers[-1].attention
    assert isinstance(spec, EagleSpec)
    return ArrayPlace(f"layers.{config.depth}.attention.tokens", TOKENS, (spec.vocabulary,))


class Eagle(DraftMixer):
    """The mixer of an EAGLE-3 layer, and the head around the layer.

    tokens: int32 [vocabulary], the token ids of the columns of `head`.
    """

    def __init__(self, config: DecoderConfig, spec: EagleSpec, rngs: nnx.Rngs):
        super().__init__(config, spec, rngs)
        norm = functools.partial(RMSNorm.of, config, config.hidden_size, spec.norm_eps)
        maps: Mapping[str, LinearMaps] = {it.path: it for it in spec.linear_maps(config)}
        create = functools.partial(Linear.create, bias=False, dtype=config.dtype, rngs=rngs)
        self.fc = create(maps["fc"].shapes[0])
        self.head = create(maps["head"].shapes[0])
        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        wide = RMSNorm.of(config, len(spec.taps) * config.hidden_size, spec.norm_eps)
        self.fc_norm = wide if spec.norm_before_fc else None
        self.embedding = nnx.data(None)
        if spec.own_embedding:
            shape = config.vocab_size, config.hidden_size
            self.embedding = tables.create(False, shape, config.dtype, rngs)
        self.tokens = nnx.Param(jnp.arange(spec.vocabulary, dtype=jnp.int32))
        self.taps, self.norm_output, self.dtype = spec.taps, spec.norm_output, config.dtype
        self.norm_before_residual = spec.norm_before_residual

    def features(self, hidden: jax.Array, seen: list[jax.Array]) -> jax.Array:
        """The map `fc` of the streams."""
        found = jnp.concatenate(seen, -1)
        return self.fc(found if self.fc_norm is None else self.fc_norm(found))

    def embedding_of(self, tokens: jax.Array) -> jax.Array | None:
        """Rows of the head's own embedding, if it has one."""
        if self.embedding is None:
            return None
        table: tables.Table = self.embedding
        return tables.look_up(table, tokens, self.dtype)

    def run(
        self,
        layer: DecoderLayer,
        pair: tuple[jax.Array, jax.Array],
        context: StepContext,
        state: Any,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Attention to both normed vectors, and the MLP; see DraftMixer."""
        embedded, hidden = pair
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], -1)
        both = jnp.where(has_hidden(context, embedded.shape[:-1]), both, jnp.zeros_like(both))
        stream = normed if self.norm_before_residual else hidden
        return layer.after_norm(both, stream, context, state)

    def finish(self, terms: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The normed stream after the layer, and that stream; with norm_output the first twice."""
        stream, normed = self.norm.add(terms, residual, None)
        assert isinstance(normed, jax.Array)
        return normed, normed if self.norm_output else stream

    def logits(self, model: Any, hidden: jax.Array, context: StepContext) -> jax.Array:
        """The head's own table, for the tokens of its vocabulary."""
        own = tables.logits(self.head, hidden)
        found: jax.Array = model.vocabulary.spread(own, self.tokens.get_value())
        return found
