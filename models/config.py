"""The configuration of a decoder: its sizes, and a spec for each of its layers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from flax import nnx

from mpjax.kernels.checks import as_dtype, shown
from mpjax.kernels.rowwise.hadamard import expected_block
from mpjax.models.maps import Fold, LinearMaps
from mpjax.models.plain_fields import make_plain
from mpjax.models.share import Cut, Share
from mpjax.models.state import SequenceState, StateSpec


class ConfigError(ValueError):
    """A configuration from which no decoder can be built; the message names the key."""


HALVES = ("attention", "streams", "mlp", "per_layer")  # the sublayers of a layer
# Kinds of rotary scaling that depend on the length of a sequence.
SCALINGS_BY_LENGTH = ("longrope", "dynamic")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts than the model was trained with.

    kind: `linear` divides every frequency by `factor`; `llama3` (Llama 3.1 and later) divides the
    low ones, keeps the high ones, and blends between the two wavelengths
    original_context / low_frequency_factor and original_context / high_frequency_factor; `yarn`
    blends between the channels that turn `fast_turns` and `slow_turns` times within the original
    context, which are rounded outwards with `whole_channels`; `longrope` divides each frequency by
    its factor in short_factors, or in long_factors if the rotary length is above original_context;
    `dynamic` raises theta with the rotary length; `proportional` divides every frequency by
    `factor`, and only the first `rotated_share` of a head's pairs turn (Gemma 4).

    The rotary length of a token is the number of tokens in its sequence up to it, or the length of
    the prompt if that is more, since a prompt is rotated as a whole. LongRoPE has the same factors
    for all tokens of a sequence, so a sequence that passes original_context is prefilled again with
    the long factors, while `dynamic` leaves keys in the cache as they are.

    attention_factor: the factor of rotated queries and keys (YaRN's and LongRoPE's).
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192
    attention_factor: float = 1.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    whole_channels: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):  # tuples are hashable
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ConfigError(f"RopeScaling: {name} is {shown(value)}: expected a list")
            object.__setattr__(self, name, tuple(value))

    @property
    def rereads_after(self) -> int | None:
        """The most cached tokens of a sequence before it must be prefilled again; None: never."""
        return self.original_context if self.kind == "longrope" else None

    def rotary_length(self, prompt: int, tokens: int) -> int:
        """The rotary length with which a sequence is prefilled from its first token on.

        It is equal for sequences with equal frequencies: 0 within the original context, and with
        LongRoPE original_context + 1 beyond. prompt: tokens of the prompt. tokens: of the prompt
        and of generated tokens that are prefilled with it.
        """
        length = prompt if self.rereads_after is None else tokens
        if length <= self.original_context:
            return 0
        return length if self.rereads_after is None else self.original_context + 1


@dataclasses.dataclass(frozen=True)
class SublayerSpec(abc.ABC):
    """Base class of MixerSpec and MLPSpec, the specs of a layer's two sublayers; hashable.

    A subclass is a frozen dataclass whose fields are numbers, booleans, strings, tuples of
    numbers and specs, so that a saved model can hold them in JSON; config_checks checks them by
    their types.

    kind: the name of the subclass in a saved model's mpjax.json.
    """

    kind: ClassVar[str]

    @property
    def reads_stream(self) -> bool:
        """Whether the module gets the residual stream itself instead of the layer's norm of it."""
        return False

    def __post_init__(self) -> None:
        make_plain(self)

    @abc.abstractmethod
    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Any:
        """The module that this spec describes, with random weights."""

    @abc.abstractmethod
    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """The module's linear maps, in the order of computation."""

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of all other parameters of the module, by path; they are never quantised."""
        return {}

    def wide_arrays(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of the `arrays` that are float32, whatever dtype the model has."""
        return ()

    def readers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of all parameters that multiply the module's input, a linear map first.

        They are linear maps, and arrays [outputs, channels]. A module that uses its input in any
        other way returns none, and the norm before it takes part in no fold.
        """
        return (self.linear_maps(config)[0].path,)

    def writers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of the linear maps whose outputs add up to the module's output."""
        return (self.linear_maps(config)[-1].path,)

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The folds inside the module: between which parameters scales can move; see Fold."""
        return ()

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes of the arrays inside the module for `tokens` tokens; 0 if negligible."""
        return 0

    def why_unsound(self) -> str | None:
        """The reason why the fields don't fit together, or None if they do."""
        return None

    def divide(self, count: int, units: Mapping[str, int]) -> Self:
        """The spec of the module's share on one of `count` devices.

        units: by the path of a linear map, the number of input channels by which its format can be
        divided. Raises ValueError for a module that can't be divided.
        """
        raise ValueError(
            f"{self.kind} layers can't be divided among devices: load the model on one device"
        )

    def cuts(self, config: DecoderConfig, local: Self, share: Share) -> dict[str, Cut]:
        """The channels of one share, by the paths of linear maps and other arrays.

        config: of the whole decoder. local: the result of `divide`. An array without a cut is whole
        in every share.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class MixerSpec(SublayerSpec):
    """Base class of the specs of mixers: attention and recurrent layers.

    drafts: whether the layer only proposes tokens. Such a layer comes after all others, and
        no pass over a text runs it; see `Drafts`.
    """

    drafts: ClassVar[bool] = False

    @abc.abstractmethod
    def state(self, config: DecoderConfig) -> StateSpec:
        """The kind and size of the module's state; see StateSpec."""

    @property
    def ropes(self) -> tuple[str, ...]:
        """The kinds of rotary embedding that the module uses."""
        return ()

    def rotary_channels(self, config: DecoderConfig) -> int:
        """The number of channels of a head; a rotary embedding has half as many angles."""
        return config.head_dim


