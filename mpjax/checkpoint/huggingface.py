"""Loads a Hugging Face checkpoint folder, quantised or not, or a GGUF file.

One tensor at a time is copied from the memory-mapped file to the device, so host memory never holds
more than the largest tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.arguments import compute_dtype
from mpjax.checkpoint import agreement, kv_scales
from mpjax.checkpoint.convert import (
    Read,
    as_checkpoint_errors,
    convert_array,
    convert_experts,
    convert_linear,
)
from mpjax.checkpoint.fused_experts import split_experts
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.packed_tables import packed, tables_of
from mpjax.checkpoint.plan import LinearSource, Plan, is_quantized, make_plan
from mpjax.checkpoint.progress import bytes_bar
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.checkpoint.settle import settle
from mpjax.checkpoint.source import Source
from mpjax.checkpoint.windows import narrow
from mpjax.errors import CheckpointError
from mpjax.memory import require_free_on
from mpjax.models import (
    ConfigError,
    Decoder,
    DecoderConfig,
    ExpertPlace,
    LinearPlace,
)
from mpjax.models.division import Division
from mpjax.models.mtp import with_mtp
from mpjax.models.registry import families, family, taken_for, unknown_keys
from mpjax.models.registry import read_config as read_config_of
from mpjax.models.sharded import ShardedDecoder
from mpjax.models.share import ExpertDivision
from mpjax.models.window import Window
from mpjax.precision import Precision


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint of which only the headers have been read.

    policy: how quantised modules are read; None without any, or if config.json has none.
    """

    path: Path
    decoder: type[Decoder]
    config: DecoderConfig
    checkpoint: Checkpoint
    policy: Policy | None

    @property
    def is_quantized(self) -> bool:
        """Whether any module is quantised, by its tensors alone, not config.json."""
        return is_quantized(self.checkpoint)


def open_headers(source: str | os.PathLike[str] | Source) -> Opened:
    """Reads the headers of a folder or GGUF file. Raises CheckpointError if it can't be loaded."""
    source = source if isinstance(source, Source) else locate(Path(source))
    hf = source.read_config()
    if source.family is not None:
        hf = taken_for(hf, source.family)
        agreement.warn_of_keys(source.path, unknown_keys(hf, family(hf)), source.family)
    try:
        decoder, config = decoder_config(source.path, hf)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_hint(source, hf)}") from error
    checkpoint, config = settle(split_experts(source.open(), decoder), decoder, config, hf)
    config = _with_head(source.path, checkpoint, decoder, config) if source.mtp else config
    policy = source.read_policy(hf)
    if not is_quantized(checkpoint):  # decided by tensors, not config.json
        agreement.warn_of_plain(source.path, hf.get("quantization_config"))
        policy = None
    return Opened(source.path, decoder, config, checkpoint, policy)


def _with_head(
    path: Path, checkpoint: Checkpoint, decoder: type[Decoder], config: DecoderConfig
) -> DecoderConfig:
    """The configuration with the layer of the checkpoint's multi-token-prediction head.

    Raises CheckpointError if the family or the files have none, or one of several layers.
    """
    try:
        config = with_mtp(config, decoder.draft_names)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    places = decoder.array_places(config)
    [name] = (place.name for place in places if place.path.endswith("attention.joint"))
    if name not in checkpoint.tensors:
        raise CheckpointError(
            f"{path} has no tensor {name}: it lacks the multi-token-prediction head, as files do "
            "that transformers has saved; load it without mtp, or take the original checkpoint"
        )
    prefix = name.partition(".")[0]
    if any(name.startswith(f"{prefix}.layers.1.") for name in checkpoint.tensors):
        raise CheckpointError(
            f"{path} has a multi-token-prediction head of several layers: expected one; load it "
            "without mtp"
        )
    return config


