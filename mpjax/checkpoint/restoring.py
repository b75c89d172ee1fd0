"""Restores a model that `saving.save` wrote, array by array."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax

from mpjax.activation_widths import has_share
from mpjax.arguments import compute_dtype
from mpjax.checkpoint import array_file, model_arrays
from mpjax.checkpoint.agreement import require_equal_tables
from mpjax.checkpoint.description import WEIGHTS_NAME, Description
from mpjax.checkpoint.folder import HuggingFaceFolder
from mpjax.checkpoint.orbax_weights import OrbaxWeights
from mpjax.checkpoint.progress import bytes_bar
from mpjax.checkpoint.safetensors import TensorInfo, read_header
from mpjax.errors import CheckpointError
from mpjax.kernels.device import default_device
from mpjax.language_model import LanguageModel, find_precision, packed_tables
from mpjax.memory import require_free_on
from mpjax.models import Decoder
from mpjax.models.sharded import ShardedDecoder
from mpjax.models.share import ExpertDivision
from mpjax.precision import Precision

WIDTHS = ".activation_bits"  # suffix of the arrays with activation widths of blocks (W4Ax)


class How(TypedDict, total=False):
    """Further keyword arguments of `restore`."""

    verify: bool
    progress: bool | None
    experts: ExpertDivision
    drafts: bool


def restore(
    folder: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    **how: Unpack[How],
) -> LanguageModel:
    """Loads a saved model onto the default device, or divided among several, bit for bit.

    precision, dtype: if given, the saved weights must have them. Only the precision's KV format may
        differ; it replaces the saved one.
    verify: whether to compare each array, or each share in an Orbax checkpoint, with its checksum
        in mpjax.json.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.
    mesh: the devices among which the decoder is divided; a saved model fits any number of them.
    experts: how experts are divided among devices; see `mpjax.load`.
    drafts: whether to read the layer that drafts, if the model has one; True by default.

    Raises CheckpointError for a folder that `save` did not write, or that is damaged, ValueError if
    the weights have another precision or dtype, and mpjax.memory.DeviceMemoryError if the device
    lacks memory.
    """
    folder = Path(folder).resolve()
    verify, experts = how.get("verify", True), how.get("experts", "divided")
    description, infos, lm = prepare(
        folder, precision=precision, dtype=dtype, mesh=mesh, drafts=how.get("drafts", True)
    )
    source = HuggingFaceFolder(folder)
    tokenizer, sampling = source.read_tokenizer(), source.read_sampling()
    kv_format = precision.kv if precision else lm.kv_format
    lm = dataclasses.replace(lm, tokenizer=tokenizer, kv_format=kv_format, sampling=sampling)
    device = default_device()
    with bytes_bar("Loading", folder, how.get("progress"), description.nbytes) as advance:
        if description.stored is not None:
            whole = Description.read(folder)
            assert whole.stored is not None
            weights = OrbaxWeights.open(folder, whole, whole.stored, verify)
            weights = weights.without_layers(description)
            model = _restore_from_orbax(weights, lm.model, mesh, experts, advance)
            return dataclasses.replace(lm, model=model)

        def read(name: str) -> jax.Array:
            checksum = description.arrays[name].checksum if verify else None
            content = array_file.read(infos[name], checksum, advance)
            # Waiting for each transfer keeps at most one array in host memory.
            return jax.block_until_ready(jax.device_put(content, device))

        if mesh is None:
            model_arrays.put(lm.model, {name: read(name) for name in infos}, description.parts)
            return lm
        return dataclasses.replace(lm, model=_restore_shares(description, mesh, experts, read))


def prepare(
    folder: Path,
    *,
    precision: Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    drafts: bool = True,
) -> tuple[Description, dict[str, TensorInfo], LanguageModel]:
    """Checks the arguments of `restore` against the headers; reads no array.

    Raises the errors of `restore`, except those of reading arrays and dividing the model. Returns
    the description, the header of the weights' file, and the abstract model.
    """
    description = Description.read(folder)
    infos = {} if description.stored else _read_header(folder, description)
    if not drafts:
        description = description.without_drafts()
    lm, arrays = description.abstract(folder), description.arrays
    _require_agreement(folder, lm.model, precision, dtype)
    infos = {name: info for name, info in infos.items() if name in arrays}
    places = _names_of_places(description)
    read_at_once = [sum(arrays[name].nbytes for name in names) for names in places.values()]
    undivided = 0 if mesh is None else max(read_at_once)
    require_free_on(mesh, description.nbytes, f"restoring {folder}", undivided)
    return description, infos, lm


def _restore_from_orbax(
    weights: OrbaxWeights,
    model: Decoder,
    mesh: jax.sharding.Mesh | None,
    experts: ExpertDivision,
    advance: Callable[[int], None],
) -> Decoder:
    """The decoder with the arrays of an Orbax checkpoint.

    Shares are read as they are if they were saved from as many devices; others are joined, one
    parameter at a time, and divided anew. model: abstract, on one device.
    """
    description = weights.description
    if mesh is not None:
        model = _empty_shares(description, mesh, experts)
    if weights.fits(mesh, experts):
        weights.read_into(model)
        advance(description.nbytes)
        return model
    for path, names in _names_of_places(description).items():
        arrays = jax.device_put(weights.read_whole(path), default_device())
        if arrays:
            model_arrays.put(model, arrays, description.parts, prefix=path)
        advance(sum(description.arrays[name].nbytes for name in names))
    return model


def _restore_shares(
    description: Description,
    mesh: jax.sharding.Mesh,
    experts: ExpertDivision,
    read: Callable[[str], jax.Array],
) -> ShardedDecoder:
    """The decoder divided among devices; each parameter is read whole and then sliced."""
    model = _empty_shares(description, mesh, experts)
    for path, names in _names_of_places(description).items():
        arrays = {name: read(name) for name in names}
        model_arrays.put(model, arrays, description.parts, prefix=path)
    return model


def _empty_shares(
    description: Description, mesh: jax.sharding.Mesh, experts: ExpertDivision
) -> ShardedDecoder:
    """The decoder divided among devices, with uninitialised arrays."""
    return ShardedDecoder.of(description.division(mesh.size, experts), mesh)


def _names_of_places(description: Description) -> dict[str, list[str]]:
    """The names of the saved arrays of each parameter, by the parameter's path."""
    decoder, config = description.decoder, description.config
    paths = [place.path for place in decoder.array_places(config)]
    paths += [place.path for place in decoder.linear_places(config)]
    return {
        path: [name for name in description.arrays if f"{name}.".startswith(f"{path}.")]
        for path in (*paths, model_arrays.CACHE_SCALES)
    }


