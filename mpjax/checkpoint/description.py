"""What a saved model's mpjax.json says: everything but the numbers in its arrays."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mpjax.checkpoint import model_arrays
from mpjax.checkpoint.errors import CheckpointError
from mpjax.checkpoint.model_arrays import PackedPart
from mpjax.checkpoint.safetensors import DTYPES
from mpjax.kernels import KVFormat, WeightFormat, files
from mpjax.language_model import LanguageModel
from mpjax.models import FAMILIES, Decoder, DecoderConfig, RopeScaling
from mpjax.models.config_checks import require_sound

DESCRIPTION_NAME = "mpjax.json"
WEIGHTS_NAME = "weights.safetensors"
FORMAT = "mpjax checkpoint"
VERSION = 4  # since the arrays are in a safetensors file
DECODERS: dict[str, type[Decoder]] = {"Decoder": Decoder} | {
    decoder.__name__: decoder for decoder in FAMILIES.values()
}
JSON_NAMES: dict[type, str] = {str: "string", int: "integer", list: "list", dict: "object"}
DTYPES_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


class StoredArray(NamedTuple):
    """An array in the weights' file. checksum: the CRC-32 of its bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    checksum: int


@dataclasses.dataclass(frozen=True)
class Description:
    """A saved model without its numbers; parts and arrays by name, as `model_arrays` names them."""

    decoder: type[Decoder]
    config: DecoderConfig
    kv_format: KVFormat
    parts: model_arrays.Parts
    arrays: Mapping[str, StoredArray]

    @classmethod
    def of(cls, lm: LanguageModel, checksums: Mapping[str, int]) -> Description:
        """Describes a model whose arrays have these checksums."""
        arrays = {
            name: StoredArray(np.dtype(array.dtype), array.shape, checksums[name])
            for name, array in model_arrays.take(lm.model).items()
        }
        parts = model_arrays.take_parts(lm.model)
        return cls(type(lm.model), lm.config, lm.kv_format, parts, arrays)

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Reads and checks a folder's mpjax.json.

        Raises CheckpointError for a folder that no model was saved in, or a damaged mpjax.json.
        """
        path = folder / DESCRIPTION_NAME
        written = _read_json(folder, path)
        if written.get("format") != FORMAT:
            raise CheckpointError(f"{path} does not describe a model that mpjax saved")
        if written.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has the format version {written.get('version')!r:.80}: this mpjax reads "
                f"version {VERSION}; install the mpjax that wrote it, or convert the original again"
            )
        try:
            description = _parse(written)
            require_sound(description.config)
            model_arrays.require_fitting(description.config, description.parts, description.arrays)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: {error}; convert the original again"
            ) from error
        return description

    def to_json(self) -> str:
        """The content of mpjax.json."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "decoder": self.decoder.__name__,
            "config": dataclasses.asdict(self.config),
            "kv_format": str(self.kv_format),
            "linears": {
                path: [
                    part and {"format": str(part.format), "scale_dtype": part.scale_dtype}
                    for part in parts
                ]
                for path, parts in self.parts.items()
            },
            "arrays": {
                name: {"dtype": dtype.name, "shape": list(shape), "crc32": checksum}
                for name, (dtype, shape, checksum) in self.arrays.items()
            },
        }
        return json.dumps(value, indent=1)

    def abstract(self, folder: Path) -> LanguageModel:
        """The model with shapes for arrays, and without a tokenizer."""
        model = nnx.eval_shape(lambda: self.decoder(self.config, nnx.Rngs(0)))
        shapes = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in self.arrays.items()
        }
        model_arrays.put(model, shapes, self.parts)
        return LanguageModel(model, None, self.kv_format, folder)


def is_saved(folder: Path) -> bool:
    """Whether mpjax saved a model in a folder."""
    return os.path.lexists(folder / DESCRIPTION_NAME)


def _read_json(folder: Path, path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{folder} has no {DESCRIPTION_NAME}: mpjax did not save a model there"
        )
    return files.read_object(path, CheckpointError)


def _parse(written: Mapping[str, Any]) -> Description:
    """Raises ValueError that names the key."""
    decoder = _get(written, "decoder", str)
    if decoder not in DECODERS:
        raise ValueError(f"decoder is {decoder!r:.80}: expected one of {', '.join(DECODERS)}")
    return Description(
        DECODERS[decoder],
        _parse_config(_get(written, "config", dict)),
        KVFormat.parse(_get(written, "kv_format", str)),
        {
            path: [_parse_part(path, part) for part in _require(path, parts, list)]
            for path, parts in _get(written, "linears", dict).items()
        },
        {
            name: _parse_array(name, _require(name, array, dict))
            for name, array in _get(written, "arrays", dict).items()
        },
    )


def _parse_config(written: Mapping[str, Any]) -> DecoderConfig:
    _require_fields("config", written, DecoderConfig)
    values = dict(written)
    for name in ("windows", "stop_ids"):
        values[name] = tuple(_get(written, name, list))
    if written["rope_scaling"] is not None:
        scaling = _get(written, "rope_scaling", dict)
        _require_fields("rope_scaling", scaling, RopeScaling)
        values["rope_scaling"] = RopeScaling(**scaling)
    return DecoderConfig(**values)


def _require_fields(where: str, written: Mapping[str, Any], kind: type) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    for name in sorted(names ^ written.keys()):
        if name in names:
            raise ValueError(f"{where} has no {name!r}")
        raise ValueError(f"{where} has an unknown key {name!r:.80}")


def _parse_part(path: str, written: Any) -> PackedPart | None:
    if written is None:
        return None
    part = _require(path, written, dict)
    format = WeightFormat.parse(_get(part, "format", str))
    return PackedPart(format, _get(part, "scale_dtype", str))


def _parse_array(name: str, written: Mapping[str, Any]) -> StoredArray:
    dtype, shape = _get(written, "dtype", str), _get(written, "shape", list)
    checksum = _get(written, "crc32", int)
    if dtype not in DTYPES_BY_NAME:
        raise ValueError(f"{name} has the dtype {dtype!r:.80}")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{name} has the shape {shape!r:.80}")
    return StoredArray(DTYPES_BY_NAME[dtype], tuple(shape), checksum)


def _get(written: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in written:
        raise ValueError(f"there is no {key!r}")
    return _require(key, written[key], kind)


def _require(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.80}: expected a JSON {JSON_NAMES[kind]}")
    return value
