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
from mpjax.checkpoint.drafter import add_drafter
from mpjax.checkpoint.folder import CONFIG_NAME
from mpjax.checkpoint.gguf.header import is_gguf
from mpjax.checkpoint.gguf.parts import part_names
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.source import Source
from mpjax.checkpoint.trees import Names, TreeFolder
from mpjax.devices import Devices, read_devices, read_experts
from mpjax.kernels import KVFormat
from mpjax.kernels.checks import require_type, shown
from mpjax.kernels.kv_cache.layout import read_page_size
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.models.share import ExpertDivision
from mpjax.precision import Precision

# Files needed for loading; repositories often have the same weights in other formats, too.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
HUB_IGNORED = ["consolidated*", "original/*"]


class Reading(TypedDict, total=False):
    """Further keyword arguments of `load`."""

    experts: ExpertDivision
    family: str | None
    verify: bool
    progress: bool | None
    adapters: Mapping[str, str | os.PathLike[str]]
    mtp: bool
    drafter: str | os.PathLike[str] | None
    weights: str | os.PathLike[str]
    names: Names
    deterministic: bool


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
    """Loads a model and its tokenizer, if any, onto the default device or several devices.

    path_or_id: a folder with a Hugging Face checkpoint (safetensors; 16 bits, AWQ, GPTQ, FP8 or
        compressed-tensors' integers), a GGUF file, a folder that `mpjax.save` wrote, or a hub id
        such as `Qwen/Qwen3-8B-AWQ` or `Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf`, which is downloaded
        first.
    precision: such as `W4A16KV8`; docs/precision.md lists them. The linear maps of a 16-bit
        checkpoint are rounded to nearest if the precision has fewer bits, and those of a GGUF file
        if they have another format. Other quantised checkpoints must already have the precision's
        weight format; only `sym` need not match, because the zero points decide. Several W parts,
        as in `W16+W4A16KV8`, must all be in the checkpoint; `lm.precision` of a loaded model is
        always accepted. By default the weights keep their format, and the KV cache has 16 bits, or
        the saved model's format. Activations of an FP8 checkpoint have its own activation format,
        mostly FP8, unless a W part chooses another: `WFP8A16KV8`, `WFP8g128AFP8KV8`. With `W4Ax`
        for a 16-bit checkpoint, all activation blocks get 8 bits, with a warning; `quantize`
        measures which can have 4. A saved model keeps its blocks, with which the precision must
        agree.
    dtype: of 16-bit weights and activations: bfloat16, float16 or float32, also as bf16, fp16 and
        fp32 or as a dtype of NumPy, JAX or PyTorch. By default float32 if the precision has A32,
        else the checkpoint's.
    max_positions: the most tokens of a sequence (prompt and new tokens), instead of the
        checkpoint's max_position_embeddings. Nothing else changes.
    page_size: tokens in a page of the KV cache: 16, 32, 64, 128 or 256. Each sequence's cache is
        rounded up to whole pages.
    devices: among which the model is divided, each with a share of every layer: a number, a list of
        `jax.devices()`, or a mesh with one axis. By default, and for 1, the default device holds
        the whole model. See docs/devices.md.
    experts: with several devices, whether each device has a part of every expert (`divided`, the
        default), or some whole experts (`whole`, expert parallelism).
    family: the family to load the model as, such as `llama`: for an unknown architecture that
        computes the same. Keys and tensors must fit; config keys that the family doesn't know give
        a warning.
    verify: whether to verify the checksums of a model that `mpjax.save` wrote, which detects
        damage; True by default. Other checkpoints have no checksums.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.
    mtp: whether to load the checkpoint's multi-token-prediction head, too, for `speculate="mtp"`;
        see docs/speculation.md. False, the default, also for a saved model with its head.
    drafter: the folder or hub id of an EAGLE-3 head for `speculate="eagle"`, in the layout of
        SafeAILab, SpecForge or speculators. Its maps get the format of the model's attention.
    adapters: folders or hub ids of LoRA adapters, by the names for requests; see
        `LanguageModel.add_adapter`, and docs/adapters.md.
    weights, names: an Orbax checkpoint of another library, which is read instead of the folder's
        tensors, and the names of its arrays, as for `mpjax.by_file_names`. Arrays with all layers
        are kept on the host while the model is loaded.
    deterministic: whether a token's logits, to the bit, depend on nothing but the model and the
        tokens before it; slower. See docs/rollouts.md.

    Raises CheckpointError for a path or checkpoint that can't be loaded; ValueError for a precision
    or dtype that the checkpoint doesn't have, max_positions below 1, an invalid page size, missing
    devices or a number that can't divide the model, and whole experts on one device; and
    mpjax.memory.DeviceMemoryError, before anything is allocated, if a device lacks memory.
    """
    if unknown := reading.keys() - Reading.__annotations__.keys():
        raise TypeError(f"load() got an unexpected keyword argument {unknown.pop()!r}")
    mesh = read_devices(devices)
    experts = read_experts(reading.get("experts", "divided"), 1 if mesh is None else mesh.size)
    progress, deterministic = reading.get("progress"), reading.get("deterministic", False)
    require_type("deterministic", deterministic, bool)
    precision = None if precision is None else Precision.of(precision)
    dtype = compute_dtype(dtype, precision)
    if max_positions is not None:
        max_positions = positive_whole("max_positions", max_positions)
    page_size = read_page_size(page_size, KVFormat() if precision is None else precision.kv)
    folders, mtp = _find_adapters(reading.get("adapters", {})), reading.get("mtp", False)
    require_type("mtp", mtp, bool)
    drafter = reading.get("drafter")
    if drafter is not None:
        require_type("drafter", drafter, str, os.PathLike, hint=", the folder of an EAGLE-3 head")
        drafter = find_folder(drafter).resolve()
    folder = find_folder(path_or_id).resolve()
    family = reading.get("family")
    if is_saved(folder):
        for name in ("family", "weights", "names"):
            if (given := reading.get(name)) is not None:
                raise ValueError(
                    f"{name} is {given!r:.80}: a saved model has its own, leave it out"
                )
        verify = reading.get("verify", True)
        lm = restoring.restore(
            folder,
            precision=precision,
            dtype=dtype,
            mesh=mesh,
            verify=verify,
            progress=progress,
            experts=experts,
            drafts=mtp,
        )
        has_head = lm.config.depth < lm.config.num_layers
        if mtp and not has_head:
            raise CheckpointError(
                f"{folder} was saved without a multi-token-prediction head: load the original "
                "checkpoint with mtp=True, and save it again"
            )
        if has_head and not mtp:
            lm = lm.with_model(lm.model.without_drafts())
        lm = _with_drafter(lm, drafter, progress)
        return _finished(lm, max_positions, page_size, folders, deterministic)
    source = dataclasses.replace(_open(folder, reading), family=family, mtp=mtp)
    tokenizer = source.read_tokenizer()
    model = huggingface.load(
        source, precision=precision, dtype=dtype, progress=progress, mesh=mesh, experts=experts
    )
    if precision is not None:
        set_uncalibrated(model, precision)
    kv_format = KVFormat() if precision is None else precision.kv
    lm = LanguageModel(model, tokenizer, kv_format, folder, sampling=source.read_sampling())
    lm = _with_drafter(lm, drafter, progress)
    return _finished(lm, max_positions, page_size, folders, deterministic)


