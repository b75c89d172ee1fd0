"""The shape of a decoder, and what every family's `config.json` says in common."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from mpjax.kernels.checks import as_dtype, shown, whole_number

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    "max_position_embeddings",
)
# More than any model has: bounds what is made for each layer, where no tensors are at hand.
MAXIMUM_LAYERS = 10_000
MAXIMUM_INTEGER = 2**31 - 1  # positions, lengths and token ids are int32
# Older files have rope_theta and rope_scaling; newer ones put both into rope_parameters. Where
# there are both, somebody added the scaling to a newer file, and it counts.
ROTARY_KEYS = ("rope_scaling", "rope_parameters")
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")


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


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that a decoder's computation depends on besides its weights; static, hashable.

    windows: for each layer, how many keys a query sees, itself included (None: all).
    dtype: what the model computes in, also as a short name such as `bf16`.
    max_position_embeddings: tokens that a sequence may have, a limit that nothing else depends on.
    stop_ids: tokens that end a text; not used by the model itself.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "dtype", as_dtype("DecoderConfig: dtype", self.dtype).name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for name in ("windows", "stop_ids"):  # of a list, the configuration would have no hash
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ConfigError(f"DecoderConfig: {name} is {shown(value)}: expected a list")
            object.__setattr__(self, name, tuple(value))

    def require_computable(self) -> None:
        """Raises ValueError for sizes that no decoder can have."""
        for name in SIZES:
            whole_number(f"DecoderConfig: {name}", getattr(self, name))
        for window in self.windows:
            if window is not None:
                whole_number("DecoderConfig: one of windows", window)
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"DecoderConfig: {self.num_heads} heads of {self.head_dim} channels for "
                f"{self.num_kv_heads} KV heads: expected a multiple of the KV heads, and an even "
                "number of channels"
            )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """[input, output channels] of each linear map of a layer."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "query": (hidden, query),
            "key": (hidden, key),
            "value": (hidden, key),
            "output": (query, hidden),
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }


def common_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderConfig fields that all families read alike from a Hugging Face `config.json`.

    Raises ConfigError for a missing key, an activation other than SiLU, a rotary scaling that is
    not implemented, and values that numbers and switches can't have.
    """
    for key in SWITCHES:
        if type(value := hf.get(key)) is not bool and value is not None:
            raise ConfigError(f"config.json: {key} is {value!r:.80}: expected true or false")
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise ConfigError(
            f"config.json: hidden_act is {activation!r:.80}; only 'silu' is supported"
        )
    heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
    kv_heads = integer(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads is {heads} and num_key_value_heads {kv_heads}: "
            "expected a multiple of it"
        )
    vocabulary = integer(hf, "vocab_size")
    rope_theta, rope_scaling = _rope(hf)
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": integer(hf, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _head_dim(hf, hidden, heads),
        "windows": (None,) * layer_count(hf),
        "max_position_embeddings": _positions(hf, rope_scaling),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": _positive(hf, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": hf.get("tie_word_embeddings") or False,
        "dtype": _dtype(hf),
        "stop_ids": _stop_ids(hf, vocabulary),
    }


def require(hf: Mapping[str, Any], key: str) -> Any:
    """hf[key], or ConfigError where the key is missing."""
    if hf.get(key) is None:
        raise ConfigError(f"config.json has no {key!r}, which this architecture needs")
    return hf[key]


def integer(
    hf: Mapping[str, Any],
    key: str,
    default: int | None = None,
    minimum: int = 1,
    maximum: int = MAXIMUM_INTEGER,
) -> int:
    """A whole number, which must be there unless there is a default. Raises ConfigError."""
    value = hf.get(key)
    if value is None:
        value = require(hf, key) if default is None else default
    if type(value) is not int or not minimum <= value <= maximum:
        expected = "a positive integer" if minimum == 1 else f"an integer from {minimum} on"
        if type(value) is int and value > maximum:
            expected = f"at most {maximum}"
        raise ConfigError(f"config.json: {key} is {value!r:.80}: expected {expected}")
    return value


def layer_count(hf: Mapping[str, Any]) -> int:
    """How many layers there are. Raises ConfigError."""
    return integer(hf, "num_hidden_layers", maximum=MAXIMUM_LAYERS)


def sliding_window(hf: Mapping[str, Any], default: int | None = None) -> int | None:
    """How many keys a query sees where there is a window: null means that there is none."""
    value = hf.get("sliding_window", default)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(
            f"config.json: sliding_window is {value!r:.80}: expected a positive integer, or null "
            "where there is no window"
        )
    return value


def _head_dim(hf: Mapping[str, Any], hidden: int, heads: int) -> int:
    size, name = hidden // heads, "head_dim (hidden_size / num_attention_heads)"
    if hf.get("head_dim") is not None:
        size, name = integer(hf, "head_dim"), "head_dim"
    if size < 1 or size % 2:
        raise ConfigError(f"config.json: {name} is {size!r:.80}: expected a positive, even number")
    return size


def _positive(
    values: Mapping[str, Any], key: str, default: float | None = None, source: str = "config.json"
) -> float:
    """A number, which must be there unless there is a default."""
    value: Any = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{source} has no {key!r}: expected a positive number")
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{source}: {key} is {value!r:.80}: expected a positive number")
    return value


def layer_windows(hf: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types` where the file lists them, else the same for all."""
    layers = layer_count(hf)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = hf.get("layer_types") or [usual] * layers
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in [*known] for k in kinds):
        raise ConfigError(
            f"config.json: layer_types must list {layers} of {sorted(known)}, got {kinds!r:.80}"
        )
    return tuple(known[kind] for kind in kinds)


