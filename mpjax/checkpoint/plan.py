"""Plans the loading of a Hugging Face checkpoint from its files' headers.

A plan lists the tensors that fill each parameter, their formats, and the bytes needed. Wrong names,
shapes, dtypes and formats are found here, before a tensor is read or memory is allocated.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp

from mpjax.checkpoint import kv_scales, packed_tables
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.checks import describe, require_groups
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.settle import FLOAT_DTYPES
from mpjax.checkpoint.transfer import PIECE_BYTES
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.models import ArrayPlace, Decoder, DecoderConfig, ExpertPlace, LinearPlace
from mpjax.models.parameters import name_of, unread_names
from mpjax.models.window import Window

SHOWN_NAMES = 5
# Extra device bytes per weight while quantising: float32 copies and codes.
QUANTIZING_BYTES = 6


@dataclasses.dataclass(frozen=True)
class LinearSource:
    """The tensors of one linear map, and its format on the device.

    name: the module's name in the file. shape: (input channels, output channels). tensors: by
    suffix.
    reader: decodes quantised tensors; None if `weight` is floating point.
    format: the packed format on the device; None for an array in the model's dtype.
    is_transposed: whether an unquantised weight is [in, out] in the file.
    window: the range of channels that this process reads; None for all.
    """

    name: str
    shape: tuple[int, int]
    tensors: Mapping[str, TensorInfo]
    reader: Reader | None
    format: WeightFormat | None
    is_transposed: bool = False
    window: Window | None = None

    @property
    def read_shape(self) -> tuple[int, int]:
        """(input channels, output channels) that are read."""
        return self.shape if self.window is None else self.window.of(self.shape)

    @property
    def order(self) -> TensorInfo | None:
        """The tensor with the group index of each input channel (act-order), or None."""
        suffix = None if self.reader is None else self.reader.order_suffix
        return None if suffix is None else self.tensors.get(suffix)

    @property
    def file_bytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum(info.nbytes for info in self.tensors.values())


@dataclasses.dataclass(frozen=True)
class TableSource:
    """A quantised embedding or head that is dequantised when loaded.

    name: the module's name in the file. tensors: by suffix. reader: decodes them.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    reader: Reader

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum(info.nbytes for info in self.tensors.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tensors that fill each parameter of the module.

    linears: for each place the sources of its maps, in the order of `place.names`.
    cache_scales: tensors in the order of `kv_scales.names`; empty without cache scales.
    """

    config: DecoderConfig
    arrays: tuple[tuple[ArrayPlace, TensorInfo | TableSource], ...]
    linears: tuple[tuple[LinearPlace, tuple[LinearSource, ...]], ...]
    cache_scales: tuple[TensorInfo, ...] = ()

    @property
    def file_bytes(self) -> int:
        """Bytes that are read from the files."""
        sources = sum(source.file_bytes for _, sources in self.linears for source in sources)
        scales = sum(info.nbytes for info in self.cache_scales)
        return sources + scales + sum(source.nbytes for _, source in self.arrays)

    @property
    def device_bytes(self) -> int:
        """Bytes of the loaded model on the device."""
        size = jnp.dtype(self.config.dtype).itemsize
        total = sum(math.prod(place.shape) * size for place, _ in self.arrays)
        total += 4 * self.config.num_kv_heads * len(self.cache_scales)
        for place, sources in self.linears:
            total += sum(self._linear_bytes(place, source) for source in sources)
        return total

    @property
    def working_bytes(self) -> int:
        """Bytes on the device that the largest conversion takes in addition to the loaded model."""
        steps = [_array_bytes(place, source) for place, source in self.arrays]
        for place, sources in self.linears:
            step = max(_converting_bytes(source) for source in sources)
            if len(sources) > 1:  # the separate maps and the joined one exist at once
                joined = sources[: place.joined_maps]
                step += sum(self._linear_bytes(place, source) for source in joined)
            steps.append(step)
        return max(steps)

    @property
    def undivided_bytes(self) -> int:
        """Bytes of the largest parameter (or few experts) that is whole before its division."""
        size = jnp.dtype(self.config.dtype).itemsize
        steps = [math.prod(place.shape) * size for place, _ in self.arrays]
        for place, sources in self.linears:
            some = len(sources)
            if isinstance(place, ExpertPlace):
                some = place.pieces(PIECE_BYTES)[0].length * place.joined_maps
            steps.append(sum(self._linear_bytes(place, source) for source in sources[:some]))
        return max(steps)

    def _linear_bytes(self, place: LinearPlace, source: LinearSource) -> int:
        size = jnp.dtype(self.config.dtype).itemsize
        channels, outputs = source.shape
        bias = outputs * size if place.bias else 0
        if source.format is None:
            return channels * outputs * size + bias
        permutation = 0 if source.order is None else 4 * channels  # an upper bound
        return source.format.nbytes(source.shape) + permutation + bias


def modules_of(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """Tensors by module and suffix: `a.b.weight` is the suffix `weight` of the module `a.b`.

    Parameters of a weight have a longer suffix: `weight.absmax` in `a.b.weight.absmax`.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        module, parted, rest = name.partition(".weight.")
        suffix = f"weight.{rest}"
        if not parted:
            module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = info
    return modules


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether any module is quantised, by its tensors alone, not config.json."""
    return any(registry.of_module(tensors) for tensors in modules_of(checkpoint).values())


def make_plan(
    checkpoint: Checkpoint,
    decoder: type[Decoder],
    config: DecoderConfig,
    policy: Policy | None,
    quantize: WeightFormat | None,
    tables: Mapping[str, WeightFormat] = types.MappingProxyType({}),
) -> Plan:
    """Plans which tensors of a checkpoint fill each parameter of a decoder; reads no tensor.

    policy: how quantised modules are read; None if config.json has no quantization config.
    quantize: the format to which 16-bit linear maps of layers are rounded; None keeps them in 16
    bits. tables: the packed formats to which the 16-bit tables `embedding` and `head` are rounded.
    A quantised head keeps its format; the plan's configuration lists the packed tables.

    Raises CheckpointError for missing or unexpected tensors, and for a shape, dtype or packing that
    contradicts the model and config.json.
    """
    if config.num_layers > len(checkpoint.tensors):  # checked before a list with an entry per layer
        raise CheckpointError(
            f"config.json says that there are {config.num_layers} layers, and {checkpoint.folder} "
            f"holds {_count(list(checkpoint.tensors))}: they are not of one checkpoint"
        )
    modules = modules_of(checkpoint)
    config = packed_tables.configured(decoder, config, modules, tables)
    arrays = [
        (place, _table_source(modules, place.name, policy))
        for place in decoder.array_places(config)
    ]
    linears = [
        (place, [_source_tensors(modules.get(name, {}), place) for name in place.names])
        for place in decoder.linear_places(config)
    ]
    expected = _names_of_tensors(arrays, linears)
    ignored = () if policy is None else policy.ignored
    cache_scales = (
        () if policy is None else kv_scales.of(checkpoint.tensors, decoder, config, policy)
    )
    expected |= set(cache_scales)
    if config.tie_word_embeddings:  # `settle` has checked that head and embedding are equal
        expected |= {name_of(decoder.names, "head")} & checkpoint.tensors.keys()
    unread = unread_names(config, decoder.names)
    expected |= {
        name
        for name in checkpoint.tensors
        if is_spare(name, decoder, config) or name.startswith(unread)
    }
    _check_names(checkpoint, expected, ignored)
    return Plan(
        config,
        tuple((array, _array_source(checkpoint, array, table)) for array, table in arrays),
        tuple(
            (
                place,
                _linear_sources(
                    *(place, shards, _policy_of(place, policy, tables)),
                    _rounding(place, quantize, tables),
                ),
            )
            for place, shards in linears
        ),
        kv_scales.check(checkpoint.tensors, cache_scales, config.num_kv_heads),
    )


def plan_places(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    arrays: Sequence[ArrayPlace],
    linears: Sequence[LinearPlace],
    quantize: WeightFormat | None,
    others: Iterable[str] = (),
) -> Plan:
    """Plans which 16-bit tensors of a checkpoint fill some places; reads no tensor.

    config: of the model with these places. quantize: as for `make_plan`. others: the names of
    further tensors that the checkpoint must have. Raises CheckpointError as `make_plan` does.
    """
    modules = modules_of(checkpoint)
    found = [
        (place, [_source_tensors(modules.get(name, {}), place) for name in place.names])
        for place in linears
    ]
    expected = _names_of_tensors([(place, None) for place in arrays], found)
    _check_names(checkpoint, expected | set(others), ())
    return Plan(
        config,
        tuple((place, _array_source(checkpoint, place, None)) for place in arrays),
        tuple(
            (place, _linear_sources(place, shards, None, _rounding(place, quantize, {})))
            for place, shards in found
        ),
    )


def is_spare(name: str, decoder: type[Decoder], config: DecoderConfig) -> bool:
    """Whether a tensor may be in the family's files although the decoder doesn't use it.

    It belongs to a layer after the decoder's last, or has a name of `decoder.spare`.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", name) if decoder.has_spare_layers else None
    is_behind = layer is not None and int(layer[1]) >= config.num_layers
    return is_behind or name.endswith(decoder.spare) or name.startswith(decoder.spare)


def _rounding(
    place: LinearPlace, quantize: WeightFormat | None, tables: Mapping[str, WeightFormat]
) -> WeightFormat | None:
    """The format to which a place's 16-bit maps are rounded; None keeps them in 16 bits."""
    if place.is_table:
        return tables.get(place.path)
    return None if place.is_precise else quantize


def _names_of_tensors(
    arrays: Sequence[tuple[ArrayPlace, TableSource | None]],
    linears: Iterable[tuple[LinearPlace, Sequence[Mapping[str, TensorInfo]]]],
) -> set[str]:
    """The tensor names that a checkpoint must have, and may have; see `_check_names`.

    arrays: places, each with the quantised table that fills it, or None. linears: places, each with
    the tensors of its maps by suffix.
    """
    expected = {array.name for array, table in arrays if table is None}
    for table in (table for _, table in arrays if table is not None):
        expected |= {f"{table.name}.{suffix}" for suffix in table.tensors}
    for place, shards in linears:
        for name, tensors in zip(place.names, shards, strict=True):
            expected |= {f"{name}.{suffix}" for suffix in tensors}
            # `Reader.check` reports missing tensors of a quantised module.
            expected |= {f"{name}.weight"} if _has_weight(tensors) else set()
            expected |= {f"{name}.bias"} if place.bias else set()
    return expected


def _policy_of(
    place: LinearPlace, policy: Policy | None, tables: Mapping[str, WeightFormat]
) -> Policy | None:
    """The policy of a place; for a table with a requested format, the policy that rounds to it."""
    if policy is not None and isinstance(place, ExpertPlace):
        return policy.for_experts()
    if policy is None or not place.is_table or place.path not in tables:
        return policy
    return policy.rounded_to(tables[place.path]) or policy


def _table_source(
    modules: Mapping[str, Mapping[str, TensorInfo]], name: str, policy: Policy | None
) -> TableSource | None:
    """The quantised tensors of the parameter `name`; None if it is not quantised."""
    module = name.removesuffix(".weight")
    tensors = modules.get(module, {})
    stored = registry.of_module(tensors)
    if policy is None or stored is None or policy.part(module).scheme is not stored:
        return None
    return TableSource(module, tensors, policy.reader(module))


def _array_source(
    checkpoint: Checkpoint, place: ArrayPlace, table: TableSource | None
) -> TensorInfo | TableSource:
    rows, *columns = place.shape
    if table is not None:
        table.reader.check(table.tensors, table.name, (math.prod(columns), rows))
        return table
    info = checkpoint.tensors[place.name]
    _check_floats(info.name, info, place.file_shape)
    return info


def _source_tensors(tensors: Mapping[str, TensorInfo], place: LinearPlace) -> dict[str, TensorInfo]:
    """The tensors of a module that its reader uses, by suffix."""
    suffixes = _suffixes(tensors) + (("bias",) if place.bias else ())
    return {suffix: tensors[suffix] for suffix in suffixes if suffix in tensors}


def _suffixes(tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    stored = registry.of_module(tensors)
    return ("weight",) if stored is None else stored.reader.suffixes


def _has_weight(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a module must have a tensor `weight`: NVFP4 may have `weight_packed` instead."""
    return "weight" in _suffixes(tensors) and "weight_packed" not in tensors


def _linear_sources(
    place: LinearPlace,
    shards: Sequence[Mapping[str, TensorInfo]],
    policy: Policy | None,
    quantize: WeightFormat | None,
) -> tuple[LinearSource, ...]:
    """Where each linear map of a place is read from.

    shards: for each linear map, its tensors by suffix.
    """
    is_transposed = isinstance(place, ExpertPlace) and place.is_transposed
    found = (
        _linear_source(name, shape, tensors, policy, quantize, is_transposed=is_transposed)
        for name, shape, tensors in zip(place.names, place.shapes, shards, strict=True)
    )
    return tuple(dataclasses.replace(x, format=None) if place.is_plain else x for x in found)


def _linear_source(
    name: str,
    shape: tuple[int, int],
    tensors: Mapping[str, TensorInfo],
    policy: Policy | None,
    quantize: WeightFormat | None,
    *,
    is_transposed: bool,
) -> LinearSource:
    if "bias" in tensors:
        _check_floats(f"{name}.bias", tensors["bias"], (shape[1],))
    stored = registry.of_module(tensors)
    if stored is not None:
        quantized = {suffix: info for suffix, info in tensors.items() if suffix != "bias"}
        try:
            if policy is None or policy.part(name).scheme is not stored:
                stored.refuse_module(name, quantized, None if policy is None else policy.method)
            reader = policy.reader(name)
            reader.check(quantized, name, shape)
            format = reader.format(name, shape[0])
        except CheckpointError as error:
            raise CheckpointError(f"{next(iter(tensors.values())).file}: {error}") from error
        return LinearSource(name, shape, tensors, reader, format if format.is_packed else None)
    _check_floats(f"{name}.weight", tensors["weight"], shape if is_transposed else shape[::-1])
    if quantize is not None:
        require_groups(name, shape[0], quantize)
    return LinearSource(name, shape, tensors, None, quantize, is_transposed)


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
        # Old files contain the rotary frequencies, which the model computes itself.
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


def _array_bytes(place: ArrayPlace, source: TensorInfo | TableSource) -> int:
    """Bytes on the device that converting a parameter takes in addition to the loaded model."""
    per_number = source.reader.decoding_bytes if isinstance(source, TableSource) else 0
    return source.nbytes + per_number * math.prod(place.shape)


def _converting_bytes(source: LinearSource) -> int:
    per_weight = QUANTIZING_BYTES if source.format else 0
    if source.reader is not None:
        per_weight = source.reader.decoding_bytes
    return source.file_bytes + per_weight * math.prod(source.shape)