def require_loadable(
    path_or_id: str | os.PathLike[str],
    precisions: Iterable[Precision],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    devices: Devices | None = None,
    calibrated: bool = False,
) -> None:
    """Raises the errors of `load` for precisions that a checkpoint doesn't have, or lacking memory.

    Also raises the errors of the first use of their KV caches. Reads only headers, and compares the
    free memory with each model separately. The division of a saved model among devices isn't
    checked.

    precisions: the precisions to check; consecutive ones with the same weights share the reading of
        headers. calibrated: whether `mpjax.calibrate_cache` will provide the cache scales.
    """
    folder, mesh = find_folder(path_or_id).resolve(), read_devices(devices)
    with warnings.catch_warnings(action="ignore"):  # `load` and the cache's use will warn
        for _, group in itertools.groupby(precisions, lambda one: one.of_weights):
            precision, *others = group
            model = _outline(folder, precision, compute_dtype(dtype, precision), mesh)
            for kv in (one.kv for one in (precision, *others)):
                if not (calibrated and kv.scaling):
                    jax.eval_shape(functools.partial(model.create_cache, 1, 1, kv))


def _outline(
    folder: Path, precision: Precision, dtype: str | None, mesh: jax.sharding.Mesh | None
) -> Decoder:
    """The undivided decoder of `load`, abstract, with cache scales of 1.

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


def _open(folder: Path, reading: Reading | None = None) -> Source:
    """The source of a folder or GGUF file. Raises CheckpointError if it has no model.

    reading: may have the weights of an Orbax checkpoint, with the names of its arrays.
    """
    if not folder.is_file() and not os.path.lexists(folder / CONFIG_NAME):
        raise CheckpointError(
            f"{folder} has neither {CONFIG_NAME} nor {DESCRIPTION_NAME}: "
            f"expected a Hugging Face checkpoint, or one that mpjax saved{foreign.describe(folder)}"
        )
    reading = Reading() if reading is None else reading
    weights, names = reading.get("weights"), reading.get("names")
    if weights is None and names is None:
        return locate(folder)
    if not isinstance(weights, str | os.PathLike) or names is None:
        raise ValueError(
            f"weights is {shown(weights)} and names is {shown(names)}: expected the folder of an "
            "Orbax checkpoint, and the names of its arrays, such as 'maxtext-llama'"
        )
    if folder.is_file():
        raise ValueError(
            f"weights is {shown(weights)} and the model is {folder}, a GGUF file, which has "
            "weights of its own: give a folder with config.json, or leave weights out"
        )
    return TreeFolder(folder, weights=_parse_path(weights), names=names)


def _find_adapters(adapters: Any) -> dict[str, Path]:
    """The adapters' folders; hub ids are downloaded. Raises ValueError unless it is a mapping."""
    if not isinstance(adapters, Mapping):
        raise ValueError(f"adapters is {shown(adapters)}: expected folders by their names")
    return {name: find_folder(folder) for name, folder in adapters.items()}


