"""Loads a Hugging Face checkpoint folder: config.json and safetensors, plain, AWQ, GPTQ or FP8.

One tensor at a time goes from the mapped file to the device, so that host memory holds no more
than the largest of them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.arguments import compute_dtype
from mpjax.checkpoint import kv_scales
from mpjax.checkpoint.awq import BITS, AWQConfig
from mpjax.checkpoint.convert import convert_array, convert_linear
from mpjax.checkpoint.fp8_config import SCALE_NAMES, FP8Config
from mpjax.checkpoint.gptq_config import GPTQConfig
from mpjax.checkpoint.plan import Packing, Plan, make_plan
from mpjax.checkpoint.progress import bytes_bar
from mpjax.checkpoint.safetensors import Checkpoint, TensorInfo
from mpjax.checkpoint.settle import is_packed, settle
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat, WeightFormat, files
from mpjax.memory import require_free
from mpjax.models import CacheScales, ConfigError, Decoder, DecoderConfig, family
from mpjax.precision import DEFAULT_GROUP_SIZE, Precision, describe_weights

CONFIG_NAME = "config.json"


def load(
    folder: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    progress: bool | None = None,
) -> Decoder:
    """Loads a decoder with its weights onto the default device.

    precision: packed weights in it mean that the linear maps of a 16-bit checkpoint are rounded to
        nearest, one by one on the device; a checkpoint that is quantised already must agree. An FP8
        checkpoint has the activations that it was made for, or those of a precision with a W part.
        Scales for an FP8 cache become the model's, and count where the precision has KVfp8.
    dtype: what the model computes in; config.json's by default, or the embedding's where that says
        none, or bfloat16 where that is float32 and a precision, which has 16-bit activations, is
        given.
    progress: whether to show a bar on stderr; by default where stderr is a terminal.

    Raises CheckpointError for a folder that can't be loaded, ValueError for a precision that it
    doesn't have, and mpjax.memory.DeviceMemoryError, before anything is allocated, where the
    device has not enough memory left.
    """
    folder, dtype = Path(folder), compute_dtype(dtype, precision)
    hf = read_config(folder)
    decoder, config = decoder_config(folder, hf)
    checkpoint, config = settle(Checkpoint.open(folder), decoder, config, hf)
    packing = read_packing(folder, hf)
    if not is_packed(checkpoint):
        packing = None  # config.json is of a quantised checkpoint, and the tensors are not
    if isinstance(packing, FP8Config):
        packing = _with_activations(folder, packing, precision)
    quantize = _format_to_quantize(folder, hf, packing, precision)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    elif precision is not None and config.dtype == "float32":
        config = dataclasses.replace(config, dtype="bfloat16")  # what A16 means for such a file
    plan = make_plan(checkpoint, decoder, config, packing, quantize)
    _require_mixture(folder, plan, precision)
    require_free(plan.device_bytes + plan.working_bytes, f"loading {folder}")
    model = nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))
    _fill(model, checkpoint, plan, progress)
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises CheckpointError where it is missing or not a JSON object."""
    path = folder / CONFIG_NAME
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}: expected a checkpoint folder")
    return files.read_object(path, CheckpointError)


def decoder_config(folder: Path, hf: Mapping[str, Any]) -> tuple[type[Decoder], DecoderConfig]:
    """The decoder's class and configuration. Raises CheckpointError where no class fits."""
    try:
        decoder = family(hf)
        return decoder, decoder.config_from_hf(hf)
    except ConfigError as error:  # its messages begin with the file's name
        raise CheckpointError(f"{folder}{os.sep}{error}") from error


