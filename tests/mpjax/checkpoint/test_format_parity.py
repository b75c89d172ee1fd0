"""Formats that transformers loads with GPU kernels alone: its logits on the weights they stand for.
And GGUF, for which it has a reader of its own.

Weights come from the formulas of each format's tests. test_huggingface_parity, test_static_parity
and test_expert_parity have the other formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

import mpjax
from tests.models.small import dequantize_kernels
from tests.mpjax.checkpoint.gguf.write_gguf import (
    MIXED,
    SIZES,
    gguf,
    llama_metadata,
    random_tensors,
    with_experts,
)
from tests.mpjax.checkpoint.packers import pack_awq, pack_gptq
from tests.mpjax.checkpoint.schemes import (
    test_auto_round,
    test_awq_gemv,
    test_hqq,
    test_nf4,
    test_nvfp4,
)
from tests.mpjax.checkpoint.test_huggingface_parity import (
    VOCABULARY,
    build,
    edit_config,
    reference_logits,
    torch,
    transformers,
)
from tests.mpjax.checkpoint.write_checkpoint import (
    SQUARE,
    compressed_integers,
    replace_module,
    round_to_nearest,
)
from tests.sweeps import in_sweep

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20))


class Format(NamedTuple):
    """What config.json says, and what makes a module's tensors and its weight [in, out].

    precision: in which codes stay, or are dequantised where no format here has them. error: the
    largest of a logit, as a share of the largest logit.
    """

    written: dict[str, Any]
    module: Callable[[np.random.Generator, tuple[int, int]], tuple[dict, np.ndarray]]
    precision: str | None = None
    quantises_head: bool = False
    error: float = 2e-5


def integers(pack, bits=4):
    """A module of integers with zero points from 1 on, by a function that packs them."""

    def module(rng, shape):
        codes, scales, zeros = round_to_nearest(rng.standard_normal(shape) / 8, 32, bits)
        zeros = np.maximum(zeros, 1)
        groups = np.arange(shape[0]) // 32
        weight = (codes.astype(np.float32) - zeros[groups]) * scales[groups].astype(np.float32)
        return pack(codes, scales, zeros), weight

    return module


def packed_as_compressed(codes, scales, zeros):
    nibbles = test_auto_round.nibbles
    return {
        "weight_packed": nibbles(codes.T),
        "weight_zero_point": nibbles(zeros).T,
        "weight_scale": scales.T,
        "weight_shape": np.array(codes.shape[::-1]),
    }


def transposed(module, **arguments):
    """A module whose shape and weight are [out, in] elsewhere."""

    def made(rng, shape):
        tensors, weight = module(rng=rng, shape=shape[::-1], **arguments)
        return tensors, weight.T

    return made


def gemv(layout):
    return lambda rng, shape: test_awq_gemv.module(rng, layout, shape)


def gptq(version):
    return integers(lambda *codes: pack_gptq(*codes, version=version))


def auto_round(packing):
    return test_auto_round.CONFIG | {"packing_format": packing}


GPTQ_HEAD = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
GPTQ_HEAD |= {"checkpoint_format": "gptq_v2", "lm_head": True}
IN_WORDS = compressed_integers(symmetric=False) | {"quant_method": "auto-round", "sym": False}
SIXTEEN = "W16A16KV16"
FORMATS = {
    "awq-gemv": Format(test_awq_gemv.CONFIG, gemv("gemv")),
    "awq-gemv-fast": Format(test_awq_gemv.CONFIG | {"version": "gemv_fast"}, gemv("gemv_fast")),
    "gptq-head": Format(GPTQ_HEAD, gptq(2), quantises_head=True),
    "auto-round-gptq-v1": Format(auto_round("auto_round:auto_gptq"), gptq(1)),
    "auto-round": Format(auto_round("auto_round"), gptq(2)),
    "auto-round-awq": Format(auto_round("auto_round:auto_awq"), integers(pack_awq)),
    "auto-round-compressed": Format(
        IN_WORDS | {"packing_format": "auto_round:llm_compressor"}, integers(packed_as_compressed)
    ),
    "hqq": Format(test_hqq.HQQ, test_hqq.module),
    "nf4": Format(test_nf4.CONFIG, transposed(test_nf4.module)),
    "nf4-nested": Format(  # whose scales are rounded to float16
        test_nf4.CONFIG, transposed(test_nf4.module, nested=True), error=2e-3
    ),
    "nvfp4-compressed": Format(
        test_nvfp4.COMPRESSED, transposed(test_nvfp4.module, config=test_nvfp4.COMPRESSED), SIXTEEN
    ),
    "nvfp4-modelopt": Format(
        test_nvfp4.MODELOPT, transposed(test_nvfp4.module, config=test_nvfp4.MODELOPT), SIXTEEN
    ),
}
BY_DEFAULT = ("gptq-head", "auto-round-gptq-v1", "nvfp4-compressed")


@pytest.mark.parametrize("name", [n if n in BY_DEFAULT else in_sweep(n) for n in FORMATS])
def test_logits(name, tmp_path, rng):
    format, model = FORMATS[name], build("Qwen2", SQUARE)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for module, linear in model.named_modules():
        is_head = module == "lm_head"
        if not isinstance(linear, torch.nn.Linear) or (is_head and not format.quantises_head):
            continue
        packed, weight = format.module(rng, (linear.in_features, linear.out_features))
        whole = {suffix: np.ascontiguousarray(array) for suffix, array in packed.items()}
        replace_module(tensors, module, {k: a.reshape(packed[k].shape) for k, a in whole.items()})
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight.T, np.float32)))
    safetensors.numpy.save_file(tensors, file)
    edit_config(tmp_path, quantization_config=format.written)
    lm = mpjax.load(tmp_path, precision=format.precision, dtype="float32")
    if format.precision is None:
        dequantize_kernels(lm.model)
    expected = reference_logits(model, TOKENS)
    assert abs(expected).max() > 1
    found = np.asarray(lm.model(TOKENS.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=format.error * abs(expected).max())


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