def _dtype(hf: Mapping[str, Any]) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise ConfigError(
            f"config.json: dtype {name!r:.80} is not supported: expected bfloat16, float16 or "
            "float32"
        )
    return jnp.dtype(name).name


def _stop_ids(hf: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    found = hf.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        raise ConfigError(
            f"config.json: eos_token_id is {found!r:.80}: expected token ids from 0 to "
            f"{vocabulary - 1}"
        )
    return tuple(ids)


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    added, newer = (_rotary_object(hf, key) for key in ROTARY_KEYS)
    for values in (hf, added, newer):
        if (partial := values.get("partial_rotary_factor")) not in (None, 1.0):
            raise ConfigError(
                f"config.json: partial_rotary_factor is {partial}; only whole heads are supported"
            )
    places = (added, hf, newer) if added else (newer, hf)
    given = next((values for values in places if values.get("rope_theta") is not None), hf)
    theta = float(_positive(given, "rope_theta", 1e4))
    parameters = added or newer
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    source = "config.json, rotary scaling"
    factor = float(_positive(parameters, "factor", source=source))
    if kind == "linear":
        return theta, RopeScaling(kind, factor)
    low, high, context = (
        _positive(parameters, key, source=source)
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if not high > low:
        raise ConfigError(
            f"{source}: high_freq_factor is {high!r}: expected more than low_freq_factor, {low!r}"
        )
    return theta, RopeScaling(kind, factor, float(low), float(high), int(context))


def _rotary_object(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands under a key; ConfigError for a kind of scaling that is not implemented."""
    written = hf.get(key) or {}
    if not isinstance(written, Mapping):
        raise ConfigError(f"config.json: {key} is {written!r}: expected an object")
    if any(isinstance(value, Mapping) for value in written.values()):
        raise ConfigError(f"config.json: {key} for each kind of layer are not supported")
    kinds = [kind for name in ("rope_type", "type") if (kind := written.get(name)) is not None]
    for kind in kinds:
        if kind not in ("default", "linear", "llama3"):
            raise ConfigError(
                f"config.json: rotary scaling {kind!r} is not supported: "
                "expected default, linear or llama3"
            )
    if not kinds and written.get("factor") is not None:
        raise ConfigError(
            f"config.json: {key} has a factor and no rope_type: expected default, linear or llama3"
        )
    return written


def _positions(hf: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    """How many positions a model has: with linear scaling, `factor` times those before it.

    `max_position_embeddings` are those before it, as Hugging Face's documentation asks for, unless
    `original_max_position_embeddings` stands beside the factor; other kinds write the final ones.
    """
    written = integer(hf, "max_position_embeddings", 2048)
    if scaling is None or scaling.kind != "linear":
        return written
    parameters = next(values for key in ROTARY_KEYS if (values := hf.get(key)))
    before, key = float(written), "original_max_position_embeddings"
    if parameters.get(key) is not None:
        before = _positive(parameters, key, source="config.json, rotary scaling")
    if not scaling.factor * before <= MAXIMUM_INTEGER:
        raise ConfigError(
            f"config.json: rotary scaling makes {scaling.factor} times {before:.0f} positions: "
            f"expected at most {MAXIMUM_INTEGER}"
        )
    return max(written, int(scaling.factor * before))
