"""The fused dequantise-GEMM beside its floor and cuBLAS, at the shapes of Qwen3-8B."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from benchmarks import measure
from pallas_kernels import QuantizedTensor, WeightFormat, matmul, quantize
from pallas_kernels.bits import pack_pair
from pallas_kernels.gemm.shapes import QWEN3_8B, GemmShape

FORMATS = ("uint4:g128", "uint4:g32", "uint8:g128")
ROWS = (1, 16, 32, 64, 128, 256, 1024, 2048)
ROTATED_BYTES = 200e6  # weights in turn, together several times the L2 cache


def main() -> None:
    """Measures every format, shape and number of rows, and saves `gemm.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=measure.RESULTS)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    arguments = parser.parse_args()
    results = []
    for shape in track(QWEN3_8B, "shapes"):
        results += _shape(shape, arguments.rows, arguments.formats)
    measure.save("gemm", {"results": results}, arguments.output)


def _shape(shape: GemmShape, rows: list[int], formats: list[str]) -> list[dict[str, Any]]:
    keys = jax.random.split(jax.random.key(0), 32)
    channels, outputs = shape.channels, shape.outputs
    copies = max(2, round(ROTATED_BYTES / (channels * outputs * 2)))
    dense = [jax.random.normal(k, (channels, outputs), jnp.bfloat16) for k in keys[:copies]]
    activations = {m: jax.random.normal(keys[-1], (m, channels), jnp.bfloat16) for m in rows}
    each = jax.jit(lambda x, weights: [matmul(x, weight) for weight in weights])
    cublas = {m: measure.microseconds(each, x, dense) / copies for m, x in activations.items()}
    del dense
    results = []
    for name in formats:
        format = WeightFormat.parse(name)
        copies = max(2, round(ROTATED_BYTES / format.nbytes((channels, outputs))))
        weights = [random_weight(k, channels, outputs, format) for k in keys[:copies]]
        read = jax.jit(lambda weights: [w.words.sum(dtype=jnp.uint32) for w in weights])
        floor = measure.microseconds(read, weights) / copies
        for m, x in activations.items():
            results.append(
                {
                    "shape": shape.name,
                    "K": channels,
                    "N": outputs,
                    "M": m,
                    "format": name,
                    "microseconds": measure.microseconds(each, x, weights) / copies,
                    "floor_microseconds": floor,
                    "cublas_microseconds": cublas[m],
                    "relative_error": _error(x, weights[0]),
                }
            )
    return results


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weight(
    key: jax.Array, channels: int, outputs: int, format: WeightFormat
) -> QuantizedTensor:
    """A packed weight of random codes, scales and zero points."""
    like = jax.eval_shape(
        lambda w: quantize(w, format), jax.ShapeDtypeStruct((channels, outputs), jnp.bfloat16)
    )
    words, scales, zeros = jax.random.split(key, 3)
    shape = like.parameters.shape
    return QuantizedTensor(
        jax.random.bits(words, like.words.shape, jnp.uint16),
        pack_pair(
            jax.random.uniform(scales, shape, jnp.float16, 1e-3, 1e-2),
            jax.random.randint(zeros, shape, 0, 2**format.bits).astype(jnp.uint16),
        ),
        None,
        format,
        channels,
        "float16",
    )


def _error(x: jax.Array, weight: QuantizedTensor) -> float:
    """Mean error over mean magnitude of the first rows, against float32 over the exact weight."""
    x = x[:64]
    reference = functools.partial(matmul, implementation="reference")
    exact = np.asarray(jax.jit(reference)(x.astype(jnp.float32), weight))
    found = np.asarray(jax.jit(matmul)(x, weight), np.float32)
    return float(np.abs(found - exact).mean() / np.abs(exact).mean())


if __name__ == "__main__":
    main()
