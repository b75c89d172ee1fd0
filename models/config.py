"""The shape of a decoder: its sizes, and what each of its layers is."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax import nnx

from mpjax.kernels.checks import as_dtype, shown


class ConfigError(ValueError):
    """A configuration that no class here can build; the message names the key."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts than were trained.

    kind: `linear` divides every frequency by `factor`; `llama3` (Llama 3.1 and later) divides the
    low ones, keeps the high ones, and blends between the two wavelengths
    original_context / low_frequency_factor and original_context / high_frequency_factor.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


class LinearMaps(NamedTuple):
    """Linear maps of one input, which a layer computes as one product where it can.

    path: of the Linear or FusedLinear in the half of a layer, such as `gate_up`.
    shapes: [input, output channels] of each map. bias: whether each has one.
    """

    path: str
    shapes: tuple[tuple[int, int], ...]
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class Fold:
    """A place where scales of channels can move from one parameter to the linear map behind it.

    Dividing the outputs of the source by scales, and multiplying the rows of the target by them,
    leaves a layer's outputs as they are, if all that lies between is linear in each channel.

    target: the path of the linear map whose rows are multiplied, such as `attention.qkv`. It is
        all that reads the source's outputs.
    source: the path of the norm or the linear map whose outputs are divided.
    part: which outputs of a source that is several maps joined; None for all.
    repeats: (heads, copies, channels) where the target reads each head of the source several times,
        as query heads that share values do; None where it reads each channel once.
    """

    target: str
    source: str
    part: int | None = None
    repeats: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True)
class SublayerSpec(abc.ABC):
    """What one half of a layer is, an attention or an MLP: static, hashable.

    A subclass is a frozen dataclass whose fields are numbers, switches and texts, so that a saved
    model can say them in JSON; config_checks checks them by their types.

    kind: what a saved model calls the subclass.
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        _make_plain(self)

    @abc.abstractmethod
    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> Any:
        """The module, with random weights."""

    @abc.abstractmethod
    def linear_maps(self, config: DecoderConfig) -> tuple[LinearMaps, ...]:
        """All linear maps of the module, in the order of the computation."""

    def arrays(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of all other parameters, which are never quantised, by their paths."""
        return {}

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The places inside of the module where scales of channels can move; see Fold."""
        return ()


@dataclasses.dataclass(frozen=True)
class AttentionSpec(SublayerSpec):
    """What a layer's attention is. window: keys that a query sees, itself included (None: all)."""

    window: int | None = None


@dataclasses.dataclass(frozen=True)
class MLPSpec(SublayerSpec):
    """What a layer's MLP is. intermediate_size: channels between its maps, of each token."""

    intermediate_size: int


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer is; layers may differ."""

    attention: AttentionSpec
    mlp: MLPSpec

    def linear_paths(self, config: DecoderConfig) -> tuple[str, ...]:
        """The paths of all linear maps in the layer, in the order of the computation."""
        return tuple(
            f"{half}.{maps.path}"
            for half, spec in (("attention", self.attention), ("mlp", self.mlp))
            for maps in spec.linear_maps(config)
        )

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """The folds of the layer, in the order of the computation.

        The first linear maps of each half are all that reads the norm before it.
        """
        found = []
        for half, spec in (("attention", self.attention), ("mlp", self.mlp)):
            found.append(Fold(f"{half}.{spec.linear_maps(config)[0].path}", f"{half}_norm"))
            found += [
                dataclasses.replace(
                    fold, target=f"{half}.{fold.target}", source=f"{half}.{fold.source}"
                )
                for fold in spec.folds(config)
            ]
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that a decoder's computation depends on besides its weights; static, hashable.

    num_heads, num_kv_heads, head_dim: the same in all layers, since a cache has one shape.
    layers: what each layer is.
    dtype: what the model computes in, also as a short name such as `bf16`.
    max_position_embeddings: tokens that a sequence may have, a limit that nothing else depends on.
    stop_ids: tokens that end a text; not used by the model itself.
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

    def __post_init__(self) -> None:
        _make_plain(self)
        try:
            object.__setattr__(self, "dtype", as_dtype("DecoderConfig: dtype", self.dtype).name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("layers", "stop_ids"):  # of a list, the configuration would have no hash
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ConfigError(f"DecoderConfig: {name} is {shown(value)}: expected a list")
            object.__setattr__(self, name, tuple(value))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer's attention."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def intermediate_size(self) -> int:
        """The largest of the layers' MLPs."""
        return max(layer.mlp.intermediate_size for layer in self.layers)


def _make_plain(config: DecoderConfig | SublayerSpec) -> None:
    """Makes Python numbers of NumPy's: a saved model says them in JSON."""
    for field in dataclasses.fields(config):
        if isinstance(value := getattr(config, field.name), np.generic):
            object.__setattr__(config, field.name, value.item())
