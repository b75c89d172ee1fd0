"""Saves a converted model in a folder of mpjax's own, and restores it bit for bit from there.

The folder holds the arrays, written by Orbax, the files of the tokenizer, and `mpjax.json`, which
says what the arrays mean. The checkpoint that the model came from is needed no more.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from mpjax.checkpoint.errors import CheckpointError
from mpjax.checkpoint.layout import (
    array_places,
    assign_array,
    assign_linear,
    find,
    linear_kernels,
    linear_parts,
    linear_places,
)
from mpjax.checkpoint.progress import loading_bar
from mpjax.kernels import KVFormat, QuantizedTensor, WeightFormat
from mpjax.kernels.backend import default_device
from mpjax.language_model import LanguageModel, weight_precisions
from mpjax.memory import require_free
from mpjax.models import FAMILIES, CacheScales, Decoder, DecoderConfig, Linear, RopeScaling
from mpjax.precision import Precision, describe_weights
from mpjax.tokenizer import Tokenizer

# The arrays of a QuantizedTensor; those that a format has no use for are None.
PACKED_ARRAYS = ("words", "parameters", "permutation", "channel_scales", "table")
DESCRIPTION_NAME = "mpjax.json"
WEIGHTS_NAME = "weights"
FORMAT = "mpjax checkpoint"
VERSION = 3  # since the top bits of three words are a fourth quad of `table3`
# What the tokenizer reads; config.json is there for its stop tokens.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
    *("generation_config.json", "config.json"),
)
DECODERS: dict[str, type[Decoder]] = {"Decoder": Decoder} | {
    decoder.__name__: decoder for decoder in FAMILIES.values()
}


def save(lm: LanguageModel, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a model and its tokenizer into a folder: all of it, or on failure nothing.

    overwrite: replace what an earlier save left there. That stays whole until the new one is: where
    both a save and putting back the old model are interrupted, they wait in a hidden folder beside
    `folder`, as `previous` and `new`.

    Raises ValueError where the folder holds anything else, where the model or its tokenizer can't
    be saved, or where it holds what the format doesn't, such as adapters; and for a KV format that
    needs scales which the model lacks.
    """
    folder = Path(folder).resolve()
    _require_writable(folder, overwrite)
    name = type(lm.model).__name__
    if DECODERS.get(name) is not type(lm.model):
        raise ValueError(
            f"models of the class {name} can't be saved: expected one of {', '.join(DECODERS)}"
        )
    if lm.tokenizer is not None and not (lm.source / "tokenizer.json").is_file():
        raise ValueError(
            f"the tokenizer's files are no longer in {lm.source}: set the model's source to a "
            "folder with its tokenizer.json, or its tokenizer to None"
        )
    arrays = _arrays(lm.model)
    _require_all_held(lm.model, arrays)
    _require_scales(lm)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # No TemporaryDirectory: it would delete the only copies of a second interrupt.
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    new, previous = staging / "new", staging / "previous"
    try:
        new.mkdir()
        for file in TOKENIZER_FILES:
            _copy(lm.source / file, new / file)
        with _checkpointer(arrays) as checkpointer:
            checkpointer.save(new / WEIGHTS_NAME, args=ocp.args.PyTreeSave(arrays))
        description = _describe(lm, arrays) | {"files": _file_sizes(new / WEIGHTS_NAME)}
        (new / DESCRIPTION_NAME).write_text(json.dumps(description, indent=1), encoding="utf-8")
        if folder.exists():
            folder.rename(previous)
        new.rename(folder)
    finally:  # after a person's Ctrl-C too
        if previous.exists() and not folder.exists():
            previous.rename(folder)
        shutil.rmtree(staging)


def restore(
    folder: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    progress: bool | None = None,
) -> LanguageModel:
    """Loads what `save` wrote onto the default device, every array bit for bit.

    precision, dtype: what the weights must be in, if given; of the precision, the KV format may
    differ from the saved one and replaces it.
    progress: whether to show a bar on stderr; by default where stderr is a terminal.

    Raises CheckpointError for a folder that `save` did not write, ValueError where precision or
    dtype differ, and mpjax.memory.DeviceMemoryError where the device has not enough memory left.
    """
    folder = Path(folder).resolve()
    description = _read_description(folder)
    lm = _abstract(folder, description)
    _require_agreement(folder, lm.model, precision, dtype)
    _require_files(folder / WEIGHTS_NAME, description["files"])
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    shapes = _arrays(lm.model)
    require_free(sum(_nbytes(shape) for shape in shapes.values()), f"restoring {folder}")
    with loading_bar(folder, progress):  # Orbax reads all arrays at once, and doesn't say how far
        arrays = _read_arrays(folder, shapes)
    _assign_arrays(lm.model, arrays, description)
    kv_format = precision.kv if precision else lm.kv_format
    return dataclasses.replace(lm, tokenizer=tokenizer, kv_format=kv_format)