def read_packing(folder: Path, hf: Mapping[str, Any]) -> Packing | None:
    """What quantization_config says, None without one. Raises CheckpointError."""
    written = hf.get("quantization_config")
    if written is None:
        return None
    path = folder / CONFIG_NAME
    if not isinstance(written, Mapping):
        raise CheckpointError(f"{path}: quantization_config is {written!r:.80}: expected an object")
    method = written.get("quant_method", written.get("method"))
    if method not in ("awq", "gptq", *SCALE_NAMES):
        raise CheckpointError(
            f"{path}: quant_method {method!r:.80} is not supported: load an AWQ, GPTQ, FP8 or "
            "16-bit checkpoint of the model (a 16-bit one can be quantised with "
            "precision='W4A16KV8')"
        )
    try:
        if method in SCALE_NAMES:
            return FP8Config.from_config(written)
        config = AWQConfig if method == "awq" else GPTQConfig
        return config.from_config(written)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _with_activations(folder: Path, packing: FP8Config, precision: Precision | None) -> FP8Config:
    """The config with the activations to multiply with: those of the precision, or its own."""
    names = precision_names(packing, KVFormat() if precision is None else precision.kv)
    if precision is None or not precision.formats:
        if packing.unsupported is None:
            return packing
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: it was made for activations in {packing.unsupported}, which "
            f"are not implemented: ask for the precision {names}, which leave the weights as they "
            "are"
        )
    for choice in _choices(packing):
        if choice.format in precision.formats:
            return choice
    raise ValueError(
        f"precision is {precision}, but {folder} is an FP8 checkpoint that can't be quantised "
        f"again: ask for {names}, or load a 16-bit checkpoint"
    )


def precision_names(packing: FP8Config, kv: KVFormat) -> str:
    """The precisions that an FP8 checkpoint can be loaded in, for messages."""
    return " or ".join(str(Precision(choice.format, kv)) for choice in _choices(packing))


def _choices(packing: FP8Config) -> list[FP8Config]:
    return [
        dataclasses.replace(packing, activations=activations, unsupported=None)
        for activations in (None, "float8")
    ]


def _format_to_quantize(
    folder: Path,
    hf: Mapping[str, Any],
    packing: Packing | None,
    precision: Precision | None,
) -> WeightFormat | None:
    """The format to round weights to; ValueError where a quantised checkpoint has another."""
    if precision is None or precision.weights is None:
        return None
    wanted = precision.weights
    if packing is None:
        return wanted if wanted.is_packed else None
    if isinstance(packing, FP8Config):
        return None
    bits = BITS if isinstance(packing, AWQConfig) else packing.bits
    # Whether zero points are all the middle is seen as they are read, whatever it is called.
    if (wanted.codes, wanted.group_size) != (f"uint{bits}", packing.group_size):
        size = "K" if packing.group_size is None else packing.group_size
        found = f"W{bits}" + ("" if size == DEFAULT_GROUP_SIZE else f"g{size}")
        method = "an AWQ" if isinstance(packing, AWQConfig) else "a GPTQ"
        raise ValueError(
            f"precision is {precision}, but {folder} is {method} checkpoint of {found} that can't "
            f"be quantised again: ask for {found}A16{precision.kv}, or load a 16-bit checkpoint"
        )
    return None


def _require_mixture(folder: Path, plan: Plan, precision: Precision | None) -> None:
    """Raises ValueError where weights are to be a mixture that the checkpoint is not."""
    if precision is None or not precision.mixture:
        return
    sources = [source for _, sources in plan.linears for source in sources]
    found = {source.format or WeightFormat("bfloat16") for source in sources}
    if not precision.agrees_with(found):
        names = sorted(describe_weights(format, precision.bits) for format in found)
        raise ValueError(
            f"precision is {precision}, but the weights in {folder} are {'+'.join(names)}: ask for "
            f"A{precision.bits}{precision.kv}, which leaves them as they are"
        )


def _fill(model: Decoder, checkpoint: Checkpoint, plan: Plan, progress: bool | None) -> None:
    """Puts all weights in their places, waiting for each before the next tensor is mapped."""
    dtype = plan.config.dtype
    with bytes_bar("Loading", checkpoint.folder, progress, plan.file_bytes) as advance:

        def read(info: TensorInfo) -> np.ndarray:
            advance(info.nbytes)
            return checkpoint.read(info.name)

        for array, info in plan.arrays:
            array.assign(model, jax.block_until_ready(convert_array(info, dtype, read)))
        for place, sources in plan.linears:
            parts = convert_linear(place, sources, dtype, read)
            jax.block_until_ready([nnx.state(part) for part in parts])
            place.assign(model, parts)
        if plan.cache_scales:
            scales = kv_scales.read(plan.cache_scales, plan.config.num_kv_heads, read)
            model.cache_scales = CacheScales(jnp.asarray(scales))
