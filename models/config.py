"""The configuration of a decoder: its sizes, and a spec for each of its layers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from flax import nnx

from mpjax.kernels.checks import as_dtype, shown
from mpjax.kernels.rowwise.hadamard import expected_block
from mpjax.models.share import Cut, Share


class ConfigError(ValueError):
    """A configuration that no class here can build; the message names the key."""


# Kinds of rotary scaling that depend on how many tokens a sequence has.
SCALINGS_BY_LENGTH = ("longrope", "dynamic")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts than were trained.

    kind: `linear` divides every frequency by `factor`; `llama3` (Llama 3.1 and later) divides the
    low ones, keeps the high ones, and blends between the two wavelengths
    original_context / low_frequency_factor and original_context / high_frequency_factor; `yarn`
    blends between the channels that turn `fast_turns` and `slow_turns` times within the original
    context, which are rounded outwards with `whole_channels`; `longrope` divides each frequency by
    its number in short_factors, or in long_factors if the rotary length is above original_context;
    `dynamic` raises theta with the rotary length.

    The rotary length of a token is a number of its own sequence's tokens: those up to it, or those
    of the prompt if they are more, since a prompt is rotated as a whole. LongRoPE has the same
    factors for all tokens of a sequence, so a sequence that passes original_context is read again
    with the long factors, while `dynamic` leaves keys in the cache as they are.

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

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):  # tuples: a list has no hash
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ConfigError(f"RopeScaling: {name} is {shown(value)}: expected a list")
            object.__setattr__(self, name, tuple(value))

    @property
    def rereads_after(self) -> int | None:
        """The most tokens in the cache of a sequence before it is read again; None: never."""
        return self.original_context if self.kind == "longrope" else None

    def rotary_length(self, prompt: int, tokens: int) -> int:
        """The rotary length with which a sequence is read from its first token on.

        Sequences have the same one where their tokens have the same frequencies: 0 within the
        original context. prompt: tokens of the prompt. tokens: those, and new ones read with them.
        """
        length = prompt if self.rereads_after is None else tokens
        if length <= self.original_context:
            return 0
        return length if self.rereads_after is None else self.original_context + 1


class LinearMaps(NamedTuple):
    """Linear maps of one input, which a layer computes as one product where it can.

    path: the attribute of the layer's attention or MLP that holds the Linear or FusedLinear, such
        as `gate_up`.
    shapes: (input channels, output channels) of each map. bias: whether all maps have biases.
    experts: the number of experts, each of which has such maps; None for maps of the layer itself.
    is_alternating: whether the outputs of an expert's map alternate between gate and up in files,
        and come one after the other in the module. is_transposed: whether files hold 16-bit weights
        as [input, output channels] (gpt-oss).
    """

    path: str
    shapes: tuple[tuple[int, int], ...]
    bias: bool = False
    experts: int | None = None
    is_alternating: bool = False
    is_transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Fold:
    """A place where scales of channels can move from one parameter to the linear map behind it.

    Dividing the outputs of the source by scales, and multiplying the rows of the target by them,
    leaves a layer's outputs as they are, if all that lies between is linear in each channel. So
    does another order of channels, where all that lies between treats each channel alike.

    target: the path of the linear map whose rows are multiplied, such as `attention.qkv`.
    source: the path of the norm or the linear map whose outputs are divided. If it is a stack of
        experts' maps, as the target then is, each expert has scales of its own.
    part: which outputs of a source that is several maps joined; None for all.
    repeats: (heads, copies, channels) where the target reads each head of the source several times,
        as query heads that share values do; None where it reads each channel once.
    is_mixable: whether the channels of a head, which `repeats` gives, may also be multiplied by a
        matrix that the target's rows undo: all that lies between treats them alike.
    is_elementwise: whether each channel that the target reads depends on that channel of every part
        of the source, and on no other, so that channels can be put in another order.
    is_linear: whether scales can move; False where all that can change is the order of channels.
    others: the paths of all others that read the source's outputs and are multiplied, too: linear
        maps, and arrays [outputs, channels] such as a router.
    """

    target: str
    source: str
    part: int | None = None
    repeats: tuple[int, int, int] | None = None
    is_mixable: bool = False
    is_elementwise: bool = False
    is_linear: bool = True
    others: tuple[str, ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """The paths of all that reads the source's outputs, the target first."""
        return (self.target, *self.others)

    def below(self, parent: str) -> Fold:
        """The fold with paths that begin at the parent of the module that they began at."""
        source, target, *others = (
            f"{parent}.{path}" for path in (self.source, self.target, *self.others)
        )
        return dataclasses.replace(self, source=source, target=target, others=tuple(others))