def abstract(folder: str | os.PathLike[str]) -> LanguageModel:
    """A saved model with ShapeDtypeStructs instead of arrays, and without a tokenizer.

    Reads only mpjax.json and, with W4Ax, the activation widths.
    Raises CheckpointError for a folder that `save` did not write, or whose mpjax.json is damaged.
    """
    folder = Path(folder)
    description = Description.read(folder)
    names = [name for name in description.arrays if name.endswith(WIDTHS)]
    widths: dict[str, Any] = {}
    if names and description.stored is not None:
        weights = OrbaxWeights.open(folder, description, description.stored)
        for name in names:
            widths[name] = weights.read_whole(name.rsplit(".", 2)[0])[name]
    elif names:
        infos = _read_header(folder, description)
        widths = {
            name: array_file.read(
                infos[name], description.arrays[name].checksum, lambda count: None
            )
            for name in names
        }
    return description.abstract(folder, widths)


def _read_header(folder: Path, description: Description) -> dict[str, TensorInfo]:
    """Reads the header of the weights' file: a TensorInfo for each array.

    Raises CheckpointError if the header and the description disagree.
    """
    path = folder / WEIGHTS_NAME
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} has no {WEIGHTS_NAME}: copy the saved model again")
    infos = read_header(path)
    for name in sorted(infos.keys() | description.arrays.keys()):
        info, array = infos.get(name), description.arrays.get(name)
        if info is None or array is None or (info.dtype, info.shape) != array[:2]:
            raise CheckpointError(
                f"{path} and the mpjax.json beside it are of different models, or damaged: they "
                f"disagree about the array {name!r:.80}; copy the saved model again"
            )
    return infos


def _require_agreement(
    folder: Path, model: Decoder, precision: Precision | None, dtype: jax.typing.DTypeLike | None
) -> None:
    saved, dtype = model.config.dtype, compute_dtype(dtype, precision)
    if dtype not in (None, saved):
        raise ValueError(
            f"dtype is {dtype}, but the model in {folder} was saved in {saved}: leave dtype out, "
            "or convert the original checkpoint again"
        )
    if precision is None:
        return
    require_equal_tables(folder, packed_tables(model), precision.tables)
    found = find_precision(model, precision.kv)
    if precision.agrees_with(found.formats):
        if not any(format.codes == "int4" for format in precision.formats):
            return
        model = abstract(folder).model  # including activation widths
        if has_share(model, precision.wide_blocks):
            return
        found = find_precision(model, precision.kv)
    raise ValueError(
        f"precision is {precision}, but the weights in {folder} are {'+'.join(found.names)}: ask "
        f"for A{found.bits}{precision.kv}, which leaves them as they are, or convert the original "
        "checkpoint again"
    )
