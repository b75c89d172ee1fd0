"""Families with latents for keys and values, against transformers in float32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.generation.decoding import generate_tokens
from mpjax.kernels import QuantizedTensor
from mpjax.models import latent
from mpjax.models.low_rank import LowRank
from tests.mpjax.checkpoint.test_expert_parity import maps_of
from tests.mpjax.checkpoint.test_huggingface_parity import (
    SIZES,
    VOCABULARY,
    edit_config,
    transformers,
)
from tests.mpjax.checkpoint.test_hybrid_families import (
    LENGTHS,
    OPTIONS,
    build,
    check_engine,
    prompts,
)
from tests.mpjax.checkpoint.write_checkpoint import FP8, pack_module_fp8
from tests.sweeps import in_sweep, is_asked_for

torch = pytest.importorskip("torch")

# Sizes that no two parts share.
LATENT = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 48},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 32, "q_lora_rank": 64},
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "rms_norm_eps": 0.01},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 32, "routed_scaling_factor": 1.5},
}
GROUPS = {"n_group": 4, "topk_group": 2}
ORIGINAL = "original_max_position_embeddings"
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 16},
    **{"mscale": 0.7, "mscale_all_dim": 0.9},
}
FAMILIES: dict[str, tuple[str, dict]] = {
    "v2-lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "rope_parameters": YARN, "n_shared_experts": 2},
    ),
    "v2": ("DeepseekV2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy"}),
    "v3": (
        "DeepseekV3",
        {**LATENT, **GROUPS, "rope_parameters": YARN, "norm_topk_prob": True},
    ),
    "v3.2": ("DeepseekV32", {**LATENT, **GROUPS, "index_head_dim": 32, "index_n_heads": 2}),
    "glm-flash": (
        "Glm4MoeLite",
        {
            **{**LATENT, "attention_bias": True, "rope_interleave": False},
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **{**LATENT, **GROUPS, "first_k_dense_replace": 0},
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5},
        },
    ),
}
PACKED = {"v2-lite": ("W4g32A16KV4", 0.5), "v3": ("W8g32A16KV8", 0.1)}  # and what differs at most


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A model of transformers, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build(*FAMILIES[request.param])
    model.save_pretrained(folder)
    return request.param, model, folder


def logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def test_logits_greedy_tokens_and_an_engine(family, request):
    name, model, folder = family
    lm = dataclasses.replace(
        mpjax.load(folder, dtype="float32", precision="W32A32KV16"), page_size=16
    )
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 40)).astype(np.int32)
    expected = logits(model, tokens)
    assert abs(expected).max() > 1
    error = np.abs(np.asarray(lm.model(tokens)) - expected).max()
    assert error < 1e-5 * abs(expected).max()
    padded = prompts()
    found = generate_tokens(lm.model, padded, LENGTHS, **OPTIONS).tokens
    rows = [row[:length] for row, length in zip(padded, LENGTHS, strict=True)]
    for row, new in zip(rows, found, strict=True):
        likeliest = logits(model, np.concatenate([row, new])[None])[0].argmax(-1)
        np.testing.assert_array_equal(new, likeliest[len(row) - 1 : -1])
    assert len(np.unique(found)) > 3
    # mistral4 has what v3 has, and queries that grow with positions.
    if name == "mistral4" or is_asked_for(request.config):
        check_engine(lm, [*rows, rows[0][3:]], found.tolist())


def test_many_tokens_attend_to_expanded_latents(family, monkeypatch):
    """A piece of a prompt, whose earlier tokens are in the cache, in both ways alike."""
    name, _, folder = family
    if name != "mistral4":
        pytest.skip("as the others")
    lm = mpjax.load(folder, dtype="float32", precision="W32A32KV8")
    tokens = prompts()

    def last(least: int) -> np.ndarray:
        monkeypatch.setattr(latent, "EXPANDED_TOKENS", least)
        cache = lm.model.create_cache(2, 64, "KV8", 16)
        half = tokens.shape[1] // 2
        _, cache = lm.model.step(tokens[:, :half], np.full(2, half), cache)
        rest = tokens[:, half:]
        found, _ = lm.model.step(rest, np.array([rest.shape[1], 3]), cache)
        return np.asarray(found)

    np.testing.assert_allclose(last(1), last(1000), atol=1e-4)


def test_it_is_quantised_saved_and_restored(family, tmp_path):
    name, model, folder = family
    if name not in PACKED:
        pytest.skip("as the others")
    precision, bound = PACKED[name]
    lm = mpjax.load(folder, dtype="float32", precision=precision)
    tokens = prompts()
    expected, found = logits(model, tokens), np.asarray(lm.model(tokens))
    assert 0 < abs(found - expected).mean() < bound * abs(expected).mean()
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved")
    assert again.config == lm.config
    np.testing.assert_array_equal(again.model(tokens), found)


def test_latents_in_few_bits_say_nearly_the_same(family):
    name, _, folder = family
    if name != "v3":
        pytest.skip("as the others")
    lm = mpjax.load(folder, dtype="float32", precision="W32A32KV16")
    tokens, errors = prompts(), []
    for format in ("KV16", "KV8", "KV4"):
        cache = lm.model.create_cache(2, 64, format, 16)
        found, cache = lm.model.step(tokens, np.full(2, tokens.shape[1]), cache)
        if format == "KV16":
            exact = np.asarray(found)
        errors.append(np.abs(np.asarray(found) - exact).mean() / np.abs(exact).mean())
    assert 0 < errors[1] < 0.02 < errors[2] < 0.3
    with pytest.raises(ValueError, match="KVfp8: a latent is kept in 16, 8 or 4 bits"):
        lm.model.create_cache(2, 64, "KVfp8", 16)


def test_adapters_run_beside_all_maps_but_that_from_latents(tmp_path):
    """That map's weights are read apart from it: an adapter of it is merged, and not loaded."""
    build(*FAMILIES["v2-lite"]).save_pretrained(tmp_path)
    lm, tokens = mpjax.load(tmp_path, dtype="float32", precision="W32A32KV16"), prompts()
    plain = np.asarray(lm.model(tokens))
    tuned = mpjax.lora(lm, 2)
    np.testing.assert_allclose(np.asarray(tuned.model(tokens)), plain, rtol=1e-5, atol=1e-5)
    changes = mpjax.Adapter.of(tuned.model).changes
    assert {"layers.0.attention.joint", "layers.0.attention.output"} <= {*changes}
    with pytest.raises(ValueError, match=r"^targets has model\.layers\.0\..*kv_b_proj, whose"):
        mpjax.lora(lm, 2, ["kv_b_proj"])
    expand = lm.model.layers[0].attention.expand.kernel.get_value()
    down, up = np.ones((expand.shape[0], 1), np.float32), np.ones((1, expand.shape[1]), np.float32)
    adapter = mpjax.Adapter({"layers.0.attention.expand": LowRank(down, [up])})
    with pytest.raises(
        ValueError, match=r"^the adapter 'a' changes model\.layers\.0\..*mpjax\.merge"
    ):
        lm.add_adapter("a", adapter)
    assert lm.adapters.names == []
    merged = mpjax.merge(lm, adapter).model.layers[0].attention.expand.kernel.get_value()
    np.testing.assert_allclose(np.asarray(merged), np.asarray(expand) + 1, rtol=1e-6)


