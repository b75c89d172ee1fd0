"""A small Qwen3, and rows of results with round figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpjax.models import llama_layers
from mpjax.models.presets import QWEN3_8B

SMALL_MODEL = dataclasses.replace(
    QWEN3_8B,
    vocab_size=96,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    layers=llama_layers((None,), 128, qk_norm=True),
    max_position_embeddings=256,
    stop_ids=(2,),
)


def gemm_row(**changes: Any) -> dict[str, Any]:
    """K 4000, N 5000: 20 µs at M = 1, twice the floor, a third of cuBLAS."""
    return {
        "shape": "model.map",
        "K": 4000,
        "N": 5000,
        "M": 1,
        "format": "uint4:g128",
        "microseconds": 20.0,
        "floor_microseconds": 10.0,
        "cublas_microseconds": 60.0,
        "relative_error": 1e-3,
    } | changes


def experts_row(**changes: Any) -> dict[str, Any]:
    """50 products, K 1000, N 2000, in 20 µs."""
    return {
        "shape": "small.down",
        "K": 1000,
        "N": 2000,
        "experts": 8,
        "per_token": 5,
        "M": 10,
        "format": "uint4:g128",
        "implementation": "triton",
        "hit": 4,
        "hit_bytes": 4e6,
        "microseconds": 20.0,
        "floor_microseconds": 10.0,
        "cublas_microseconds": 15.0,
        "ragged_dot_microseconds": None,
        "relative_error": 1e-3,
    } | changes


def attention_row(**changes: Any) -> dict[str, Any]:
    """A cache of 40 MB in 20 µs."""
    return {
        "shape": "b1-h32/8-d128-c1000",
        "format": "KV8",
        "cache_bytes": 40_000_000,
        "microseconds": 20.0,
        "floor_microseconds": 16.0,
        "cudnn_microseconds": 30.0,
        "relative_error": 1e-3,
    } | changes


def generate_row(**changes: Any) -> dict[str, Any]:
    """4 GB in a step of 2 ms, of which 4 TB/s would need 1."""
    return {
        "precision": "W4A16KV8",
        "batch": 2,
        "prompt_tokens": 2048,
        "new_tokens": 256,
        "load_seconds": None,
        "time_to_first_token_seconds": 0.05,
        "decode_step_microseconds": 2000.0,
        "sum_of_kernels_microseconds": 1900.0,
        "step_bytes": 4e9,
        "read_bandwidth_bytes_per_second": 4e12,
        "peak_bytes": None,
        "logprob_difference": 0.01,
        "kernel_microseconds_per_step": {"matmul": 1500.0, "other": 400.0},
    } | changes


def serve_row(**changes: Any) -> dict[str, Any]:
    """Ten requests of 100 tokens and 50 new ones in two seconds."""
    return {
        "precision": "W4A16KV8",
        "through": "engine",
        "requests": 10,
        "seconds": 2.0,
        "requests_per_second": 5.0,
        "new_tokens": 500,
        "asked_tokens": 500,
        "new_tokens_per_second": 250.0,
        "first_token_seconds": {"mean": 0.2, "p50": 0.2, "p99": 0.5, "most": 0.6},
        "token_seconds": {"mean": 0.01, "p50": 0.01, "p99": 0.02, "most": 0.03},
        "gap_seconds": {"mean": 0.08, "p50": 0.08, "p99": 0.09, "most": 0.1},
        "prompt_tokens": 1000,
        "asked_prompt_tokens": 1000,
        "shared_tokens": 250,
        "preemptions": 3,
        "programs": 5,
        "idle_share": 0.025,
    } | changes
