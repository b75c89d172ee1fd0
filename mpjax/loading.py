"""Loads a language model from a checkpoint folder, a saved model, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.activation_widths import set_uncalibrated
from mpjax.arguments import compute_dtype, positive_whole
from mpjax.checkpoint import CheckpointError, foreign, huggingface, restoring, staging
from mpjax.checkpoint.adapters.folder import read_adapter
from mpjax.checkpoint.description import DESCRIPTION_NAME, is_saved
from mpjax.checkpoint.folder import CONFIG_NAME
from mpjax.checkpoint.gguf.header import is_gguf
from mpjax.checkpoint.gguf.parts import part_names
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.source import Source
from mpjax.devices import Devices, read_devices, read_experts
from mpjax.kernels import KVFormat
from mpjax.kernels.checks import shown
from mpjax.kernels.kv_cache.layout import read_page_size
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.models.share import ExpertDivision
from mpjax.precision import Precision

# Files that loading reads; a repository often has the same weights in other formats too.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
HUB_IGNORED = ["consolidated*", "original/*"]


class Reading(TypedDict, total=False):
    """Arguments of `load` about the division of experts, and what is read beside the model."""

    experts: ExpertDivision
    family: str | None
    verify: bool
    progress: bool | None
    adapters: Mapping[str, str | os.PathLike[str]]


def load(
    path_or_id: str | os.PathLike[str],
    *,
    precision: str | Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    max_positions: int | None = None,
    page_size: int = 128,
    devices: Devices | None = None,
    **reading: Unpack[Reading],
) -> LanguageModel:
    """Loads a model, with its tokenizer if it has one, onto the default device or several.

    path_or_id: a folder with a Hugging Face checkpoint (safetensors; 16 bits, AWQ, GPTQ, FP8 or
        compressed-tensors' integers), a GGUF file, a folder that `mpjax.save` wrote, or a hub id
        such as `Qwen/Qwen3-8B-AWQ` or `Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf`, which is fetched
        first.
    precision: such as `W4A16KV8`; docs/precision.md lists them. A 16-bit checkpoint's linear maps
        are rounded to nearest if the precision has fewer bits, and so are those of a GGUF file if
        they have another format. Another quantised checkpoint must already have the precision's
        weight format; only `sym` need not match, because the zero points
        decide. Several W parts, as in `W16+W4A16KV8`, must all be in the checkpoint;
        `lm.precision` of a loaded model is always accepted. By default the weights keep their
        format, and the KV cache has 16 bits, or its format when the model was saved. FP8 weights
        are multiplied by activations in the checkpoint's own format, mostly FP8 too; a precision
        with a W part chooses another: `WFP8A16KV8`, `WFP8g128AFP8KV8`. With `W4Ax`, of a 16-bit
        checkpoint, all blocks of activations get 8 bits, with a warning; `quantize` measures which
        can have 4. A saved model keeps its blocks, which the precision must agree with.
    dtype: of 16-bit weights and activations: bfloat16, float16 or float32, also as bf16, fp16 and
        fp32 or as a dtype of NumPy, JAX or PyTorch. By default float32 if the precision has A32,
        else the checkpoint's.
    max_positions: the most tokens of a sequence, prompt and new tokens together, instead of the
        checkpoint's number. Nothing else of the model changes.
    page_size: tokens in a page of the KV cache: 16, 32, 64, 128 or 256. The room of each sequence
        is rounded up to whole pages.
    devices: among which the model is divided, each with a share of every layer: a number, a list of
        `jax.devices()`, or a mesh with one axis. By default, and for 1, the default device has all.
        docs/devices.md says what is divided how.
    experts: with several devices, whether each has a part of every expert of a mixture (`divided`,
        the default), or some of the experts whole (`whole`).
    family: the family that the model is taken for, such as `llama`, instead of that of its
        architecture: for an architecture that is unknown here and computes the same. Keys and
        tensors have to fit; keys that the family doesn't have are warned of.
    verify: whether to compare the arrays of a model that `mpjax.save` wrote with their checksums,
        which finds damage by a disk or a copy. Other checkpoints have no checksums.
        By default they are compared.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.
    adapters: folders or hub ids of adapters (LoRA), by the names by which requests ask for them;
        see `LanguageModel.add_adapter`, and docs/adapters.md.

    Raises CheckpointError for a path or checkpoint that can't be loaded, ValueError for a precision
    or dtype that the checkpoint doesn't have, max_positions below 1, another page size, devices
    that there are not or that the model can't be divided among, and whole experts on one device,
    and mpjax.memory.DeviceMemoryError, before anything is allocated, where a device does not have
    enough memory left.
    """
    if unknown := reading.keys() - Reading.__annotations__.keys():
        raise TypeError(f"load() got an unexpected keyword argument {unknown.pop()!r}")
    mesh = read_devices(devices)
    experts = read_experts(reading.get("experts", "divided"), 1 if mesh is None else mesh.size)
    progress = reading.get("progress")
    precision = None if precision is None else Precision.of(precision)
    dtype = compute_dtype(dtype, precision)
    if max_positions is not None:
        max_positions = positive_whole("max_positions", max_positions)
    page_size = read_page_size(page_size, KVFormat() if precision is None else precision.kv)
    folders = _find_adapters(reading.get("adapters", {}))
    folder = find_folder(path_or_id).resolve()
    family = reading.get("family")
    if is_saved(folder):
        if family is not None:
            raise ValueError(f"family is {family!r:.80}: a saved model has its own, leave it out")
        verify = reading.get("verify", True)
        lm = restoring.restore(
            folder,
            precision=precision,
            dtype=dtype,
            verify=verify,
            progress=progress,
            mesh=mesh,
            experts=experts,
        )
        return _finished(lm, max_positions, page_size, folders)
    source = dataclasses.replace(_open(folder), family=family)
    tokenizer = source.read_tokenizer()
    model = huggingface.load(
        source, precision=precision, dtype=dtype, progress=progress, mesh=mesh, experts=experts
    )
    if precision is not None:
        set_uncalibrated(model, precision)
    kv_format = KVFormat() if precision is None else precision.kv
    lm = LanguageModel(model, tokenizer, kv_format, folder, sampling=source.read_sampling())
    return _finished(lm, max_positions, page_size, folders)


def require_loadable(
    path_or_id: str | os.PathLike[str],
    precisions: Iterable[Precision],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    devices: Devices | None = None,
    calibrated: bool = False,
) -> None:
    """Raises what `load` raises for a precision that a checkpoint doesn't have, or without memory.

    It raises for their KV caches, too, what the model's first use raises. Only headers are read,
    and free memory is compared with each model on its own. How a saved model is divided among
    devices is left to `load`.

    precisions: all that are to be loaded; those of the same weights, one after the other, share a
        reading of headers.

    calibrated: whether `mpjax.calibrate_cache` will give the model the scales that a format needs.
    """
    folder, mesh = find_folder(path_or_id).resolve(), read_devices(devices)
    with warnings.catch_warnings(action="ignore"):  # loading and the cache that is used warn
        for _, group in itertools.groupby(precisions, lambda one: one.of_weights):
            precision, *others = group
            model = _outline(folder, precision, compute_dtype(dtype, precision), mesh)
            for kv in (one.kv for one in (precision, *others)):
                if not (calibrated and kv.scaling):
                    jax.eval_shape(functools.partial(model.create_cache, 1, 1, kv))


def _outline(
    folder: Path, precision: Precision, dtype: str | None, mesh: jax.sharding.Mesh | None
) -> Decoder:
    """A decoder without weights and with cache scales of 1, as `load` would make it, not divided.

    Raises as `require_loadable` does for weights.
    """
    if is_saved(folder):
        model = restoring.prepare(folder, precision=precision, dtype=dtype, mesh=mesh)[2].model
        scales = model.cache_scales and model.cache_scales.get_value()
        shape = scales.shape if scales is not None else None
    else:
        prepared = huggingface.prepare(_open(folder), precision=precision, dtype=dtype, mesh=mesh)
        config, decoder = prepared.plan.config, prepared.opened.decoder
        model = nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))
        has_scales = bool(prepared.plan.cache_scales)
        shape = (config.num_layers, 2, config.num_kv_heads) if has_scales else None
    if shape is not None:
        model.put_cache_scales(jnp.ones(shape))
    return model


def _open(folder: Path) -> Source:
    """The source of a folder or GGUF file. Raises CheckpointError for one without a model."""
    if not folder.is_file() and not os.path.lexists(folder / CONFIG_NAME):
        raise CheckpointError(
            f"{folder} has neither {CONFIG_NAME} nor {DESCRIPTION_NAME}: "
            f"expected a Hugging Face checkpoint, or one that mpjax saved{foreign.describe(folder)}"
        )
    return locate(folder)


def _find_adapters(adapters: Any) -> dict[str, Path]:
    """The folders of adapters, fetched where they are hub ids. Raises ValueError for no mapping."""
    if not isinstance(adapters, Mapping):
        raise ValueError(f"adapters is {shown(adapters)}: expected folders by their names")
    return {name: find_folder(folder) for name, folder in adapters.items()}


def _finished(
    lm: LanguageModel, positions: int | None, page_size: int, adapters: Mapping[str, Path]
) -> LanguageModel:
    """The model with another page size and adapters; the limit of positions is changed in place."""
    if positions is not None:
        lm.model.limit_positions(positions)
    lm = dataclasses.replace(lm, page_size=page_size)
    if adapters:
        found = {name: read_adapter(folder, lm.model) for name, folder in adapters.items()}
        lm.adapters.add(lm.model, found)
    return lm


def bundled_model() -> Path:
    """The folder of the small model that is part of mpjax; `load` takes it."""
    return Path(__file__).parent / "bundled"


def find_folder(path_or_id: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file at a path, or of a hub id's files, which are fetched first.

    Raises CheckpointError for another path, and where the hub gives no files.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise ValueError(f"the model is {shown(path_or_id)}: expected a folder's path or a hub id")
    if path_or_id == "":  # pathlib takes it for the current folder
        raise CheckpointError(
            "the model's folder is empty text: give a folder, a GGUF file or a hub id; the current "
            "folder is ."
        )
    path = _parse_path(path_or_id)
    if not path.exists():  # a save that was killed may have moved it away
        staging.clean_up(path)
    if path.is_dir() or is_gguf(path):
        return path
    if os.path.lexists(path):
        kind = "a file" if path.is_file() else "not a folder"
        raise CheckpointError(
            f"{path} is {kind}: expected the folder of a checkpoint, or a GGUF file"
        )
    hub_id = re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([\w./-]+\.gguf))?", str(path_or_id))
    if hub_id is None:
        raise CheckpointError(
            f"{path} does not exist: expected a checkpoint folder, a GGUF file, or a hub id of the "
            "form owner/name, such as Qwen/Qwen3-8B-AWQ"
        )
    return _fetch(*hub_id.groups())


def _fetch(repository: str, file: str | None) -> Path:
    """The folder of a repository on the hub, or one GGUF file of it."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{repository} is not a folder here; to fetch it from the Hugging Face hub, "
            "pip install huggingface_hub"
        ) from error
    try:
        if file is not None:
            parts = {
                name: huggingface_hub.hf_hub_download(repository, name) for name in part_names(file)
            }
            return Path(parts[file])
        fetched = huggingface_hub.snapshot_download(
            repository, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED
        )
    except (OSError, ValueError) as error:  # errors of the hub's client: offline, or refused
        raise CheckpointError(
            f"{repository} is not a folder here, and the hub did not give it: {error}"
        ) from error
    return Path(fetched)


def _parse_path(path_or_id: str | os.PathLike[str]) -> Path:
    """A path, with ~ expanded. Raises CheckpointError for one that no folder can have."""
    try:
        path = Path(path_or_id).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~ without a home, a null byte
        raise CheckpointError(f"{path_or_id} can't be a folder: {error}") from error
    return path