@pytest.mark.sweep
def test_a_text_model_of_one_that_reads_images(tmp_path):
    """Mistral Small 4, as it is published."""
    sizes = {key: value for key, value in SIZES.items() if key != "attn_implementation"}
    sizes |= FAMILIES["mistral4"][1] | {"model_type": "mistral4", "tie_word_embeddings": False}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "patch_size": 14, "image_size": 28}
    whole = transformers.Mistral3Config(
        **{"text_config": sizes, "vision_config": vision | {"model_type": "pixtral"}},
        **{"eos_token_id": None, "tie_word_embeddings": False, "image_token_index": 95},
    )
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(whole).to(torch.float32).eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 90, (2, 40))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    lm = mpjax.load(tmp_path, dtype="float32", precision="W32A32KV16")
    found = np.asarray(lm.model(tokens.astype(np.int32)))
    assert abs(found - expected).max() < 1e-5 * abs(expected).max()


@pytest.mark.parametrize("name", ["v3", in_sweep("v3.2")])
def test_blocks_in_fp8(name, tmp_path):
    """As DeepSeek's own files. The map from latents becomes an array in 16 bits, or float32."""
    sizes = {"hidden_size": 128, "kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 32}
    kind, changes = FAMILIES[name]
    model = build(kind, {**changes, **sizes})
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in maps_of(model, tmp_path):
        weight.copy_(torch.from_numpy(pack_module_fp8(tensors, FP8, name).copy()))
    save_file(tensors, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config=FP8)
    lm, tokens = mpjax.load(tmp_path, dtype="float32", precision="WFP8A16KV16"), prompts()
    expected = logits(model, tokens)
    assert abs(np.asarray(lm.model(tokens)) - expected).max() < 1e-5 * abs(expected).max()
    mixer = lm.model.layers[0].attention
    assert isinstance(mixer.down.parts[0].kernel.get_value(), QuantizedTensor)
    assert not isinstance(mixer.expand.kernel.get_value(), QuantizedTensor)
