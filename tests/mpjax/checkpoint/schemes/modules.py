"""A module of each checkpoint format, written from the format's description in NumPy."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpjax.kernels.codes.table import normal_float
from tests.mpjax.checkpoint.packers import pack_awq, pack_gptq, pack_words
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    FP8,
    GPTQ,
    HQQ,
    compressed_fp8,
    compressed_integers,
    hqq,
)

NAME = "model.layers.0.mlp.down_proj"
E4M3 = ml_dtypes.float8_e4m3fn
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])
STATE = "weight.quant_state.bitsandbytes__nf4"
# The channels of 32 in the order in which a `gemv_fast` file holds them.
ORDER = np.concatenate([[r + 2 * p + 8 * q for q in range(4) for r in (0, 1)] for p in range(4)])
ORDER = ORDER.reshape(4, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)

Module = tuple[dict[str, Any], np.ndarray]  # tensors by suffix, and the weight [K, N]
Make = Callable[[np.random.Generator, tuple[int, int]], Module]


class Form(NamedTuple):
    """A format: its `quantization_config`, its modules, and the weight format when loaded.

    error: of the loaded weights, relative to the largest of them; 0 where codes and scales stay.
    """

    config: dict[str, Any]
    module: Make
    format: str
    error: float = 0


def integers(rng, shape, bits=4, group=32, symmetric=False, g_idx=None):
    """Codes [K, N], scales float16 [groups, N], zero points, and the weight that they stand for."""
    channels, outputs = shape
    g_idx = np.arange(channels) // group if g_idx is None else g_idx
    codes = rng.integers(0, 2**bits, shape, np.uint8)
    zeros = rng.integers(0, 2**bits, (channels // group, outputs), np.uint8)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    weight = (codes.astype(np.float32) - zeros[g_idx]) * scales[g_idx].astype(np.float32)
    return (codes, scales, zeros), weight


def awq(rng, shape, group=32) -> Module:
    found, weight = integers(rng, shape, group=group or shape[0])
    return pack_awq(*found), weight


def gptq(rng, shape, bits=4, group=32, version=1, order=False) -> Module:
    g_idx = np.arange(shape[0]) // group
    g_idx = rng.permutation(g_idx) if order else g_idx
    found, weight = integers(rng, shape, bits, group, g_idx=g_idx)
    return pack_gptq(*found, g_idx, bits, version), weight  # type: ignore[call-arg]


def gemv(rng, shape, layout="gemv", group=32) -> Module:
    channels, outputs = shape
    codes = rng.integers(0, 16, shape[::-1])
    groups = channels // group
    zeros = rng.integers(0, 16, (outputs, groups))
    scales = rng.uniform(0.01, 0.1, (outputs, groups)).astype(np.float16)
    width = {32: 4, 64: 2}.get(group, 1)
    padding = (0, 0), (0, -(-groups // (8 * width)) * 8 * width - groups)
    stored = np.pad(scales, padding)
    if layout == "gemv":
        tensors = {"qweight": pack_words(codes, 4), "qzeros": pack_words(np.pad(zeros, padding), 4)}
        minima, tensors["scales"] = -zeros * scales.astype(np.float64), stored
    else:
        minima = (-scales * zeros.astype(np.float32)).astype(np.float16)
        ordered = codes.reshape(outputs, -1, 32)[..., ORDER].reshape(outputs // 4, 4, -1, 64)
        rows = ordered.transpose(0, 2, 1, 3).reshape(outputs // 4, -1)
        tensors = {"qweight": pack_words(rows, 4).view(np.int16)}
        tensors["scales"] = np.ascontiguousarray(stored.T)
        tensors["scaled_zeros"] = np.ascontiguousarray(np.pad(minima, padding).T)
    steps, offsets = (np.repeat(x.astype(np.float64), group, 1) for x in (scales, minima))
    return tensors, (codes * steps + offsets).T


def packed(rng, shape, bits=4, group=32, symmetric=True, order=False) -> Module:
    """compressed-tensors' `pack-quantized`; words at the end of rows may be cut."""
    size = group or shape[0]
    g_idx = np.arange(shape[0]) // size
    g_idx = rng.permutation(g_idx) if order else g_idx
    (codes, scales, zeros), weight = integers(rng, shape, bits, size, symmetric, g_idx)
    tensors = {
        "weight_packed": pack_words(codes.T, bits),
        "weight_scale": np.ascontiguousarray(scales.T),
        "weight_shape": np.array(shape[::-1]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(zeros, bits).T)
    return tensors | ({"weight_g_idx": g_idx.astype(np.int32)} if order else {}), weight


def bytes_of(rng, shape, by_channel=True, dtype=np.float32, static=False) -> Module:
    """`int-quantized`: codes int8 [N, K] and scales [N, 1] or [1]."""
    codes = rng.integers(-128, 128, shape[::-1], np.int8)
    scales = rng.uniform(0.01, 0.1, (shape[1], 1) if by_channel else 1).astype(dtype)
    tensors = {"weight": codes, "weight_scale": scales}
    tensors |= {"input_scale": np.full(1, 0.25, np.float32)} if static else {}
    return tensors, (codes * scales.astype(np.float32)).T


def fp8(rng, shape, block=(128, 128), name="weight_scale", grid=None, static=False) -> Module:
    """Codes of all bits but NaN; grid: the shape of the scales, where it is another one."""
    channels, outputs = shape
    codes = rng.integers(0, 256, shape[::-1], np.uint8)
    codes[codes % 128 == 127] = 0
    rows, columns = block[0] or outputs, block[1] or channels
    scales = rng.uniform(0.01, 0.1, (-(-outputs // rows), -(-channels // columns)))
    scales = scales.astype(np.float32)
    wide = np.repeat(np.repeat(scales, rows, 0)[:outputs], columns, 1)[:, :channels]
    stored = scales[0] if block[0] is None and grid is None else scales
    stored = stored if grid is None else stored.reshape(grid)
    tensors = {"weight": codes.view(E4M3), name: stored}
    tensors |= {"input_scale": np.full(1, 0.25, np.float32)} if static else {}
    return tensors, (codes.view(E4M3).astype(np.float32) * wide).T


def nvfp4(rng, shape, compressed=True) -> Module:
    """All codes and all positive scales."""
    channels, outputs = shape
    codes = rng.integers(0, 16, shape[::-1], np.uint8)
    bits = np.arange(outputs * channels // 16, dtype=np.int64) % 127  # positive, without NaN
    scales = bits.astype(np.uint8).view(E4M3).reshape(outputs, -1)
    nibbles = codes[:, ::2] | codes[:, 1::2] << 4
    wide = E2M1[codes] * np.repeat(scales.astype(np.float64), 16, axis=1)
    if compressed:
        tensors = {"weight_packed": nibbles, "weight_scale": scales}
        return tensors | {"weight_global_scale": np.float32([96.0])}, (wide / 96).T
    tensors = {"weight": nibbles, "weight_scale": scales}
    return tensors | {"weight_scale_2": np.array(2**-6, np.float32)}, (wide * 2**-6).T


def state(shape, **more) -> np.ndarray:
    """The state of a bitsandbytes module of a weight [N, K]."""
    values = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    return np.frombuffer(json.dumps(values | more).encode(), np.uint8)


def nf4(rng, shape, nested=False) -> Module:
    codes, table = rng.integers(0, 16, shape[::-1], np.uint8), normal_float(4)
    flat = codes.reshape(-1)
    blocks = flat.size // 64
    tensors = {
        "weight": (flat[::2] << 4 | flat[1::2])[:, None],
        "weight.quant_map": table,
        STATE: state(shape[::-1]),
    }
    scales = rng.uniform(0.1, 1, blocks).astype(ml_dtypes.bfloat16).astype(np.float32)
    tensors["weight.absmax"] = scales
    if nested:
        inner = rng.integers(0, 256, blocks, np.uint8)
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        outer = rng.uniform(0.1, 0.2, -(-blocks // 8)).astype(np.float32)
        scales = values[inner] * np.repeat(outer, 8)[:blocks] + np.float32(0.5)
        tensors |= {
            "weight.absmax": inner,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": values,
            STATE: state(shape[::-1], nested_blocksize=8, nested_offset=0.5),
        }
    return tensors, (table[codes] * np.repeat(scales, 64).reshape(codes.shape)).T


def mxfp4(rng, shape) -> Module:
    channels, outputs = shape
    blocks = rng.integers(0, 256, (outputs, channels // 32, 16), np.uint8)
    scales = rng.integers(100, 140, (outputs, channels // 32), np.uint8)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(outputs, -1, 32)
    wide = E2M1[codes] * 2.0 ** (scales.astype(float) - 127)[..., None]
    return {"blocks": blocks, "scales": scales}, wide.reshape(outputs, channels).T


def of_hqq(rng, shape, group=32, bits=4, dtype=np.float16) -> Module:
    channels, outputs = shape
    codes = rng.integers(0, 2**bits, (outputs * channels // group, group), np.uint8)
    zero = rng.uniform(0, 2**bits, (len(codes), 1)).astype(dtype)
    scale = rng.uniform(0.01, 0.1, (len(codes), 1)).astype(dtype)
    half = len(codes) // 2
    nibbles = codes if bits == 8 else codes[:half] << 4 | codes[half:]
    settings = {"nbits": np.array([bits]), "shape": np.array(shape[::-1])}
    minima = (-zero.astype(np.float32) * scale.astype(np.float32)).astype(np.float16)
    wide = codes * scale.astype(np.float16).astype(np.float64) + minima
    tensors = {"W_q": nibbles, "scale": scale, "zero": zero, **settings}
    return tensors, wide.reshape(outputs, channels).T


NVFP4 = compressed_integers("nvfp4-pack-quantized", type="float", group_size=16)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GEMV = AWQ | {"version": "gemv"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
SKEWED = {"symmetric": False}
ONE_GROUP = {"strategy": "channel", "group_size": None}
part = functools.partial
inverse = part(fp8, name="weight_scale_inv")
ROUNDED = 1 / 210  # half a step of eight bits, and of the scale's own rounding

FORMS: dict[str, Form] = {
    "awq": Form(AWQ, awq, "uint4:g32"),
    "awq-one-group": Form(AWQ | {"group_size": -1}, part(awq, group=None), "uint4:gK"),
    "gemv": Form(GEMV, gemv, "uint4:g32", 1e-6),
    "gemv-128": Form(GEMV | {"group_size": 128}, part(gemv, group=128), "uint4:g128", 1e-6),
    "gemv-fast": Form(
        AWQ | {"version": "GEMV_FAST"}, part(gemv, layout="gemv_fast"), "affine4:g32", 1e-6
    ),
    "gemv-fast-64": Form(
        AWQ | {"version": "gemv_fast", "group_size": 64},
        *(part(gemv, layout="gemv_fast", group=64), "affine4:g64", 1e-6),
    ),
    "gptq": Form(GPTQ, gptq, "uint4:g32"),
    "gptq-8": Form(GPTQ | {"bits": 8, "group_size": 64}, part(gptq, bits=8, group=64), "uint8:g64"),
    "gptq-v2": Form(GPTQ | {"checkpoint_format": "gptq_v2"}, part(gptq, version=2), "uint4:g32"),
    "gptq-act-order": Form(
        GPTQ | {"bits": 8, "desc_act": True}, part(gptq, bits=8, order=True), "uint8:g32"
    ),
    "auto-round": Form(AUTO_ROUND, part(gptq, version=2), "uint4:g32"),
    "auto-round-gptq": Form(
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, gptq, "uint4:g32"
    ),
    "auto-round-awq": Form(
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, awq, "uint4:g32"
    ),
    "auto-round-pack": Form(
        compressed_integers(**SKEWED)
        | {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
        *(part(packed, symmetric=False), "uint4:g32"),
    ),
    "pack": Form(compressed_integers(), packed, "uint4:g32"),
    "pack-8": Form(compressed_integers(num_bits=8), part(packed, bits=8), "uint8:g32"),
    "pack-zeros": Form(compressed_integers(**SKEWED), part(packed, symmetric=False), "uint4:g32"),
    "pack-one-group": Form(
        compressed_integers(num_bits=8, **SKEWED, **ONE_GROUP),
        *(part(packed, bits=8, group=None, symmetric=False), "uint8:gK"),
    ),
    "pack-act-order": Form(
        compressed_integers(actorder="group"), part(packed, order=True), "uint4:g32"
    ),
    "int": Form(compressed_integers("int-quantized"), bytes_of, "int8:gK/int8"),
    "int-tensor": Form(
        compressed_integers("int-quantized", strategy="tensor"),
        *(part(bytes_of, by_channel=False, dtype=ml_dtypes.bfloat16), "int8:gK/int8"),
    ),
    "fp8": Form(FP8, inverse, "float8:g128/float8"),
    "fp8-channels": Form(
        compressed_fp8("channel", "token"), part(fp8, block=(1, None)), "float8:gK/float8"
    ),
    "fp8-one-scale": Form(
        compressed_fp8("tensor", None), part(fp8, block=(None, None)), "float8:gK"
    ),
    "fp8-blocks": Form(compressed_fp8("block", None), fp8, "float8:g128"),
    "fp8-static": Form(
        compressed_fp8("channel", "tensor", False),
        *(part(fp8, block=(1, None), static=True), "float8:gK/float8"),
    ),
    "modelopt-fp8": Form(
        MODELOPT | {"quant_algo": "FP8"},
        *(part(fp8, block=(None, None), grid=(), static=True), "float8:gK/float8"),
    ),
    "modelopt-channels": Form(
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        *(part(fp8, block=(1, None), grid=-1), "float8:gK/float8"),
    ),
    "modelopt-blocks": Form(MODELOPT | {"quant_algo": "FP8_BLOCK_SCALES"}, fp8, "float8:g128"),
    "nvfp4": Form(NVFP4, nvfp4, "uint8:g32", ROUNDED),
    "nvfp4-modelopt": Form(MODELOPT, part(nvfp4, compressed=False), "uint8:g32", ROUNDED),
    "nf4": Form(NF4, nf4, "table4:g64"),
    "nf4-nested": Form(NF4, part(nf4, nested=True), "table4:g64", 2**-11),
    "mxfp4": Form({"quant_method": "mxfp4"}, mxfp4, "float4:g32"),
    "hqq": Form(HQQ, of_hqq, "affine4:g32", 1e-6),
    "hqq-8": Form(hqq(nbits=8, group_size=64), part(of_hqq, bits=8, group=64), "affine8:g64", 1e-6),
    "hqq-256": Form(
        hqq(group_size=256),
        *(part(of_hqq, group=256, dtype=ml_dtypes.bfloat16), "affine4:g128", 1e-6),
    ),
}