def _with_drafter(lm: LanguageModel, folder: Path | None, progress: bool | None) -> LanguageModel:
    return lm if folder is None else lm.with_model(add_drafter(lm.model, folder, progress))


def _finished(
    lm: LanguageModel,
    positions: int | None,
    page_size: int,
    adapters: Mapping[str, Path],
    deterministic: bool,
) -> LanguageModel:
    """The model with its page size, mode and adapters; limits its positions in place."""
    if positions is not None:
        lm.model.limit_positions(positions)
    lm = dataclasses.replace(lm, page_size=page_size)
    lm = lm.in_mode(deterministic=deterministic)
    if adapters:
        found = {name: read_adapter(folder, lm.model) for name, folder in adapters.items()}
        lm.adapters.add(lm.model, found)
    return lm


def bundled_model() -> Path:
    """The folder of the small model that is bundled with mpjax, for `load`."""
    return Path(__file__).parent / "bundled"


def find_folder(path_or_id: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file at a path, or of a hub id, which is downloaded.

    Raises CheckpointError for other paths, and if the download fails.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise ValueError(f"the model is {shown(path_or_id)}: expected a folder's path or a hub id")
    if path_or_id == "":  # pathlib would take it for the current folder
        raise CheckpointError(
            "the model's folder is empty text: give a folder, a GGUF file or a hub id; the current "
            "folder is ."
        )
    path = _parse_path(path_or_id)
    if not path.exists():  # a killed save may have moved it away
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
    """Downloads a hub repository, or one GGUF file of it; returns its path."""
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
    """The path, with ~ expanded. Raises CheckpointError for an impossible path."""
    try:
        path = Path(path_or_id).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~ without a home, a null byte
        raise CheckpointError(f"{path_or_id} can't be a folder: {error}") from error
    return path
