"""Families with mixers that keep a state of each sequence, against transformers in float32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.engine.state import cache_bytes
from mpjax.generation.decoding import generate_tokens
from tests.mpjax.checkpoint.saved_models import as_published
from tests.mpjax.checkpoint.test_huggingface_parity import (
    SIZES,
    VOCABULARY,
    edit_config,
    transformers,
)
from tests.mpjax.checkpoint.write_checkpoint import FP8, pack_module_fp8
from tests.sweeps import is_asked_for

torch = pytest.importorskip("torch")

LFM2 = {"conv_L_cache": 4, "layer_types": ["conv", "full_attention", "conv"]}
GRANITE = {
    **{"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4},
    **{"logits_scaling": 0.5, "rms_norm_eps": 0.01, "shared_intermediate_size": 96},
}
NEMOTRON = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8},
    **{"head_dim": 16, "layer_norm_epsilon": 0.01},
}
# Sizes that no two parts share.
DELTA = {
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 16, "num_hidden_layers": 2},
    **{"full_attention_interval": 2},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 96}
# By name: what its classes in transformers are named after, and keys beside SIZES.
FAMILIES: dict[str, tuple[str, dict]] = {
    "lfm2": (
        "Lfm2",
        {**LFM2, "num_hidden_layers": 3, "conv_bias": True, "block_multiple_of": 24},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **{**LFM2, "num_hidden_layers": 3, "num_dense_layers": 1, "num_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **{**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_d_conv": 3},
            "mamba_proj_bias": True,
            "time_step_limit": [0.2, 1.2],
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            **{**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
            **{"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_expand": 1},
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **{
                "num_hidden_layers": 2,
                "mamba_d_ssm": 96,
                "mamba_n_heads": 12,
                "rms_norm_eps": 0.01,
            },
            **{"mamba_n_groups": 2, "mamba_d_state": 8, "mamba_rms_norm": True},
            **{"lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "key_multiplier": 0.7},
            **{"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.6},
            **{"ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.4, "mlp_multipliers": [0.6, 1.7]},
            "ssm_multipliers": [0.5, 0.8, 1.5, 1.2, 0.9],
        },
    ),
    "falcon-h1-plain": (
        "FalconH1",
        {
            **{"mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_expand": 1},
            **{"attention_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            **{
                **NEMOTRON,
                "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"],
            },
            **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64},
            **{"moe_shared_expert_intermediate_size": 96, "routed_scaling_factor": 1.5},
            "time_step_min": 0.4,
        },
    ),
    "nemotron-h-dense": (
        "NemotronH",
        {
            **{**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
            **{"use_bias": True, "mlp_bias": True, "use_conv_bias": False},
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**DELTA, **EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "qwen3.5": (
        "Qwen3_5",
        {**DELTA, "attention_bias": True, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3.5-tied": (
        "Qwen3_5",
        {
            **{**DELTA, "tie_word_embeddings": True, "linear_num_value_heads": 2},
            **{"num_hidden_layers": 3, "linear_conv_kernel_dim": 3},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            **{**DELTA, "layer_types": ["linear_attention", "full_attention"]},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": None}},
            "rms_norm_eps": 1e-3,
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            **{"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
            **{"num_attention_heads": 3, "num_key_value_heads": 3, "linear_num_heads": 3},
            **{"linear_head_dim": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 24, "v_head_dim": 32, "num_local_experts": 8, "n_group": 4},
            **{"topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", {**DELTA, **EXPERTS}),
}
# Those that also run in an engine, and in 4 bits.
ENGINES = ("lfm2", "qwen3.5", "qwen3-next", "olmo-hybrid", "kimi-linear", "falcon-h1", "nemotron-h")
LENGTHS, NEW = np.array([21, 13]), 60
OPTIONS = {"max_new_tokens": NEW, "sampling": {"stop_ids": ()}}


def build(family: str, changes: dict):
    """A model with all of its parameters random; decays and steps as models have them."""
    torch.manual_seed(0)
    of_text = f"{family}Text" if family.startswith(("Qwen3_5", "Gemma3n", "Gemma4")) else family
    config = getattr(transformers, f"{of_text}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("linear_attn.A_log", "forget_gate.A_log")):
                # The chunks of transformers subtract sums of decays: their error grows with these.
                parameter.uniform_(-4, 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1 and not name.endswith(("A_log", "inv_freq")):
                parameter.uniform_(0.5, 1.5)
                if family.startswith("Qwen3") and "linear_attn" not in name:
                    parameter.sub_(1)  # of norms, whose weights lack 1 in files
            elif "conv" in name and parameter.ndim == 3:
                parameter.normal_(0, 0.5)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A model of transformers, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build(*FAMILIES[request.param])
    model.save_pretrained(folder)
    as_published(folder)
    return request.param, model, folder


def prompts() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTHS.max())).astype(np.int32)


def test_logits_greedy_tokens_and_an_engine(family, request):
    name, model, folder = family
    lm = dataclasses.replace(
        mpjax.load(folder, dtype="float32", precision="W32A32KV16"), page_size=16
    )
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 70))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    assert abs(expected).max() > 1
    error = np.abs(np.asarray(lm.model(tokens.astype(np.int32))) - expected).max()
    assert error < 1e-5 * abs(expected).max()
    padded = prompts()
    found = generate_tokens(lm.model, padded, LENGTHS, **OPTIONS).tokens
    rows = [row[:length] for row, length in zip(padded, LENGTHS, strict=True)]
    for row, new in zip(rows, found, strict=True):
        # Not `model.generate`, whose single steps don't limit the steps of Mamba2.
        whole = torch.from_numpy(np.concatenate([row, new])[None].astype(np.int64))
        with torch.no_grad():
            likeliest = model(whole).logits[0].argmax(-1).numpy()
        np.testing.assert_array_equal(new, likeliest[len(row) - 1 : -1])
    assert len(np.unique(found)) > 3  # else equal texts would say nothing
    if name in ENGINES or is_asked_for(request.config):
        check_engine(lm, [*rows, rows[0][3:]], found.tolist())


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "granite-hybrid-dense", "lfm2"])
def test_greedy_tokens_over_200_steps(name, tmp_path):
    """Also where they are verified, several at a time."""
    model = build(*FAMILIES[name])
    model.save_pretrained(tmp_path)
    lm = mpjax.load(tmp_path, dtype="float32", precision="W32A32KV16")
    prompt, options = prompts()[:1], OPTIONS | {"max_new_tokens": 200}
    found = generate_tokens(lm.model, prompt, LENGTHS[:1], **options).tokens[0]
    whole = torch.from_numpy(np.concatenate([prompt[0], found])[None].astype(np.int64))
    with torch.no_grad():
        likeliest = model(whole).logits[0].argmax(-1).numpy()
    np.testing.assert_array_equal(found, likeliest[LENGTHS[0] - 1 : -1])
    again = generate_tokens(
        lm.model, prompt, LENGTHS[:1], speculate=mpjax.Ngram(k=4, n=1), **options
    )
    np.testing.assert_array_equal(again.tokens[0], found)
    assert int(again.speculated.proposed.sum()) > 10


def check_engine(lm, texts: list[np.ndarray], known: list[list[int]]) -> None:
    """Rows in pieces, two of which have no room at once, say what they say alone."""
    small = {"slots": 2, "max_tokens": 96, "chunk_tokens": 8, "steps": 4, "table_states": 0}
    last = texts[len(known)]
    new = generate_tokens(lm.model, last[None], [len(last)], **OPTIONS).tokens.tolist()
    with mpjax.Engine(lm, cache_memory=memory_of(lm, 2, 8), **small) as engine:
        handles = [engine.submit(row.tolist(), **OPTIONS) for row in texts]
        assert [handle.result().tokens for handle in handles] == known + new
        assert engine.statistics()["preemptions"] > 0


def memory_of(lm, slots: int, pages: int) -> int:
    """The bytes of an engine's state that has so many pages, one of which is nowhere."""
    each, fixed = cache_bytes(lm, slots)
    return fixed + slots * VOCABULARY + (pages + 1) * sum(each)


