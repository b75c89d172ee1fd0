"""Loads a Hugging Face checkpoint folder: config.json and safetensors, plain or quantised.

One tensor at a time goes from the mapped file to the device, so that host memory never holds more
than the largest tensor.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.arguments import compute_dtype
from mpjax.checkpoint import agreement, kv_scales
from mpjax.checkpoint.convert import convert_array, convert_linear
from mpjax.checkpoint.packed_tables import packed, tables_of
from mpjax.checkpoint.plan import Plan, is_quantized, make_plan
from mpjax.checkpoint.progress import bytes_bar
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.schemes import registry
from mpjax.checkpoint.schemes.base import Scheme
from mpjax.checkpoint.settle import settle
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat, files
from mpjax.memory import require_free_on
from mpjax.models import ConfigError, Decoder, DecoderConfig, family
from mpjax.models.division import Division
from mpjax.models.sharded import ShardedDecoder
from mpjax.precision import Precision

CONFIG_NAME = "config.json"


def load(
    folder: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    progress: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Decoder:
    """Loads a decoder with its weights onto the default device, or divided among several.

    precision: a packed weight format rounds the linear maps of a 16-bit checkpoint to nearest, one
        by one on the device; a quantised checkpoint must already have it. An FP8 checkpoint rounds
        activations as config.json says, unless the precision has a W part, which decides then. A
        checkpoint's scales for an FP8 cache become the model's cache_scales; a cache uses them if
        the precision has KVfp8.
    dtype: of activations, and of weights that are not packed. A precision of A32 makes it float32.
        Otherwise, if it is None, config.json decides, or the dtype of the embedding tensor if
        config.json has none; but a precision of A16 makes bfloat16 of float32.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.
    mesh: the devices among which the decoder is divided. Each linear map is converted as a whole on
        the default device, and every device gets its share of it before the next is read.

    Raises CheckpointError for a folder that can't be loaded, ValueError for a precision that the
    checkpoint doesn't have, and mpjax.memory.DeviceMemoryError, before anything is allocated, where
    the device does not have enough memory left.
    """
    folder, dtype = Path(folder), compute_dtype(dtype, precision)
    hf = read_config(folder)
    decoder, config = decoder_config(folder, hf)
    checkpoint, config = settle(Checkpoint.open(folder), decoder, config, hf)
    scheme, quantize = read_scheme(folder, hf), None
    if not is_quantized(checkpoint):  # by its tensors, whatever quantization_config says
        scheme = None
        quantize = agreement.format_to_quantize(precision)
    elif scheme is not None:
        scheme = agreement.choose(folder, scheme, precision)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    elif precision is not None and config.dtype == "float32":  # `settle` has set the dtype
        config = dataclasses.replace(config, dtype="bfloat16")  # A32 has set `dtype` above
    named = tables_of({} if precision is None else precision.tables, config)
    plan = make_plan(checkpoint, decoder, config, scheme, quantize, packed(named))
    agreement.require_mixture(folder, plan, precision)
    agreement.require_tables(folder, plan, named)
    needed, what = plan.device_bytes, f"loading {folder}"
    require_free_on(mesh, needed, what, plan.working_bytes)
    model = _empty(decoder, plan, mesh)
    with bytes_bar("Loading", folder, progress, plan.file_bytes) as advance:
        fill(model, checkpoint, plan, advance)
    return model


def _empty(decoder: type[Decoder], plan: Plan, mesh: jax.sharding.Mesh | None) -> Decoder:
    """A decoder that `fill` fills, without numbers in its arrays."""
    if mesh is None:
        return nnx.eval_shape(lambda: decoder(plan.config, nnx.Rngs(0)))
    formats = {place.path: [source.format for source in sources] for place, sources in plan.linears}
    return ShardedDecoder.of(Division.of(decoder, plan.config, mesh.size, formats), mesh)


def open_plain(
    folder: Path,
    dtype: jax.typing.DTypeLike | None = None,
    tables: Mapping[str, WeightFormat] = types.MappingProxyType({}),
) -> tuple[Decoder, Checkpoint, Plan]:
    """A decoder that `fill` can fill part by part, from a checkpoint that is not quantised.

    dtype: what the decoder computes in. If it is None, the checkpoint decides, as in `load`, but
        float32 becomes bfloat16.
    tables: formats of the `head` and the `embedding`, to which `fill` rounds them.

    Raises CheckpointError for a folder that can't be loaded, or is quantised already; ValueError
    for two formats of a tied table.
    """
    hf = read_config(folder)
    decoder, config = decoder_config(folder, hf)
    checkpoint, config = settle(Checkpoint.open(folder), decoder, config, hf)
    if is_quantized(checkpoint):
        raise CheckpointError(
            f"{folder} is quantised already: take the 16-bit checkpoint that it was made from"
        )
    if dtype is None and config.dtype == "float32":
        dtype = "bfloat16"
    if dtype is not None:
        config = dataclasses.replace(config, dtype=jnp.dtype(dtype).name)
    rounded = packed(tables_of(tables, config))
    plan = make_plan(checkpoint, decoder, config, None, None, rounded)
    return nnx.eval_shape(lambda: decoder(plan.config, nnx.Rngs(0))), checkpoint, plan


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises CheckpointError where it is missing or not a JSON object."""
    path = folder / CONFIG_NAME
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}: expected a checkpoint folder")
    return files.read_object(path, CheckpointError)


def decoder_config(folder: Path, hf: Mapping[str, Any]) -> tuple[type[Decoder], DecoderConfig]:
    """The decoder's class and its configuration from a config.json.

    Raises CheckpointError for an architecture or a value that is not supported.
    """
    try:
        decoder = family(hf)
        return decoder, decoder.config_from_hf(hf)
    except ConfigError as error:  # its messages begin with the file's name
        raise CheckpointError(f"{folder}{os.sep}{error}") from error


def read_scheme(folder: Path, hf: Mapping[str, Any]) -> Scheme | None:
    """The scheme of config.json's quantization_config, None without one.

    Raises CheckpointError where no format here can read it.
    """
    written = hf.get("quantization_config")
    if written is None:
        return None
    path = folder / CONFIG_NAME
    if not isinstance(written, Mapping):
        raise CheckpointError(f"{path}: quantization_config is {written!r:.80}: expected an object")
    try:
        return registry.read(written)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def fill(
    model: Decoder,
    checkpoint: Checkpoint,
    plan: Plan,
    advance: Callable[[int], None] = lambda count: None,
    belongs: Callable[[str], bool] = lambda path: True,
) -> None:
    """Reads the tensors of a plan into a model, one parameter after another.

    advance: is called with the number of bytes of each tensor when it is read.
    belongs: whether to fill the parameter at a path; all others are left as they are.
    """
    dtype = plan.config.dtype

    def read(info: TensorInfo) -> np.ndarray:
        advance(info.nbytes)
        return checkpoint.read(info.name)

    for array, info in plan.arrays:
        if belongs(array.path):
            model.put_array(array, jax.block_until_ready(convert_array(info, dtype, read)))
    for place, sources in plan.linears:
        if belongs(place.path):
            parts = convert_linear(place, sources, dtype, read)
            jax.block_until_ready([nnx.state(part) for part in parts])
            model.put_linears(place, parts)
    if plan.cache_scales and belongs("cache_scales"):
        scales = kv_scales.read(plan.cache_scales, plan.config.num_kv_heads, read)
        model.put_cache_scales(jnp.asarray(scales))