@dataclasses.dataclass(frozen=True)
class SublayerSpec(abc.ABC):
    """Base class of AttentionSpec and MLPSpec, the specs of a layer's two halves; hashable.

    A subclass is a frozen dataclass whose fields are numbers, booleans and strings, so that a saved
    model can hold them in JSON; config_checks checks them by their types.

    kind: the name of the subclass in a saved model's mpjax.json.
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        _make_plain(self)

    @abc.abstractmethod
    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Any:
        """The module that this spec describes, with random weights."""

    @abc.abstractmethod
    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """Linear maps of the module, in the order of the computation."""

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the module's other parameters, which are never quantised, by path."""
        return {}

    def readers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of all that reads the module's input, a linear map first.

        They are linear maps, and arrays [outputs, channels]. A module that reads its input in any
        other way has none, and its norm takes part in no fold.
        """
        return (self.linear_maps(config)[0].path,)

    def writers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of the linear maps whose outputs are the module's, or are added up to it."""
        return (self.linear_maps(config)[-1].path,)

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The places inside of the module where scales of channels can move; see Fold."""
        return ()

    def why_unsound(self) -> str | None:
        """The reason why the fields don't fit together, or None if they do."""
        return None

    def divide(self, count: int, units: Mapping[str, int]) -> Self:
        """The spec of one of `count` devices' shares of the module.

        units: by the path of a linear map, the number of input channels at multiples of which its
        format is cut. Raises ValueError for a module that can't be divided.
        """
        raise ValueError(
            f"{self.kind} layers can't be divided among devices: load the model on one device"
        )

    def cuts(self, config: DecoderConfig, local: Self, share: Share) -> dict[str, Cut]:
        """The channels of a share, by the paths of linear maps and of other arrays.

        config: of the whole decoder. local: what `divide` returned. Each share has the
        whole of an array without a cut.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class AttentionSpec(SublayerSpec):
    """Base class of attention specs.

    window: how many keys a query attends to, its own included (sliding window); None: all.
    rope: the rotary embedding: `global`, by the configuration's theta and scaling; `local`, by its
        local theta and scaling (Gemma 3); `none` (SmolLM3).
    """

    window: int | None = None
    rope: str = dataclasses.field(default="global", kw_only=True)


@dataclasses.dataclass(frozen=True)
class MLPSpec(SublayerSpec):
    """Base class of MLP specs.

    intermediate_size: channels of the hidden layer inside the MLP.
    hadamard: the channels of each block that Hadamard's transform mixes before down projections,
        which are made for that (QuaRot's R4); None: no transform. See `mpjax.kernels.hadamard`.
    """

    intermediate_size: int
    hadamard: int | None = dataclasses.field(default=None, kw_only=True)

    def mixers(self) -> dict[str, int]:
        """The channels that a transform can mix before each `down`.

        The keys are paths, in the module, of the modules that have the map `down` and the attribute
        `hadamard`, "" for itself. A kind of MLP without a place for the transform has none.
        """
        return {}

    def why_unmixable(self) -> str | None:
        """The reason why `hadamard` is no block of the channels, or None if it is one."""
        if self.hadamard is None:
            return None
        for channels in self.mixers().values():
            if expected := expected_block(self.hadamard, channels):
                return f"hadamard is {self.hadamard}: {expected}"
        return None if self.mixers() else "hadamard is set, and the MLP has no place for it"

    def spread(self, count: int, units: Mapping[str, int]) -> MLPSpec:
        """The spec of one of `count` shares that have whole experts, if the module has any.

        Arguments and errors are as for `divide`.
        """
        return self.divide(count, units)

    def working_bytes(self, config: DecoderConfig, tokens: int) -> int:
        """Bytes of tokens' arrays inside the module, at most: gate, up, and their product."""
        return tokens * 3 * self.intermediate_size * as_dtype("dtype", config.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The specs of one layer's attention and MLP. Layers of a decoder may differ.

    norms: where the two halves have norms: `pre`, before each; `post`, after each and before its
    output is added to the residual stream (OLMo 2); or `both` (Gemma 2).
    """

    attention: AttentionSpec
    mlp: MLPSpec
    norms: str = "pre"

    @property
    def has_pre_norms(self) -> bool:
        """Whether there are norms before the halves."""
        return self.norms != "post"

    @property
    def has_post_norms(self) -> bool:
        """Whether there are norms after the halves."""
        return self.norms != "pre"

    def linear_paths(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of all linear maps in the layer, in the order of the computation."""
        return tuple(
            f"{half}.{maps.path}"
            for half, spec in (("attention", self.attention), ("mlp", self.mlp))
            for maps in spec.linear_maps(config)
        )

    def writers(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of the linear maps whose outputs are added to the residual stream."""
        return tuple(
            f"{half}.{path}"
            for half, spec in (("attention", self.attention), ("mlp", self.mlp))
            for path in spec.writers(config)
        )

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The folds of the layer, in the order of the computation.

        All that reads a norm before a half has a fold with it.
        """
        found = []
        for half, spec in (("attention", self.attention), ("mlp", self.mlp)):
            readers = [f"{half}.{path}" for path in spec.readers(config)]
            if readers and self.has_pre_norms:
                found.append(Fold(readers[0], f"{half}_norm", others=tuple(readers[1:])))
            found += [fold.below(half) for fold in spec.folds(config)]
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that a decoder's computation depends on besides its weights; static, hashable.

    num_heads, num_kv_heads, head_dim: the same in all layers, since a cache has one shape.
    layers: a spec for each layer.
    max_position_embeddings: the most tokens that a sequence may have. It only limits lengths; no
        parameter's shape depends on it.
    rotary_dim: the first channels of a head, which are rotated; None: all.
    local_rope_theta, local_rope_scaling: of the layers whose rope is `local`.
    offset_norms: whether files hold the weights of norms minus 1 (Gemma).
    embedding_scale, logit_scale: factors of the embedded tokens and of the logits; None: 1.
    logit_softcap: a logit l becomes softcap · tanh(l / softcap) (Gemma 2); None: no cap.
    dtype: of parameters and activations: bfloat16, float16 or float32, or a short name (`bf16`).
    packed_tables: those of `embedding` and `head` that are linear maps with a packed kernel
        [hidden size, vocabulary], instead of arrays [vocabulary, hidden size]. A tied table is
        `embedding`.
    stop_ids: token ids that end a text; the model itself does not use them.
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

    def __post_init__(self) -> None:
        _make_plain(self)
        try:
            object.__setattr__(self, "dtype", as_dtype("DecoderConfig: dtype", self.dtype).name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("layers", "stop_ids", "packed_tables"):  # tuples: a list has no hash
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
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, in keys; None for a layer that attends to all keys."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def scaling_by_length(self) -> RopeScaling | None:
        """The rotary scaling that depends on how many tokens a sequence has; None without one.

        Where layers of two kinds have one each, both change at the same length.
        """
        for scaling in (self.rope_scaling, self.local_rope_scaling):
            if scaling is None or scaling.kind not in SCALINGS_BY_LENGTH:
                continue
            if self.max_position_embeddings > scaling.original_context:
                return scaling
        return None

    @property
    def rereads_after(self) -> int | None:
        """See RopeScaling; None also where no sequence gets so long."""
        scaling = self.scaling_by_length
        return None if scaling is None else scaling.rereads_after

    @property
    def hadamard_blocks(self) -> tuple[int | None, ...]:
        """Channels of each block that layers mix before their down projections; None for none."""
        return tuple(layer.mlp.hadamard for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """The largest intermediate_size of the layers' MLPs."""
        return max(layer.mlp.intermediate_size for layer in self.layers)


def _make_plain(config: DecoderConfig | SublayerSpec) -> None:
    """Replaces NumPy scalars in fields by Python numbers, which JSON can hold."""
    for field in dataclasses.fields(config):
        if isinstance(value := getattr(config, field.name), np.generic):
            object.__setattr__(config, field.name, value.item())
