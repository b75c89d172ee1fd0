"""GGUF files as transformers reads them, by a reader of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import mpjax
from tests.mpjax.checkpoint.gguf.write_gguf import (
    MIXED,
    SIZES,
    gguf,
    llama_metadata,
    random_tensors,
    with_experts,
)
from tests.mpjax.checkpoint.test_huggingface_parity import (
    VOCABULARY,
    reference_logits,
    torch,
    transformers,
)
from tests.sweeps import in_sweep

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20))


@pytest.mark.parametrize(
    "architecture", ["llama", *map(in_sweep, ("qwen2", "qwen2moe", "qwen3moe"))]
)
def test_transformers_reads_the_same_gguf_file(architecture, tmp_path, rng):
    """By its own reader of GGUF, which dequantises with the package of the format."""
    pytest.importorskip("gguf")
    metadata, tensors = llama_metadata(architecture), random_tensors(MIXED, rng)
    keys, head_dim = SIZES["kv_heads"] * SIZES["head_dim"], SIZES["head_dim"]
    biases = {"attn_q.bias": SIZES["hidden"], "attn_k.bias": keys, "attn_v.bias": keys}
    norms = {"attn_q_norm.weight": head_dim, "attn_k_norm.weight": head_dim}
    more = {"qwen2": biases, "qwen2moe": biases, "qwen3moe": norms}.get(architecture, {})
    for index, (name, size) in itertools.product(range(SIZES["layers"]), more.items()):
        numbers = rng.standard_normal(size).astype(np.float32)
        tensors[f"blk.{index}.{name}"] = "F32", (size,), numbers.tobytes()
    if architecture.endswith("moe"):
        # transformers' reader leaves out these sizes, so that they are those of its classes.
        inner, shared = (1408, 5632) if architecture == "qwen2moe" else (768, None)
        with_experts(metadata, tensors, rng, kind="Q8_0", inner=inner, shared=shared)
        metadata |= {f"{architecture}.attention.{x}_length": head_dim for x in ("key", "value")}
    (tmp_path / "m.gguf").write_bytes(gguf(metadata, tensors))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    for module in model.modules():  # and whether weights are divided by their sum
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = architecture == "qwen3moe"
    expected = reference_logits(model.eval(), TOKENS)
    lm = mpjax.load(tmp_path / "m.gguf", precision="W32A32KV16", dtype="float32")
    assert abs(expected).max() > 1
    found = np.asarray(lm.model(TOKENS.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
