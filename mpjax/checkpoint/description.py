"""Reads and writes a saved model's mpjax.json: everything except the arrays' values."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from flax import nnx

from mpjax.checkpoint import model_arrays, saved_config
from mpjax.checkpoint.model_arrays import PackedPart
from mpjax.checkpoint.orbax_weights import StoredShares
from mpjax.checkpoint.safetensors import DTYPES
from mpjax.checkpoint.saved_config import get, require
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat, WeightFormat, files
from mpjax.language_model import LanguageModel
from mpjax.models import FAMILIES, Decoder, DecoderConfig
from mpjax.models.config_checks import require_sound
from mpjax.models.division import Division
from mpjax.models.parameters import TABLES
from mpjax.models.share import ExpertDivision

DESCRIPTION_NAME = "mpjax.json"
WEIGHTS_NAME = "weights.safetensors"
FORMAT = "mpjax checkpoint"
VERSION = 8  # checksums of the shares in an Orbax checkpoint
# Older versions that can be read.
WITHOUT_SHARES_CHECKSUMS = 7  # an Orbax checkpoint can't be verified
WITH_WIDE_SCALES = 6  # 32 bits for each scale of `float4`: models with such weights can't be read
WITH_PRE_NORMS = 5  # without the fields ADDED_IN_VERSION_6, such as norms after layers
WITH_LIKE_LAYERS = 4  # one set of layer fields for all layers
VERSIONS = (
    *(WITH_LIKE_LAYERS, WITH_PRE_NORMS, WITH_WIDE_SCALES, WITHOUT_SHARES_CHECKSUMS),
    VERSION,
)
MOST_SHARES = 1 << 16  # of a model in an Orbax checkpoint
DTYPES_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


class StoredArray(NamedTuple):
    """A whole array. checksum: CRC-32 of its bytes in weights.safetensors.

    It is None in Orbax, where each share has one: `StoredShares.checksums`.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    checksum: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Description:
    """A saved model without the values of its arrays.

    parts, arrays: by the names of `model_arrays`. stored: how arrays are divided in an Orbax
    checkpoint; None for weights.safetensors.
    """

    decoder: type[Decoder]
    config: DecoderConfig
    kv_format: KVFormat
    parts: model_arrays.Parts
    arrays: Mapping[str, StoredArray]
    stored: StoredShares | None = None

    @classmethod
    def of(
        cls,
        lm: LanguageModel,
        checksums: Mapping[str, int] | None,
        stored: StoredShares | None = None,
    ) -> Description:
        """Describes a model. checksums: CRC-32 of its arrays, by name; None for Orbax."""
        arrays = {
            name: StoredArray(
                np.dtype(array.dtype), array.shape, checksums[name] if checksums else None
            )
            for name, array in model_arrays.take(lm.model).items()
        }
        parts = model_arrays.take_parts(lm.model)
        return cls(type(lm.model), lm.config, lm.kv_format, parts, arrays, stored)

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Reads and checks a folder's mpjax.json.

        Raises CheckpointError for a folder without a saved model, or with a damaged mpjax.json.
        """
        path = folder / DESCRIPTION_NAME
        written = _read_json(folder, path)
        if written.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has the format {written.get('format')!r:.80}: expected {FORMAT!r}; load a "
                "folder that `mpjax convert` or mpjax.save wrote"
            )
        if (version := written.get("version")) not in VERSIONS:
            raise CheckpointError(
                f"{path} has the format version {version!r:.80}: this mpjax reads versions "
                f"{WITH_LIKE_LAYERS} to {VERSION}; install the mpjax that wrote it, or convert "
                "the original checkpoint again"
            )
        with _errors_as_damage(path):
            description = _parse(written)
        if version <= WITH_WIDE_SCALES:
            _require_no_wide_scales(path, description.parts)
        with _errors_as_damage(path):
            require_sound(description.config, "config")
            model_arrays.require_fitting(
                description.decoder, description.config, description.parts, description.arrays
            )
        return description

    @property
    def nbytes(self) -> int:
        """Bytes of all whole arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def without_drafts(self) -> Description:
        """The description without the layer that drafts, whose arrays then aren't read.

        With scales of the cache it keeps the layer, since one array has the scales of all layers.
        """
        config = self.config.without_drafts()
        if model_arrays.CACHE_SCALES in self.arrays:
            return self
        dropped = tuple(f"layers.{n}." for n in range(config.num_layers, self.config.num_layers))

        def kept(values: Mapping[str, Any]) -> dict[str, Any]:
            return {path: x for path, x in values.items() if not path.startswith(dropped)}

        stored = self.stored
        if stored is not None:
            checksums = None if stored.checksums is None else kept(stored.checksums)
            stored = stored._replace(parts=kept(stored.parts), checksums=checksums)
        parts, arrays = kept(self.parts), kept(self.arrays)
        return dataclasses.replace(self, config=config, parts=parts, arrays=arrays, stored=stored)

    def division(self, count: int, experts: ExpertDivision) -> Division:
        """How the decoder is divided among `count` devices.

        Raises ValueError for a model that can't be divided this way.
        """
        formats = {path: [it and it.format for it in parts] for path, parts in self.parts.items()}
        return Division.of(self.decoder, self.config, count, formats, experts)

    def to_json(self) -> str:
        """The content of mpjax.json."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "decoder": self.decoder.__name__,
            "config": saved_config.to_json(self.config),
            "kv_format": str(self.kv_format),
            "linears": _parts_to_json(self.parts),
            "arrays": {
                name: {"dtype": dtype.name, "shape": list(shape)}
                | ({} if checksum is None else {"crc32": checksum})
                for name, (dtype, shape, checksum) in self.arrays.items()
            },
        }
        if self.stored is not None:
            devices, experts, parts, checksums = self.stored
            linears = _parts_to_json(parts)
            value["orbax"] = {
                **{"devices": devices, "experts": experts, "linears": linears},
                "crc32": checksums,
            }
        return json.dumps(value, indent=1)

    def abstract(self, folder: Path, read: Mapping[str, Any] | None = None) -> LanguageModel:
        """The model with ShapeDtypeStructs instead of arrays, and without a tokenizer.

        read: real arrays to use instead, by name.
        """
        model = nnx.eval_shape(lambda: self.decoder(self.config, nnx.Rngs(0)))
        shapes = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self.arrays.items()
        }
        model_arrays.put(model, shapes | dict(read or {}), self.parts)
        return LanguageModel(model, None, self.kv_format, folder)


def decoders() -> dict[str, type[Decoder]]:
    """Classes of models that can be saved, by name."""
    known: list[type[Decoder]] = [Decoder, *FAMILIES.values()]
    return {decoder.__name__: decoder for decoder in known}


def is_saved(folder: Path) -> bool:
    """Whether a folder has an mpjax.json, i.e. holds a saved model."""
    return os.path.lexists(folder / DESCRIPTION_NAME)


def _read_json(folder: Path, path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{folder} has no {DESCRIPTION_NAME}: expected a folder that `mpjax convert` or "
            "mpjax.save wrote"
        )
    return files.read_object(path, CheckpointError)


@contextlib.contextmanager
def _errors_as_damage(path: Path) -> Iterator[None]:
    """A context that turns ValueError into CheckpointError with the file's name."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}; convert the original checkpoint again"
        ) from error


