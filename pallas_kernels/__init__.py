"""GPU kernels for mixed-precision inference: arrays in, arrays out.

Packed weight formats and their fused dequantise-GEMM, the paged low-bit KV cache and attention over
it. Everything here can be used alone, in any JAX program. Array arguments may also be NumPy arrays,
numbers, or lists of numbers; dtypes may also be short names such as `bf16`.
"""

from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.attention.api import paged_attention, prefill_attention
from mpjax.kernels.batch import Span
from mpjax.kernels.device import UnsupportedError
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.experts.api import grouped_matmul, grouped_matmul_terms
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.experts.local import LocalExperts
from mpjax.kernels.experts.logits import RouterLogits
from mpjax.kernels.experts.mlp import ExpertMLP, expert_mlp_terms
from mpjax.kernels.experts.routing import route
from mpjax.kernels.experts.routing_rules import Routing
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm.api import matmul, matmul_terms
from mpjax.kernels.kv_cache.api import append
from mpjax.kernels.kv_cache.cache import KVPages, PagedKVCache
from mpjax.kernels.kv_cache.formats import KVFormat
from mpjax.kernels.kv_cache.layout import KVLayout
from mpjax.kernels.kv_cache.scales import cache_scales
from mpjax.kernels.latent.api import latent_attention, latent_format
from mpjax.kernels.low_rank.api import add_low_rank, gated_low_rank, matmul_low_rank_terms
from mpjax.kernels.masks import Masks
from mpjax.kernels.partition import partition_specs
from mpjax.kernels.plain_codes import PlainCodes
from mpjax.kernels.product_format import ActivationFormat, ProductFormat
from mpjax.kernels.quantize import quantize
from mpjax.kernels.quantized_tensor import QuantizedTensor, pack, replace_scales, unpack
from mpjax.kernels.recurrent.convolution import causal_convolution
from mpjax.kernels.recurrent.delta import gated_delta_rule
from mpjax.kernels.recurrent.delta_inputs import DeltaInputs
from mpjax.kernels.recurrent.scan import state_space_scan
from mpjax.kernels.recurrent.steps.api import convolution_step, gated_delta_step, state_space_step
from mpjax.kernels.recurrent.steps.gates import DeltaGates, ScanGates
from mpjax.kernels.recurrent.steps.rows import StateRows
from mpjax.kernels.rotary.api import rotate, rotate_and_append
from mpjax.kernels.rotary.rotation import HeadNorms, Rotation
from mpjax.kernels.rowwise.api import (
    add_rms_norm,
    gated,
    gated_silu,
    hadamard,
    quantize_rows,
    rms_norm,
)
from mpjax.kernels.static_rows import StaticRows
from mpjax.kernels.sums.api import Inbox, open_inbox, sum_over_devices

__all__ = [
    "ActivationBlocks",
    "ActivationFormat",
    "DeltaGates",
    "DeltaInputs",
    "DividedRows",
    "ExpertMLP",
    "Gate",
    "HeadNorms",
    "Inbox",
    "KVFormat",
    "KVLayout",
    "KVPages",
    "LocalExperts",
    "Masks",
    "PagedKVCache",
    "PlainCodes",
    "ProductFormat",
    "QuantizedActivations",
    "QuantizedTensor",
    "Rotation",
    "RouterLogits",
    "Routing",
    "ScanGates",
    "Span",
    "StateRows",
    "StaticRows",
    "UnsupportedError",
    "WeightFormat",
    "add_low_rank",
    "add_rms_norm",
    "append",
    "cache_scales",
    "causal_convolution",
    "convolution_step",
    "expert_mlp_terms",
    "gated",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_low_rank",
    "gated_silu",
    "grouped_matmul",
    "grouped_matmul_terms",
    "hadamard",
    "latent_attention",
    "latent_format",
    "matmul",
    "matmul_low_rank_terms",
    "matmul_terms",
    "open_inbox",
    "pack",
    "paged_attention",
    "partition_specs",
    "prefill_attention",
    "quantize",
    "quantize_activations",
    "quantize_rows",
    "replace_scales",
    "rms_norm",
    "rotate",
    "rotate_and_append",
    "route",
    "state_space_scan",
    "state_space_step",
    "sum_over_devices",
    "unpack",
]
