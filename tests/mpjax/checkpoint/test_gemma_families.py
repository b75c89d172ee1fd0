"""Gemma 3n and 4, with per-layer embeddings and shared caches, against transformers in float32."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import mpjax
from mpjax.generation.decoding import generate_tokens
from mpjax.quantization.pipeline import Stream
from tests.models.small import logits_of
from tests.mpjax.checkpoint.test_huggingface_parity import SIZES, VOCABULARY, transformers
from tests.mpjax.checkpoint.test_hybrid_families import (
    LENGTHS,
    OPTIONS,
    build,
    check_engine,
    prompts,
)
from tests.mpjax.checkpoint.test_latent_families import logits
from tests.sweeps import is_asked_for

torch = pytest.importorskip("torch")

# Sizes that no two parts share.
GEMMA = {
    **{"num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1},
    **{"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    **{"rms_norm_eps": 0.01, "hidden_size_per_layer_input": 0},
}
# By name: what its classes in transformers are named after, if not Gemma4, and keys beside SIZES.
FAMILIES: dict[str, dict] = {
    "3n": {
        **{"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8, "num_kv_shared_layers": 2},
        **{"layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"]},
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY - 8},
        **{"laurel_rank": 24, "altup_num_inputs": 3, "altup_active_idx": 1},
        **{"activation_sparsity_pattern": [0.5, 0.9, 0.0, 0.0, 0.3], "rms_norm_eps": 0.01},
        **{"intermediate_size": [96, 64, 96, 64, 64], "final_logit_softcapping": 5.0},
    },
    "31b": {**GEMMA, "attention_k_eq_v": True, "final_logit_softcapping": 5.0},
    "26b-a4b": {
        **{**GEMMA, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3},
        **{"moe_intermediate_size": 32, "tie_word_embeddings": False},
    },
    "e2b": {
        **{**GEMMA, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "attention_bias": True},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY + 4},
        "use_double_wide_mlp": True,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A model of transformers, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    kind = "Gemma3n" if request.param == "3n" else "Gemma4"
    model = build(kind, FAMILIES[request.param])
    with torch.no_grad():
        for parameter in (each for name, each in model.named_parameters() if "coefs" in name):
            parameter.normal_(0, 0.5)  # instead of zeros
    model.save_pretrained(folder)
    return request.param, model, folder


def test_logits_greedy_tokens_and_an_engine(family, request):
    name, model, folder = family
    lm = dataclasses.replace(
        mpjax.load(folder, dtype="float32", precision="W32A32KV16"), page_size=16
    )
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 40)).astype(np.int32)
    expected = logits(model, tokens)
    assert abs(expected).max() > 1
    error = np.abs(np.asarray(logits_of(lm.model, tokens)) - expected).max()
    assert error < 1e-5 * abs(expected).max()
    padded = prompts()
    found = generate_tokens(lm.model, padded, LENGTHS, **OPTIONS).tokens
    rows = [row[:length] for row, length in zip(padded, LENGTHS, strict=True)]
    for row, new in zip(rows, found, strict=True):
        likeliest = logits(model, np.concatenate([row, new])[None])[0].argmax(-1)
        np.testing.assert_array_equal(new, likeliest[len(row) - 1 : -1])
    assert len(np.unique(found)) > 3
    # 3n and e2b have all kinds of states.
    if name in ("3n", "e2b") or is_asked_for(request.config):
        check_engine(lm, [*rows, rows[0][3:]], found.tolist())


def test_it_is_quantised_saved_and_restored(family, tmp_path):
    name, model, folder = family
    if name not in ("3n", "e2b"):
        pytest.skip("e2b has all kinds of states, and 3n of streams")
    lm = mpjax.load(folder, dtype="float32", precision="W4g32A16KV8")
    tokens = prompts()
    expected, found = logits(model, tokens), np.asarray(logits_of(lm.model, tokens))
    assert 0 < abs(found - expected).mean() < 0.75 * abs(expected).mean()
    step = jax.jit(lambda model, *given: model.step(*given))
    cache = lm.model.create_cache(2, 64, lm.kv_format, 16)
    _, cache = step(lm.model, tokens[:, :9], np.full(2, 9), cache)
    in_8_bits, _ = step(lm.model, tokens[:, 9:], np.full(2, tokens.shape[1] - 9), cache)
    assert 0 < abs(np.asarray(in_8_bits) - found[:, -1]).mean() < 0.1 * abs(found).mean()
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved")
    assert again.config == lm.config
    np.testing.assert_array_equal(logits_of(again.model, tokens), found)


def test_calibration_is_refused_by_the_part_that_it_lacks(family):
    name, _, folder = family
    lm = mpjax.load(folder, dtype="float32", precision="W32A32KV8s")
    with pytest.raises(ValueError, match="heads of different sizes"):
        mpjax.calibrate_cache(lm, ["some text"])
    if name in ("3n", "e2b"):
        with pytest.raises(ValueError, match="per-layer embeddings"):
            Stream.of(lm.model, [])
    if name == "3n":
        with pytest.raises(ValueError, match="has several residual streams: expected one"):
            lm.model.inspect(prompts(), capture={"residual": [0]})


def test_a_text_model_beside_those_of_images(family, tmp_path):
    """Of Gemma 4, and of its 12B model, which has neither experts nor per-layer embeddings."""
    name, _, _ = family
    if name in ("3n", "e2b"):
        pytest.skip("their text models are read as that of 26b-a4b")
    kind, text = "Gemma4Unified" if name == "31b" else "Gemma4", SIZES | FAMILIES[name]
    left_out = ["attn_implementation", *["hidden_size_per_layer_input"] * (name == "31b")]
    text = {key: value for key, value in text.items() if key not in left_out} | {"pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4}
    if name == "31b":
        vision = {"patch_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 64}
    whole = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, audio_config=None
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(whole).to(torch.float32)
    model.eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 90, (2, 20))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    lm = mpjax.load(tmp_path, dtype="float32", precision="W32A32KV16")
    error = abs(np.asarray(logits_of(lm.model, tokens.astype(np.int32))) - expected).max()
    assert error < 1e-5 * abs(expected).max()