def _require_no_wide_scales(path: Path, parts: model_arrays.Parts) -> None:
    """Raises CheckpointError for `float4` weights, whose layout changed in version 7."""
    found = [part.format for listed in parts.values() for part in listed if part is not None]
    if old := next((format for format in found if format.codes == "float4"), None):
        raise CheckpointError(
            f"{path} has weights in {old} with scales of 32 bits, which mpjax wrote up to version "
            f"{WITH_WIDE_SCALES} of the format, and this one has scales of 8 bits: convert the "
            "original checkpoint again"
        )


def _parse(written: Mapping[str, Any]) -> Description:
    """The Description of a parsed mpjax.json. Raises ValueError, which names the key."""
    known, name = decoders(), get(written, "decoder", str)
    if name not in known:
        raise ValueError(f"decoder is {name!r:.80}: expected one of {', '.join(known)}")
    config = get(written, "config", dict)
    if written["version"] < WITH_WIDE_SCALES:
        config = saved_config.upgrade(config, written["version"])
    parts = _parse_parts(written)
    stored = _parse_shares(written) if "orbax" in written else None
    tables = tuple(path for path in TABLES if path in parts)
    return Description(
        known[name],
        dataclasses.replace(
            saved_config.from_json(config, known[name].specs), packed_tables=tables
        ),
        KVFormat.parse(get(written, "kv_format", str)),
        parts,
        {
            name: _parse_array(name, require(name, array, dict), stored is None)
            for name, array in get(written, "arrays", dict).items()
        },
        stored,
    )


def _parts_to_json(parts: model_arrays.Parts) -> dict[str, Any]:
    return {
        path: [
            part and {"format": str(part.format), "scale_dtype": part.scale_dtype}
            for part in listed
        ]
        for path, listed in parts.items()
    }


def _parse_parts(written: Mapping[str, Any]) -> dict[str, list[PackedPart | None]]:
    return {
        path: [_parse_part(path, part) for part in require(path, listed, list)]
        for path, listed in get(written, "linears", dict).items()
    }


def _parse_shares(written: Mapping[str, Any]) -> StoredShares:
    shares = get(written, "orbax", dict)
    devices, experts = shares.get("devices"), get(shares, "experts", str)
    if devices is not None and (type(devices) is not int or not 0 < devices <= MOST_SHARES):
        raise ValueError(f"devices is {devices!r:.80}: expected null or 1 to {MOST_SHARES}")
    if experts not in get_args(ExpertDivision):
        raise ValueError(f"experts is {experts!r:.80}: expected 'divided' or 'whole'")
    checksums, count = None, devices or 1
    if written["version"] > WITHOUT_SHARES_CHECKSUMS:
        checksums = get(shares, "crc32", dict)
        for name, listed in checksums.items():
            if type(listed) is not list or [*map(type, listed)] != [int] * count:
                raise ValueError(f"crc32 of {name!r:.80} is not a list of {count} integers")
    return StoredShares(devices, experts, _parse_parts(shares), checksums)


def _parse_part(path: str, written: Any) -> PackedPart | None:
    if written is None:
        return None
    part = require(path, written, dict)
    format = WeightFormat.parse(get(part, "format", str))
    return PackedPart(format, get(part, "scale_dtype", str))


def _parse_array(name: str, written: Mapping[str, Any], has_checksum: bool) -> StoredArray:
    dtype, shape = get(written, "dtype", str), get(written, "shape", list)
    checksum = get(written, "crc32", int) if has_checksum else None
    if dtype not in DTYPES_BY_NAME:
        known = ", ".join(DTYPES_BY_NAME)
        raise ValueError(f"{name} has the dtype {dtype!r:.80}: expected one of {known}")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{name} has the shape {shape!r:.80}: expected non-negative integers")
    return StoredArray(DTYPES_BY_NAME[dtype], tuple(shape), checksum)
