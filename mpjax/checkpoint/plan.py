"""What a Hugging Face checkpoint holds and what becomes of it, from the files' headers alone.

Everything that can be wrong with names, shapes, dtypes and formats is found here, before a tensor
is read or memory allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax.numpy as jnp

from mpjax.checkpoint import kv_scales
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.base import Scheme
from mpjax.checkpoint.schemes.checks import describe
from mpjax.checkpoint.settle import FLOAT_DTYPES
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.models import ArrayPlace, Decoder, DecoderConfig, LinearPlace
from mpjax.models.parameters import name_of

SHOWN_NAMES = 5
QUANTIZING_BYTES = 6  # per weight, beside a tensor's own: float32 copies, and codes


@dataclasses.dataclass(frozen=True)
class LinearSource:
    """One linear map as it lies in the file, and as it will be on the device.

    name: the module's. shape: [input, output channels]. tensors: by suffix.
    scheme: how to decode quantised tensors; None where `weight` holds plain numbers.
    format: the packed format on the device; None for a plain array in the compute dtype.
    """

    name: str
    shape: tuple[int, int]
    tensors: Mapping[str, TensorInfo]
    scheme: Scheme | None
    format: WeightFormat | None

    @property
    def file_bytes(self) -> int:
        """Bytes of its tensors in the file."""
        return sum(info.nbytes for info in self.tensors.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each place in the module is filled from.

    cache_scales: of keys and of values of each layer in turn; none where there are none.
    """

    config: DecoderConfig
    arrays: tuple[tuple[ArrayPlace, TensorInfo], ...]
    linears: tuple[tuple[LinearPlace, tuple[LinearSource, ...]], ...]
    cache_scales: tuple[TensorInfo, ...] = ()

    @property
    def file_bytes(self) -> int:
        """Bytes that are read."""
        sources = sum(source.file_bytes for _, sources in self.linears for source in sources)
        scales = sum(info.nbytes for info in self.cache_scales)
        return sources + scales + sum(info.nbytes for _, info in self.arrays)

    @property
    def device_bytes(self) -> int:
        """Bytes that the finished model takes on the device."""
        size = jnp.dtype(self.config.dtype).itemsize
        total = sum(math.prod(place.shape) * size for place, _ in self.arrays)
        total += 4 * self.config.num_kv_heads * len(self.cache_scales)
        for place, sources in self.linears:
            total += sum(self._linear_bytes(place, source) for source in sources)
        return total

    @property
    def working_bytes(self) -> int:
        """Bytes that converting takes beside the finished model, at its largest step."""
        steps = [info.nbytes for _, info in self.arrays]
        for place, sources in self.linears:
            step = max(_converting_bytes(source) for source in sources)
            if len(sources) > 1:  # all of them, while they are put together
                step += sum(self._linear_bytes(place, source) for source in sources)
            steps.append(step)
        return max(steps)

    def _linear_bytes(self, place: LinearPlace, source: LinearSource) -> int:
        size = jnp.dtype(self.config.dtype).itemsize
        channels, outputs = source.shape
        bias = outputs * size if place.bias else 0
        if source.format is None:
            return channels * outputs * size + bias
        scheme = source.scheme
        extra = 0 if scheme is None else scheme.extra_bytes(source.tensors, source.shape)
        return source.format.nbytes(source.shape) + extra + bias