@dataclasses.dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Base class of attention specs.

    window: how many keys a query attends to, its own included (sliding window); None: all.
    rope: the rotary embedding: `global`, by the configuration's theta and scaling; `local`, by its
        local theta and scaling (Gemma 3); `none` (SmolLM3).
    """

    window: int | None = None
    rope: str = dataclasses.field(default="global", kw_only=True)

    @property
    def ropes(self) -> tuple[str, ...]:
        """See MixerSpec."""
        return (self.rope,)


@dataclasses.dataclass(frozen=True)
class MLPSpec(SublayerSpec):
    """Base class of MLP specs.

    intermediate_size: channels of the hidden layer inside the MLP.
    hadamard: block size of the online Hadamard transform before the down projection, whose weight
        contains the inverse (QuaRot's R4); None: no transform. See `mpjax.kernels.hadamard`.
    """

    intermediate_size: int
    hadamard: int | None = dataclasses.field(default=None, kw_only=True)

    def mixers(self) -> dict[str, int]:
        """The number of channels that a Hadamard transform can mix before each `down`.

        The keys are the paths of the submodules with a map `down` and the attribute `hadamard`; ""
        is the module itself. Empty for an MLP that supports no transform.
        """
        return {}

    def why_unmixable(self) -> str | None:
        """The reason why `hadamard` is no valid block size for the channels, or None if it is."""
        if self.hadamard is None:
            return None
        for channels in self.mixers().values():
            if expected := expected_block(self.hadamard, channels):
                return f"hadamard is {self.hadamard}: {expected}"
        return None if self.mixers() else "hadamard is set, and the MLP has no place for it"

    def spread(self, count: int, units: Mapping[str, int]) -> MLPSpec:
        """The spec of one of `count` shares with whole experts (expert-parallel), if there are any.

        Arguments and errors are as for `divide`.
        """
        return self.divide(count, units)

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Peak bytes of the arrays inside the module: gate, up, and their product."""
        return tokens * 3 * self.intermediate_size * as_dtype("dtype", config.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The specs of one layer's mixer and MLP. Layers of a decoder may differ.

    attention: the mixer, which is attention in most layers. mlp: the MLP. Either may be None
        (Nemotron-H).
    norms: where the norms are: `pre`, before each sublayer; `post`, after each sublayer and before
        its output is added to the residual stream (OLMo 2); `both` (Gemma 2); or `shared`, one norm
        before two parallel sublayers (Cohere).
    scaled: whether the residual stream is multiplied by a learned number after the layer (Gemma 4).
    per_layer: a third sublayer, of per-layer embeddings (PerLayerSpec), or None.
    streams: the layer's part in several residual streams (StreamsSpec); None for a single stream.
    """

    attention: MixerSpec | None
    mlp: MLPSpec | None
    norms: str = "pre"
    scaled: bool = False
    per_layer: SublayerSpec | None = None
    streams: SublayerSpec | None = None

    @property
    def halves(self) -> dict[str, SublayerSpec]:
        """The specs of the layer's sublayers, by their names in HALVES."""
        return {half: spec for half in HALVES if (spec := getattr(self, half)) is not None}

    @property
    def has_post_norms(self) -> bool:
        """Whether there are norms after the sublayers."""
        return self.norms in ("post", "both")

    @property
    def pre_norms(self) -> dict[str, str]:
        """The name of the norm before each sublayer, for sublayers that have one."""
        if self.norms == "post":
            return {}
        shared = self.norms == "shared"
        return {
            half: "attention_norm" if shared else f"{half}_norm"
            for half, spec in self.halves.items()
            if not spec.reads_stream
        }

    def linear_paths(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of all linear maps in the layer, in the order of computation."""
        return tuple(
            f"{half}.{maps.path}"
            for half, spec in self.halves.items()
            for maps in spec.linear_maps(config)
        )

    def writers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of the linear maps whose outputs are added to the residual stream."""
        return tuple(
            f"{half}.{path}" for half, spec in self.halves.items() for path in spec.writers(config)
        )

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The folds of the layer, in the order of computation.

        Each pre-norm forms one fold with everything that reads it (linear maps, and arrays
        [outputs, channels]). A norm with any other reader has no fold.
        """
        found, read = [], {half: spec.readers(config) for half, spec in self.halves.items()}
        for half, spec in self.halves.items():
            norm = self.pre_norms.get(half)
            if norm == f"{half}_norm" and not (self.streams and half == "attention"):
                alike = [each for each, name in self.pre_norms.items() if name == norm]
                readers = [f"{each}.{path}" for each in alike for path in read[each]]
                if all(read[each] for each in alike):
                    found.append(Fold(readers[0], norm, others=tuple(readers[1:])))
            found += [fold.below(half) for fold in spec.folds(config)]
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that a decoder's computation depends on besides its weights; static, hashable.

    num_heads, num_kv_heads, head_dim: of all layers whose mixers have no numbers of their own.
    layers: a spec for each layer.
    max_position_embeddings: the most tokens that a sequence may have. It only limits lengths; no
        parameter's shape depends on it.
    rotary_dim: the number of rotated channels at the start of each head (partial RoPE); None: all.
    local_rope_theta, local_rope_scaling: of the layers whose rope is `local`.
    offset_norms: whether files store the weights of norms minus 1 (Gemma).
    predicts: whether the model has logits of the vocabulary. Classifiers and models without a head
        have none; they count as tied, so that there is no table `head`.
    labels: the number of scores of a classifier, a linear map of the last token's hidden state;
        None for other models.
    centered_norms: whether norms subtract the mean of the channels (LayerNorm). norm_bias: whether
        LayerNorm has a bias.
    embedding_scale, logit_scale: factors of the embedded tokens and of the logits; None: 1.
    embedding_norm: whether embedded tokens are normalised, without weights (Muse Glimmer).
    post_norm_eps: the epsilon of the norms after sublayers; None for rms_norm_eps.
    head_bias: whether the logits have a bias, which is added before their factor (PhiMoE).
    logit_softcap: a logit l becomes softcap · tanh(l / softcap) (Gemma 2); None: no cap.
    dtype: of parameters and activations: bfloat16, float16 or float32, or a short name (`bf16`).
    packed_tables: the names of the tables, `embedding` or `head`, that are linear maps with a
        packed kernel [hidden size, vocabulary] instead of arrays [vocabulary, hidden size]. A tied
        table is `embedding`.
    stop_ids: token ids that end a text; the model itself does not use them.
    per_layer_vocab: the rows of the table of per-layer embeddings; None: the vocabulary's.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    stop_ids: tuple[int, ...] = ()
    packed_tables: tuple[str, ...] = ()
    rotary_dim: int | None = None
    local_rope_theta: float | None = None
    offset_norms: bool = False
    embedding_scale: float | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    local_rope_scaling: RopeScaling | None = None
    centered_norms: bool = False
    norm_bias: bool = False
    predicts: bool = True
    labels: int | None = None
    head_bias: bool = False
    per_layer_vocab: int | None = None
    embedding_norm: bool = False
    post_norm_eps: float | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        try:
            object.__setattr__(self, "dtype", as_dtype("DecoderConfig: dtype", self.dtype).name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("layers", "stop_ids", "packed_tables"):  # tuples are hashable
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ConfigError(f"DecoderConfig: {name} is {shown(value)}: expected a list")
            object.__setattr__(self, name, tuple(value))

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of the model: `embedding`, and `head` unless it is tied to the embedding."""
        return ("embedding",) if self.tie_word_embeddings else ("embedding", "head")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, including a layer that drafts."""
        return len(self.layers)

    @property
    def depth(self) -> int:
        """Number of layers that compute the hidden states: all but a layer that drafts."""
        return sum(not (it.attention and it.attention.drafts) for it in self.layers)

    def without_drafts(self) -> DecoderConfig:
        """The configuration without a layer that drafts."""
        return dataclasses.replace(self, layers=self.layers[: self.depth])

    @property
    def sources(self) -> tuple[int | None, ...]:
        """The layer whose keys and values each layer reads; None for layers with their own."""
        back = [getattr(layer.attention, "reads_back", None) for layer in self.layers]
        return tuple(None if each is None else i - each for i, each in enumerate(back))

    def in_all_layers(self, half: str) -> Any:
        """The spec that all layers have as `per_layer`, or as `streams`; None without."""
        return getattr(self.layers[0], half) if self.layers else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, in keys; None for a layer that attends to all keys."""
        return tuple(state.window for state in self.states)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The kind and size of each layer's state."""
        return tuple(
            SequenceState(()) if layer.attention is None else layer.attention.state(self)
            for layer in self.layers
        )

    @property
    def keeps_sequences(self) -> bool:
        """Whether any layer's state has a fixed size for each sequence; see StateSpec."""
        return any(state.keeps_sequences for state in self.states)

    @property
    def page_groups(self) -> tuple[int | None, ...]:
        """The sliding window of each group of paged layers; layers with equal windows form a group.

        None is the group of layers that attend to all tokens. A group shares block tables.
        """
        return tuple(dict.fromkeys(state.window for state in self.states if state.is_paged))

    @property
    def groups(self) -> tuple[int | None, ...]:
        """The index of each layer's group in page_groups; None for layers without pages."""
        places = {window: place for place, window in enumerate(self.page_groups)}
        return tuple(places[it.window] if it.is_paged else None for it in self.states)

    @property
    def ropes(self) -> tuple[str, ...]:
        """The kinds of rotary embedding that the layers have."""
        mixers = (layer.attention for layer in self.layers if layer.attention)
        return tuple(dict.fromkeys(rope for mixer in mixers for rope in mixer.ropes))

    def head_dim_of(self, rope: str) -> int:
        """The channels of a head in the layers with this kind of rotary embedding."""
        mixers = (layer.attention for layer in self.layers)
        sizes = (it.rotary_channels(self) for it in mixers if it and rope in it.ropes)
        return next(sizes, self.head_dim)

    @property
    def scaling_by_length(self) -> RopeScaling | None:
        """The rotary scaling that depends on the length of a sequence; None without one.

        If global and local layers both have one, both change at the same length.
        """
        for scaling in (self.rope_scaling, self.local_rope_scaling):
            if scaling is None or scaling.kind not in SCALINGS_BY_LENGTH:
                continue
            if self.max_position_embeddings > scaling.original_context:
                return scaling
        return None

    @property
    def rereads_after(self) -> int | None:
        """See RopeScaling; None also if no sequence can get that long."""
        scaling = self.scaling_by_length
        return None if scaling is None else scaling.rereads_after

    @property
    def hadamard_blocks(self) -> tuple[int | None, ...]:
        """Block size of each layer's Hadamard transform before down projections; None: without."""
        return tuple(None if layer.mlp is None else layer.mlp.hadamard for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """The largest intermediate_size of the layers' MLPs."""
        return max((layer.mlp.intermediate_size for layer in self.layers if layer.mlp), default=0)