def test_it_is_quantised_saved_and_restored(family, tmp_path):
    name, model, folder = family
    precision, bound = ("W4g32A16KV8", 0.6) if name in ENGINES else ("W8g32A16KV16", 0.1)
    lm = mpjax.load(folder, dtype="float32", precision=precision)
    tokens = prompts()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    found = np.asarray(lm.model(tokens))
    assert 0 < abs(found - expected).mean() < bound * abs(expected).mean()
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved")
    assert again.config == lm.config
    np.testing.assert_array_equal(again.model(tokens), found)


def test_a_text_model_beside_one_that_reads_images(tmp_path):
    """Tensors of images, and of a head that proposes tokens, are left out."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "patch_size": 4, "num_position_embeddings": 16}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92}
    text = {key: value for key, value in SIZES.items() if key != "attn_implementation"} | DELTA
    whole = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, vision_end_token_id=93, eos_token_id=None, **ids
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(whole).to(torch.float32).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"mtp.fc.weight": np.zeros((64, 128), np.float32), "mtp.norm.weight": np.zeros(64)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    tokens = np.random.default_rng(0).integers(0, 90, (2, 40))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    found = mpjax.load(tmp_path, dtype="float32", precision="W32A32KV16").model(
        tokens.astype(np.int32)
    )
    assert abs(np.asarray(found) - expected).max() < 1e-5 * abs(expected).max()


def test_blocks_in_fp8_beside_maps_in_16_bits(tmp_path):
    """As Qwen's own files: rates, decays and the head are not converted."""
    model = build("Qwen3_5", {**DELTA, "hidden_size": 128})
    model.save_pretrained(tmp_path)
    tensors, kept = load_file(tmp_path / "model.safetensors"), []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if name == "lm_head" or name.endswith(("in_proj_a", "in_proj_b")):
                kept.append(name)
                continue
            values = pack_module_fp8(tensors, FP8, name)
            with torch.no_grad():
                module.weight.copy_(torch.from_numpy(values.T.copy()))
    save_file(tensors, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config=FP8 | {"modules_to_not_convert": kept})
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    lm = mpjax.load(tmp_path, dtype="float32", precision="WFP8A16KV16")
    found = np.asarray(lm.model(tokens.astype(np.int32)))
    assert abs(found - expected).max() < 1e-5 * abs(expected).max()