def _hint(source: Source, hf: Mapping[str, Any]) -> str:
    """A hint for an unknown architecture: the families that its config.json and tensors fit."""
    with contextlib.suppress(ConfigError):
        family(hf)
        return ""
    found, checkpoint = [], source.open()
    for name, decoder in families().items():
        with contextlib.suppress(ConfigError, CheckpointError, ValueError):
            written = taken_for(hf, name)
            config = decoder.config_from_hf(written)
            parts = settle(split_experts(checkpoint, decoder), decoder, config, written)
            make_plan(parts[0], decoder, parts[1], source.read_policy(hf), None)
            found.append(name)
    if not found and not {"vocab_size", "text_config"} & {*hf} and hf:
        return "; it has no vocab_size, so that it is no language model: one of images or sounds?"
    if not found:
        return ""
    return (
        f"; it has the keys and tensors of {', '.join(found)}: if it computes what one of them "
        f"does, load it with family={found[0]!r}"
    )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A checkpoint that can be loaded by its headers; nothing is read or allocated yet.

    opened: with the policy chosen by the precision. model: abstract, without array values.
    """

    opened: Opened
    plan: Plan
    model: Decoder


def prepare(
    source: str | os.PathLike[str] | Source,
    *,
    precision: Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    experts: ExpertDivision = "divided",
) -> Prepared:
    """Checks the arguments of `load` by the headers, and raises its errors. Reads no tensor."""
    dtype, opened = compute_dtype(dtype, precision), open_headers(source)
    if mesh is not None and opened.config.labels is not None:
        raise ValueError(f"{opened.path} is a classifier: load it on one device")
    folder, config, policy, quantize = opened.path, opened.config, opened.policy, None
    if not opened.is_quantized:
        quantize = agreement.format_to_quantize(precision)
    elif policy is not None:
        policy = agreement.choose(folder, policy, precision)
        quantize = policy.target if policy.target and policy.target.is_packed else None
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    elif precision is not None and config.dtype == "float32":  # `settle` has set the dtype
        config = dataclasses.replace(config, dtype="bfloat16")  # `compute_dtype` has handled A32
    named = tables_of({} if precision is None else precision.tables, config)
    plan = make_plan(opened.checkpoint, opened.decoder, config, policy, quantize, packed(named))
    agreement.require_mixture(folder, plan, precision)
    agreement.require_tables(folder, plan, named)
    working = plan.working_bytes + (0 if mesh is None else plan.undivided_bytes)
    require_free_on(mesh, plan.device_bytes, f"loading {folder}", working)
    model = _empty(opened.decoder, plan, mesh, experts)
    return Prepared(dataclasses.replace(opened, policy=policy), plan, model)


def load(
    source: str | os.PathLike[str] | Source,
    *,
    precision: Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    progress: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
    experts: ExpertDivision = "divided",
) -> Decoder:
    """Loads a decoder with its weights onto the default device, or divided among several.

    source: a folder, a GGUF file, or a Source.
    precision: with a packed weight format, the linear maps of a 16-bit checkpoint are rounded to
        nearest on the device; a quantised checkpoint must already have that format. An FP8
        checkpoint rounds activations as in config.json, unless the precision has a W part. A
        checkpoint's scales for an FP8 cache become the model's cache_scales, which KVfp8 uses.
    dtype: of activations and unpacked weights; float32 with A32. None: the dtype of config.json, or
        of the embedding tensor if config.json has none; with A16, float32 becomes bfloat16.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.
    mesh: the devices among which the decoder is divided. Each linear map (and a few experts at a
        time) is converted on the default device, and then distributed before the next is read.
    experts: how experts are divided among devices; see `mpjax.load`.

    Raises CheckpointError for a folder that can't be loaded, ValueError for a precision that the
    checkpoint doesn't have, and mpjax.memory.DeviceMemoryError, before anything is allocated, if
    the device lacks memory.
    """
    prepared = prepare(source, precision=precision, dtype=dtype, mesh=mesh, experts=experts)
    opened, plan, model = prepared.opened, prepared.plan, prepared.model
    agreement.warn_of_experts(opened.path, opened.policy, plan)
    if precision is not None and not plan.cache_scales:
        kv_scales.warn_of_dropped(opened.path, opened.checkpoint.tensors, precision.kv)
    with bytes_bar("Loading", opened.path, progress, plan.file_bytes) as advance:
        fill(model, opened.checkpoint, plan, advance)
    return model


def _empty(
    decoder: type[Decoder], plan: Plan, mesh: jax.sharding.Mesh | None, experts: ExpertDivision
) -> Decoder:
    """An abstract decoder, without array values, for `fill`."""
    if mesh is None:
        return nnx.eval_shape(lambda: decoder(plan.config, nnx.Rngs(0)))
    formats = {place.path: [source.format for source in sources] for place, sources in plan.linears}
    division = Division.of(decoder, plan.config, mesh.size, formats, experts)
    return ShardedDecoder.of(division, mesh)


def open_plain(
    folder: Path, dtype: jax.typing.DTypeLike | None = None
) -> tuple[Decoder, Checkpoint, Plan]:
    """Opens an unquantised checkpoint; returns an abstract decoder for `fill`, tensors and plan.

    dtype: the dtype in which the decoder computes; None as in `load`, but float32 becomes bfloat16.

    Raises CheckpointError for a folder that can't be loaded, or is quantised.
    """
    opened = open_headers(folder)
    config = opened.config
    if opened.is_quantized:
        raise CheckpointError(
            f"{folder} is quantised already: take the 16-bit checkpoint that it was made from"
        )
    if dtype is None and config.dtype == "float32":
        dtype = "bfloat16"
    if dtype is not None:
        config = dataclasses.replace(config, dtype=jnp.dtype(dtype).name)
    plan = make_plan(opened.checkpoint, opened.decoder, config, None, None)
    return nnx.eval_shape(lambda: opened.decoder(config, nnx.Rngs(0))), opened.checkpoint, plan


def read_config(folder: Path) -> dict[str, Any]:
    """The keys of config.json. Raises CheckpointError if it can't be read."""
    return locate(folder).read_config()


