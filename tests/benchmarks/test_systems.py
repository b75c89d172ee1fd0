from __future__ import annotations

import pytest

from benchmarks import systems

pytestmark = pytest.mark.any_version

STAMP = {"device": "GPU", "versions": {"jax": "0.99"}}
TIMES = {"p50": 0.5, "p99": 1.25, "most": 2.0}
LOAD = {
    "prompt_tokens": {"least": 1, "most": 4096, "mean": 1024, "sigma": 0.8},
    "new_tokens": {"least": 512, "most": 512, "mean": None, "sigma": 0.0},
    **{"pairs": [], "rate": None, "shared": 0, "late": 32768},
}
SERVED = {
    **{"precision": "W4A16KV8", "requests": 64, "load": LOAD, "seconds": 2.0, "chunk_tokens": 1024},
    **{"max_gap": "inf", "requests_per_second": 32.0},
    **{"new_tokens_per_second": 1000.0, "first_token_seconds": TIMES, "token_seconds": TIMES},
    **{"gap_seconds": TIMES, "prompt_tokens": 100, "shared_tokens": 25},
}
EXPERTS = {
    **{"shape": "model.down", "K": 100, "N": 200, "M": 16, "per_token": 2, "format": "uint4:g128"},
    **{"hit": 7, "hit_bytes": 10**6, "microseconds": 10.0, "floor_microseconds": 8.0},
    **{"cublas_microseconds": 20.0, "ragged_dot_microseconds": None, "relative_error": 1e-3},
    "implementation": "triton",
}
DIVIDED = {
    **{"precision": "W4A16KV8", "batch": 1, "devices": 2, "decode_tokens_per_second": 89.0},
    **{"decode_step_microseconds": 11230.0, "roofline_share": 0.54, "new_tokens": 128},
    **{"cache_tokens_that_fit": 487808, "layers": 16, "prompt_tokens": 2048, "filled": True},
}
SUMMED = {
    **{"devices": 2, "dtype": "bfloat16", "bytes": 8192, "pair_microseconds": 22.0},
    **{"addition_microseconds": 4.0, "sum_microseconds": 18.0},
    "compiler_options": {"a_flag": True},
}
STEPS = {
    **{"precision": "W4A16KV8", "batch": 1, "prompt_tokens": 2048, "new_tokens": 256},
    "decode_step_microseconds": 2000.0,
    "speculation": [
        {"k": k, "proposing_step_microseconds": 2040.0, "verifying_step_microseconds": 2200.0}
        for k in (4, 8)
    ],
}
TEXT = {
    **{"model": "bundled", "precision": "W16A16KV16", "case": "prose", "temperature": 0.8},
    **{"proposer": "ngram:4:3", "plain_tokens_per_second": 100.0, "tokens_per_second": 98.0},
    **{"speed_up": 0.98, "tokens_per_step": 1.0, "acceptance": 0.0, "proposed_per_step": 0.01},
}
DRAWN = {
    **{"rows": 16, "drawn": "top-k", "by": "search", "kernels_microseconds": 50.0},
    **{"step_microseconds": 60.0, "same_tokens": True},
}
RESULTS = {
    "sampling*.json": [DRAWN],
    "speculation-steps*.json": [STEPS],
    "speculation-text*.json": [TEXT],
    "serve*.json": [SERVED | {"through": "engine"}, SERVED | {"through": "batches of 64"}],
    "experts*.json": [EXPERTS],
    "devices-llama3-70b*.json": [DIVIDED | {"devices": 1}, DIVIDED],
    "devices-qwen3-30b-a3b*.json": [DIVIDED | {"experts": "whole"}],
    "sums*.json": [SUMMED],
}


def page(*patterns):
    found = {pattern: [STAMP | {"results": RESULTS[pattern]}] for pattern in patterns}
    return "\n".join(systems.page(lambda pattern: found.get(pattern, [])))


@pytest.mark.parametrize(
    ("pattern", "cells", "command"),
    [
        (
            "serve*.json",
            "| lognormal:1024:0.8:4096 + 512, 32768 late | 1024 | inf | W4A16KV8 | engine | 64 "
            "| 2.00 s | 32.00 | 1000 | 0.50 / 1.25 s |",
            "mpjax bench serve --requests 64 --prompt-tokens lognormal:1024:0.8:4096 "
            "--new-tokens 512 --chunk-tokens 1024 --static 64",
        ),
        (
            "experts*.json",
            "| model.down | uint4:g128 | 16 | 7 | 10.0 | 100 | 0.1 | 1.25 |",
            "mpjax bench gemm --experts --shapes model.down --formats uint4:g128 --rows 16",
        ),
        (
            "devices-llama3-70b*.json",
            "| W4A16KV8 | 16 | 1 | 2 | 89 | 11.23 ms | 54% | 487,808 |",
            "mpjax bench generate --shapes llama3-70b --devices 1,2 --batch 1 --layers 16 "
            "--new-tokens 128 --filled",
        ),
        (
            "devices-qwen3-30b-a3b*.json",
            "| W4A16KV8 | 16 | 1 | 2, whole experts | 89 | 11.23 ms |",
            "mpjax bench generate --shapes qwen3-30b-a3b --devices 2 --batch 1 --experts whole "
            "--layers 16 --new-tokens 128 --filled",
        ),
        (
            "sampling*.json",
            "| 16 | top-k | search | 50.0 µs | 60.0 µs | True |",
            "python -m benchmarks.sampling OUT",
        ),
        (
            "speculation-steps*.json",
            "| W4A16KV8 | 1 | 2048 | 8 | 2000 µs | 1.02 × | 1.10 × |",
            "mpjax bench generate --precision W4A16KV8 --batch 1 --new-tokens 256 --speculate 4,8",
        ),
        (
            "speculation-text*.json",
            "| prose | 0.8 | ngram:4:3 | 100 | 98 | 0.98 | 1.00 | 0% | 0.01 |",
            "python -m benchmarks.speculation OUT.json --speculate ngram:4:3",
        ),
        (
            "sums*.json",
            "| 2 | bfloat16 | 8 KiB | 22.0 µs |",
            "mpjax bench sums --devices 2 --sizes 8 --dtypes bfloat16 --options a_flag=true",
        ),
    ],
)
def test_results_have_a_table_and_the_command_that_measured_them(pattern, cells, command):
    text = page(pattern)
    assert cells in text
    assert f"`{command}` · GPU, jax 0.99" in text
    assert text.count("\n## ") == 1


def test_a_page_without_results_is_empty():
    assert page() == ""