def abstract(folder: str | os.PathLike[str]) -> LanguageModel:
    """What `restore` gives, from mpjax.json alone: shapes for arrays, and no tokenizer.

    Raises CheckpointError for a folder that `save` did not write, or whose mpjax.json is damaged.
    """
    folder = Path(folder)
    return _abstract(folder, _read_description(folder))


def _abstract(folder: Path, description: dict[str, Any]) -> LanguageModel:
    try:
        config = dict(description["config"])
        config["windows"] = tuple(config["windows"])
        config["stop_ids"] = tuple(config["stop_ids"])
        if config["rope_scaling"] is not None:
            config["rope_scaling"] = RopeScaling(**config["rope_scaling"])
        decoder, parsed = DECODERS[description["decoder"]], DecoderConfig(**config)
        model = nnx.eval_shape(lambda: decoder(parsed, nnx.Rngs(0)))
        shapes = {
            path: jax.ShapeDtypeStruct(tuple(array["shape"]), jnp.dtype(array["dtype"]))
            for path, array in description["arrays"].items()
        }
        _assign_arrays(model, shapes, description)
        dict(description["files"])  # only `restore` looks at it
        return LanguageModel(model, None, KVFormat.parse(description["kv_format"]), folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / DESCRIPTION_NAME} is damaged ({type(error).__name__}: {error}): convert "
            "the checkpoint again"
        ) from error


def _require_writable(folder: Path, overwrite: bool) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not (folder / DESCRIPTION_NAME).is_file():
        raise ValueError(f"{folder} exists and is no saved model: choose another folder")
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} holds a saved model: replace it with overwrite=True")


def _require_all_held(model: Decoder, arrays: dict[str, jax.Array]) -> None:
    """Raises ValueError where a model has arrays besides those that are written."""
    held = {id(array) for array in arrays.values()}
    for path, array in jax.tree.leaves_with_path(nnx.state(model)):
        if id(array) not in held:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"the model can't be saved with {name}, which a {type(model).__name__} does not "
                "have: save adapters and the like apart, and the model without them"
            )


def _require_scales(lm: LanguageModel) -> None:
    """Raises ValueError for a cache that can't be made: other formats' scales have a default."""
    scales = lm.model.cache_scales
    given = None if scales is None else scales.get_value().ndim
    if lm.kv_format.scaling == "static" and given != 4:
        raise ValueError(
            f"{lm.kv_format} needs scales of channels, which the model lacks: measure them first, "
            "with mpjax.calibrate_cache or `mpjax convert --calibrate`, or choose another KV format"
        )


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copyfile(source, target)


def _arrays(model: Decoder) -> dict[str, jax.Array]:
    """All arrays of a model, by path; those of a packed kernel each under its own name."""
    arrays = {
        place.path: find(model, place.path).get_value() for place in array_places(model.config)
    }
    for place in linear_places(model.config):
        for index, part in enumerate(linear_parts(model, place)):
            path = f"{place.path}.{index}"
            kernel = part.kernel.get_value()
            if isinstance(kernel, QuantizedTensor):
                for name in PACKED_ARRAYS:
                    if (array := getattr(kernel, name)) is not None:
                        arrays[f"{path}.{name}"] = array
            else:
                arrays[f"{path}.kernel"] = kernel
            if part.bias is not None:
                arrays[f"{path}.bias"] = part.bias.get_value()
    if model.cache_scales is not None:
        arrays["cache_scales"] = model.cache_scales.get_value()
    return arrays


