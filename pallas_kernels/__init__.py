"""GPU kernels for mixed-precision inference: arrays in, arrays out.

Packed weight formats and their fused dequantise-GEMM, the paged low-bit KV cache and attention
over it. Everything here can be used alone, in any JAX program.
"""

from pallas_kernels.activations import QuantizedActivations, quantize_activations
from pallas_kernels.attention.api import paged_attention, prefill_attention
from pallas_kernels.backend import UnsupportedError
from pallas_kernels.formats import WeightFormat
from pallas_kernels.gemm.api import matmul, matmul_terms
from pallas_kernels.kv_cache.api import append
from pallas_kernels.kv_cache.cache import KVPages, PagedKVCache
from pallas_kernels.kv_cache.formats import KVFormat
from pallas_kernels.kv_cache.scales import cache_scales
from pallas_kernels.quantize import quantize
from pallas_kernels.quantized_tensor import QuantizedTensor, pack, unpack
from pallas_kernels.rotary.api import rotate_and_append
from pallas_kernels.rotary.reference import HeadNorms, rotate
from pallas_kernels.rowwise.api import add_rms_norm, gated_silu, quantize_rows
from pallas_kernels.rowwise.reference import rms_norm

__all__ = [
    "HeadNorms",
    "KVFormat",
    "KVPages",
    "PagedKVCache",
    "QuantizedActivations",
    "QuantizedTensor",
    "UnsupportedError",
    "WeightFormat",
    "add_rms_norm",
    "append",
    "cache_scales",
    "gated_silu",
    "matmul",
    "matmul_terms",
    "pack",
    "paged_attention",
    "prefill_attention",
    "quantize",
    "quantize_activations",
    "quantize_rows",
    "rms_norm",
    "rotate",
    "rotate_and_append",
    "unpack",
]