def decoder_config(folder: Path, hf: Mapping[str, Any]) -> tuple[type[Decoder], DecoderConfig]:
    """The decoder's class and its configuration from a config.json.

    Raises CheckpointError for an architecture or a value that is not supported.
    """
    try:
        return read_config_of(hf)
    except ConfigError as error:  # its messages begin with the file's name
        raise CheckpointError(f"{folder}{os.sep}{error}") from error


def read_policy(folder: Path, hf: Mapping[str, Any]) -> Policy | None:
    """The policy of config.json's quantization_config; None without one.

    Raises CheckpointError if no scheme can read it.
    """
    return locate(folder).read_policy(hf)


def fill(
    model: Decoder,
    checkpoint: Checkpoint,
    plan: Plan,
    advance: Callable[[int], None] = lambda count: None,
    belongs: Callable[[str], bool] = lambda path: True,
) -> None:
    """Reads the tensors of a plan into a model, one parameter after another.

    advance: called with each tensor's bytes when it is first read. belongs: whether to fill the
    parameter at a path; others are not changed.
    """
    dtype, unread = plan.config.dtype, set(checkpoint.tensors)

    def read(info: TensorInfo) -> np.ndarray:
        advance(info.nbytes if info.name in unread else 0)
        unread.discard(info.name)
        return checkpoint.read(info.name)

    for array, taken in plan.arrays:
        if belongs(array.path):
            rows = model.rows(array) if isinstance(taken, TensorInfo) else None
            read_rows = read if rows is None else functools.partial(_read_rows, read, rows)
            value = convert_array(taken, array.dtype or dtype, read_rows)
            value = value + jnp.float32(array.offset) if array.offset else value
            value = value.reshape(array.shape) if array.leading else value
            model.put_array(array, jax.block_until_ready(value), rows)
    for place, sources in plan.linears:
        if belongs(place.path):
            _fill_linears(model, place, sources, dtype, read)
    if plan.cache_scales and belongs("cache_scales"):
        scales = kv_scales.read(plan.cache_scales, plan.config.num_kv_heads, read)
        lacking = plan.config.num_layers - len(scales)  # of a layer that drafts
        scales = np.pad(scales, ((0, lacking), (0, 0), (0, 0)), constant_values=1)
        model.put_cache_scales(jnp.asarray(scales))


def _fill_linears(
    model: Decoder,
    place: LinearPlace,
    sources: tuple[LinearSource, ...],
    dtype: str,
    read: Read,
) -> None:
    windows = model.windows(place)
    if windows is not None:
        sources, windows = narrow(sources, windows, read)
    if isinstance(model, ShardedDecoder) and isinstance(place, ExpertPlace):
        stacks = convert_experts(place.within(windows), sources, dtype, read)
        with as_checkpoint_errors():
            model.put_experts(place, stacks, windows)
        return
    parts = convert_linear(place.within(windows), sources, dtype, read)
    jax.block_until_ready([nnx.state(part) for part in parts])
    model.put_linears(place, parts, windows)


def _read_rows(read: Read, rows: Window, info: TensorInfo) -> np.ndarray:
    return read(info)[rows.begin : rows.end]