def modules_of(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each module, by suffix."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    return modules


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether any of its modules is quantised, whatever config.json says."""
    return any(registry.of_module(tensors) for tensors in modules_of(checkpoint).values())


def make_plan(
    checkpoint: Checkpoint,
    decoder: type[Decoder],
    config: DecoderConfig,
    scheme: Scheme | None,
    quantize: WeightFormat | None,
) -> Plan:
    """Decides for each module, from the tensors that are present, what becomes of it.

    scheme: what config.json says about quantised modules. quantize: the format to round plain maps
    to, None to leave them plain. Raises CheckpointError for tensors that are missing,
    unexpected, or of another shape, dtype or packing than the model and config.json say.
    """
    if config.num_layers > len(checkpoint.tensors):  # before anything is made for each layer
        raise CheckpointError(
            f"config.json says that there are {config.num_layers} layers, and {checkpoint.folder} "
            f"holds {_count(list(checkpoint.tensors))}: they are not of one checkpoint"
        )
    modules = modules_of(checkpoint)
    tables = [name_of(decoder.names, table) for table in ("embedding", "head")]
    _require_plain_tables(modules, tables)
    arrays = decoder.array_places(config)
    linears = [
        (place, [_source_tensors(modules.get(name, {}), place) for name in place.names])
        for place in decoder.linear_places(config)
    ]
    expected = {array.name for array in arrays}
    for place, shards in linears:
        for name, tensors in zip(place.names, shards, strict=True):
            expected |= {f"{name}.{suffix}" for suffix in tensors}
            # Other tensors that a quantised module lacks are found missing by its scheme.
            expected |= {f"{name}.weight"} if "weight" in _suffixes(tensors) else set()
            expected |= {f"{name}.bias"} if place.bias else set()
    ignored = () if scheme is None else scheme.ignored
    has_cache_scales = scheme is not None and scheme.has_cache_scales
    if has_cache_scales:
        expected |= set(kv_scales.names(decoder, config))
    if config.tie_word_embeddings:  # the head is the embedding, which `settle` makes sure of
        expected |= {tables[1]} & checkpoint.tensors.keys()
    _check_names(checkpoint, expected, ignored)
    for array in arrays:
        info = checkpoint.tensors[array.name]
        _check_floats(info.name, info, array.shape)
    return Plan(
        config,
        tuple((array, checkpoint.tensors[array.name]) for array in arrays),
        tuple(
            (
                place,
                tuple(
                    _linear_source(name, shape, tensors, scheme, quantize)
                    for name, shape, tensors in zip(place.names, place.shapes, shards, strict=True)
                ),
            )
            for place, shards in linears
        ),
        kv_scales.check(checkpoint.tensors, decoder, config) if has_cache_scales else (),
    )


def _require_plain_tables(
    modules: Mapping[str, Mapping[str, TensorInfo]], tables: Iterable[str]
) -> None:
    for name in (table.removesuffix(".weight") for table in tables):
        tensors = modules.get(name, {})
        if registry.of_module(tensors) is not None:
            raise CheckpointError(
                f"{name} is quantised ({', '.join(sorted(tensors))}): only the linear maps of "
                f"layers can be, so load a checkpoint of the model with {name} in 16 bits"
            )


def _source_tensors(tensors: Mapping[str, TensorInfo], place: LinearPlace) -> dict[str, TensorInfo]:
    """The tensors of a module that are of use, given how it is stored."""
    suffixes = _suffixes(tensors) + (("bias",) if place.bias else ())
    return {suffix: tensors[suffix] for suffix in suffixes if suffix in tensors}


def _suffixes(tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    stored = registry.of_module(tensors)
    return ("weight",) if stored is None else stored.suffixes


def _linear_source(
    name: str,
    shape: tuple[int, int],
    tensors: Mapping[str, TensorInfo],
    scheme: Scheme | None,
    quantize: WeightFormat | None,
) -> LinearSource:
    if "bias" in tensors:
        _check_floats(f"{name}.bias", tensors["bias"], (shape[1],))
    stored = registry.of_module(tensors)
    if stored is not None:
        quantized = {suffix: info for suffix, info in tensors.items() if suffix != "bias"}
        try:
            if scheme is None or type(scheme) is not stored:
                stored.refuse(name, quantized, None if scheme is None else scheme.quant_method)
            scheme.check(quantized, name, shape)
            format = scheme.format(name, shape[0])
        except CheckpointError as error:
            raise CheckpointError(f"{next(iter(tensors.values())).file}: {error}") from error
        return LinearSource(name, shape, tensors, scheme, format)
    _check_floats(f"{name}.weight", tensors["weight"], shape[::-1])
    if quantize is not None and not quantize.can_split(shape[0]):
        raise CheckpointError(
            f"{name} has {shape[0]} input channels, which groups of {quantize.group_size} don't "
            "divide: choose another group size or format in precision, such as W4g32 or W4gK"
        )
    return LinearSource(name, shape, tensors, None, quantize)


def _check_names(
    checkpoint: Checkpoint,
    expected: Iterable[str],
    ignored: tuple[str, ...],
) -> None:
    wanted = set(expected)
    missing = sorted(wanted - checkpoint.tensors.keys())
    unexpected = sorted(
        name
        for name in checkpoint.tensors.keys() - wanted
        # Old files carry the frequencies, which are constants.
        if not name.endswith(("rotary_emb.inv_freq", *ignored))
    )
    problems = []
    if missing:
        problems.append(f"lacks {_count(missing)}")
    if unexpected:
        problems.append(f"holds {_count(unexpected)} that the model has no place for")
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} {' and '.join(problems)}: "
            "the files and config.json are not of one supported checkpoint"
        )


def _count(names: list[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:SHOWN_NAMES]]
    more = ", ..." if len(names) > SHOWN_NAMES else ""
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'} ({', '.join(shown)}{more})"


def _check_floats(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape or info.dtype.name not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{info.file}: {name} is {describe(info)}: expected {', '.join(FLOAT_DTYPES)} of shape "
            f"{list(shape)}, by config.json"
        )


def _converting_bytes(source: LinearSource) -> int:
    per_weight = QUANTIZING_BYTES if source.format else 0
    if source.scheme is not None:
        per_weight = source.scheme.decoding_bytes
    return source.file_bytes + per_weight * math.prod(source.shape)