def _describe(lm: LanguageModel, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """The content of mpjax.json: everything but the numbers."""
    linears = {}
    for place in linear_places(lm.config):
        linears[place.path] = [
            {
                "format": str(kernel.format),
                "channels": kernel.channels,
                "scale_dtype": kernel.scale_dtype,
            }
            if isinstance(kernel, QuantizedTensor)
            else None
            for kernel in linear_kernels(lm.model, place)
        ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "decoder": type(lm.model).__name__,
        "config": dataclasses.asdict(lm.config),
        "kv_format": str(lm.kv_format),
        "linears": linears,
        "arrays": {
            path: {"dtype": array.dtype.name, "shape": list(array.shape)}
            for path, array in arrays.items()
        },
    }


def _read_description(folder: Path) -> dict[str, Any]:
    """A saved folder's mpjax.json. Raises CheckpointError where it is missing or not readable."""
    path = folder / DESCRIPTION_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {DESCRIPTION_NAME}: mpjax did not save a model there"
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not describe a model that mpjax saved")
    if description.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has the format version {description.get('version')!r}: this mpjax reads "
            f"version {VERSION}; install the mpjax that wrote it, or convert the checkpoint again"
        )
    return description


def _assign_arrays(model: Decoder, arrays: dict[str, Any], description: dict[str, Any]) -> None:
    """Puts arrays, or their shapes, in their places; the inverse of `_arrays`."""
    for place in array_places(model.config):
        assign_array(model, place, arrays[place.path])
    for linear_place in linear_places(model.config):
        parts = []
        for index, packed in enumerate(description["linears"][linear_place.path]):
            path = f"{linear_place.path}.{index}"
            if packed is None:
                kernel = arrays[f"{path}.kernel"]
            else:
                stored: dict[str, Any] = {
                    name: arrays.get(f"{path}.{name}") for name in PACKED_ARRAYS
                }
                kernel = QuantizedTensor(
                    format=WeightFormat.parse(packed["format"]),
                    channels=packed["channels"],
                    scale_dtype=packed["scale_dtype"],
                    **stored,
                )
            parts.append(Linear(kernel, arrays.get(f"{path}.bias")))
        assign_linear(model, linear_place, parts)
    if (scales := arrays.get("cache_scales")) is not None:
        model.cache_scales = CacheScales(scales)


def _require_agreement(
    folder: Path, model: Decoder, precision: Precision | None, dtype: jax.typing.DTypeLike | None
) -> None:
    saved = model.config.dtype
    if dtype is not None and jnp.dtype(dtype).name != saved:
        raise ValueError(
            f"dtype is {jnp.dtype(dtype).name}, but {folder} was saved in {saved}: convert the "
            "original checkpoint again"
        )
    if precision is None or precision.weights is None:
        return
    found = weight_precisions(model)
    # As when loading the original: maps that it left in 16 bits don't count, nor does symmetry,
    # which the zero points decide.
    packed = {name.removesuffix("sym") for name in found if name not in ("W16", "W32")}
    name = describe_weights(precision.weights).removesuffix("sym")
    if packed != ({name} if precision.weights.is_packed else set()):
        raise ValueError(
            f"precision is {precision}, but the weights in {folder} are {'+'.join(found)}: ask for "
            f"A16{precision.kv}, which leaves them as they are, or convert the original again"
        )


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _require_files(folder: Path, expected: dict[str, int]) -> None:
    """Raises CheckpointError where a copy of the folder was not completed."""
    found = _file_sizes(folder)
    wrong = [name for name, size in expected.items() if found.get(name) != size]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of the {len(expected)} files in {folder} are missing or of another size "
            f"than was saved, {wrong[0]} among them: copy the saved model again"
        )


def _read_arrays(folder: Path, shapes: dict[str, Any]) -> dict[str, jax.Array]:
    sharding = jax.sharding.SingleDeviceSharding(default_device())
    targets = {
        path: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        for path, shape in shapes.items()
    }
    arguments = ocp.args.PyTreeRestore(
        targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets)
    )
    try:
        with _checkpointer(shapes) as checkpointer:
            return checkpointer.restore(folder / WEIGHTS_NAME, args=arguments)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the arrays in {folder / WEIGHTS_NAME} can't be read: {error}"
        ) from error


def _checkpointer(arrays: dict[str, Any]) -> ocp.Checkpointer:
    """Orbax, with a bound on the arrays that it holds in host memory at a time: 1 GB or one."""
    gigabytes = 1 + max(map(_nbytes, arrays.values())) // 10**9
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=gigabytes, restore_concurrent_gb=gigabytes
    )
    return ocp.Checkpointer(handler)


def _nbytes(array: Any) -> int:
    return array.size * array.dtype.itemsize
