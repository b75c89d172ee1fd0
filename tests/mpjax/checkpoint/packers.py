"""Writes AWQ and GPTQ tensors from codes, scales and zero points, and FP8 ones, for tests.

numpy only, and vectorised, so that a whole model's checkpoint takes no time.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

# Field i of a word, lowest bits first, holds column AWQ_COLUMNS[i] of its eight.
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_awq(codes, scales, zeros) -> dict[str, np.ndarray]:
    """The tensors of an AWQ `gemm` module by suffix, 4 bits.

    codes: [K, N] of 0 to 15, row k for input channel k. scales, zeros: [G, N], zeros 0 to 15.
    """
    return {
        "qweight": pack_words(_awq_order(codes), 4),
        "qzeros": pack_words(_awq_order(zeros), 4),
        "scales": np.ascontiguousarray(scales),
    }


def pack_gptq(codes, scales, zeros, g_idx=None, bits=4, version=1) -> dict[str, np.ndarray]:
    """The tensors of a GPTQ module by suffix, 4 or 8 bits.

    codes: [K, N], row k for input channel k, of group g_idx[k]. scales, zeros: [G, N], zeros as
    they count in (code - zero) * scale. g_idx: [K], by default groups in order. version: 1 or 2.
    """
    channels, groups = codes.shape[0], scales.shape[0]
    if g_idx is None:
        g_idx = np.arange(channels) // (channels // groups)
    qzeros = pack_words(zeros, bits)
    if version == 1:
        ones = np.uint32({4: 0x11111111, 8: 0x01010101}[bits])
        qzeros = (qzeros.view(np.uint32) - ones).view(np.int32)
    return {
        "qweight": np.ascontiguousarray(pack_words(codes.T, bits).T),
        "qzeros": qzeros,
        "scales": np.ascontiguousarray(scales),
        "g_idx": np.asarray(g_idx, np.int32),
    }


def pack_fp8(weight, block, name, scale_dtype=np.float32) -> tuple[dict, np.ndarray]:
    """The tensors of an FP8 module by suffix, rounded to nearest, and the weight that they hold.

    weight: [K, N]. block: output and input channels that share a scale, None for all. name: of the
    scales. The weight that comes back is float32 [K, N].
    """
    channels, outputs = weight.shape
    rows, columns = (block[0] or outputs), (block[1] or channels)
    codes = np.empty((outputs, channels), ml_dtypes.float8_e4m3fn)
    values = np.empty((outputs, channels), np.float32)
    scales = np.empty((-(-outputs // rows), -(-channels // columns)), scale_dtype)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(weight.T[part]).max() / 448
        scale = np.float32(scales[i, j])
        codes[part] = np.clip(weight.T[part] / scale, -448, 448).astype(codes.dtype)
        values[part] = codes[part].astype(np.float32) * scale
    return {"weight": codes, name: scales if block[0] else scales[0]}, values.T


def _awq_order(fields) -> np.ndarray:
    blocks = np.asarray(fields).reshape(fields.shape[0], -1, 8)
    return blocks[:, :, AWQ_COLUMNS].reshape(fields.shape)


def pack_words(fields, bits) -> np.ndarray:
    """Packs [R, C] along C into int32 [R, ⌈C · bits / 32⌉], lowest bits first."""
    fields = np.asarray(fields).astype(np.uint32)
    fields = np.pad(fields, ((0, 0), (0, -fields.shape[1] % (32 // bits))))
    blocks = fields.reshape(len(fields), -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.bitwise_or.reduce(blocks << shifts, axis=-1)
    return np.ascontiguousarray(words).view(np.int32)
