"""GPU kernels for mixed-precision inference: arrays in, arrays out.

Packed weight formats and their fused dequantise-GEMM, the paged low-bit KV cache and attention
over it. Everything here can be used alone, in any JAX program.
"""

from pallas_kernels.attention.api import paged_attention, prefill_attention
from pallas_kernels.backend import UnsupportedError
from pallas_kernels.formats import QuantizedTensor, WeightFormat, pack, unpack
from pallas_kernels.gemm.api import matmul
from pallas_kernels.kv_cache.api import append
from pallas_kernels.kv_cache.cache import KVFormat, KVPages, PagedKVCache
from pallas_kernels.quantize import quantize

__all__ = [
    "KVFormat",
    "KVPages",
    "PagedKVCache",
    "QuantizedTensor",
    "UnsupportedError",
    "WeightFormat",
    "append",
    "matmul",
    "pack",
    "paged_attention",
    "prefill_attention",
    "quantize",
    "unpack",
]
