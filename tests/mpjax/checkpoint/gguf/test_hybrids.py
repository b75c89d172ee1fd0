"""GGUF files of families whose mixers keep a state, against transformers' models."""

from __future__ import annotations

import numpy as np
import pytest

import mpjax
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.gguf.write_gguf import TOKENS as VOCABULARY
from tests.mpjax.checkpoint.gguf.write_gguf import gguf, vocabulary
from tests.mpjax.checkpoint.test_huggingface_parity import reference_logits
from tests.mpjax.checkpoint.test_hybrid_families import FAMILIES, build

pytest.importorskip("torch")

TOKENS = np.random.default_rng(0).integers(0, len(VOCABULARY), (2, 20))
_MAMBA = {
    **{".in_proj": ".ssm_in", ".conv1d": ".ssm_conv1d", ".out_proj": ".ssm_out"},
    **{".A_log": ".ssm_a", ".dt_bias": ".ssm_dt.bias", ".D": ".ssm_d"},
}
_ATTENTION = {f".self_attn.{which}_proj": f".attn_{which}" for which in "qkv"}
_LFM2 = {
    **{"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm"},
    **_ATTENTION,
    **{".self_attn.q_layernorm": ".attn_q_norm", ".self_attn.k_layernorm": ".attn_k_norm"},
    **{".self_attn.out_proj": ".attn_output", ".operator_norm": ".attn_norm"},
    **{".conv.in_proj": ".shortconv.in_proj", ".conv.conv": ".shortconv.conv"},
    **{".conv.out_proj": ".shortconv.out_proj", ".feed_forward.gate.": ".ffn_gate_inp."},
    ".feed_forward.expert_bias": ".exp_probs_b.bias",
    **{".feed_forward.w1": ".ffn_gate", ".feed_forward.w3": ".ffn_up"},
    ".feed_forward.w2": ".ffn_down",
}
# Names in transformers' models, and in GGUF files.
NAMES: dict[str, dict[str, str]] = {
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "falcon-h1": {
        **{"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm"},
        **{"lm_head": "output", **_ATTENTION, ".self_attn.o_proj": ".attn_output"},
        **{f".mamba{name}": own for name, own in _MAMBA.items()},
        **{".mamba.norm": ".ssm_norm", ".input_layernorm": ".attn_norm"},
        ".pre_ff_layernorm": ".ffn_norm",
        **{f".feed_forward.{which}_proj": f".ffn_{which}" for which in ("gate", "up", "down")},
    },
    "nemotron_h_moe": {
        **{"model.embeddings": "token_embd", "model.norm_f": "output_norm", "lm_head": "output"},
        **{f".mixer{name}": own for name, own in _MAMBA.items()},
        **{f".mixer.{which}_proj": f".attn_{which}" for which in "qkv"},
        **{".mixer.o_proj": ".attn_output", ".mixer.norm": ".ssm_norm", ".norm.": ".attn_norm."},
        ".mixer.gate.e_score_correction_bias": ".exp_probs_b.bias",
        ".mixer.gate.": ".ffn_gate_inp.",
        ".mixer.experts.up_proj": ".ffn_up_exps.weight",
        ".mixer.experts.down_proj": ".ffn_down_exps.weight",
        ".mixer.shared_experts.up_proj": ".ffn_up_shexp",
        ".mixer.shared_experts.down_proj": ".ffn_down_shexp",
    },
}
SSM = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.inner_size": 96, "ssm.group_count": 2}
KEYS: dict[str, dict] = {
    "lfm2": {
        **{"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 4},
        "feed_forward_length": 96,
    },
    "lfm2moe": {
        **{"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 4},
        **{"feed_forward_length": 128, "expert_feed_forward_length": 64, "expert_count": 4},
        **{"expert_used_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 2},
    },
    "falcon-h1": {
        **{"attention.head_count_kv": 2, "feed_forward_length": 128, **SSM},
        "ssm.time_step_rank": 12,
    },
    "nemotron_h_moe": {
        **{"attention.head_count_kv": [0, 0, 2], **SSM},
        **{"feed_forward_length": [64, 0, 0], "ssm.time_step_rank": 8},
        **{"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64},
        **{"expert_shared_feed_forward_length": 96, "expert_shared_count": 1},
        **{"expert_weights_norm": True, "expert_weights_scale": 1.5},
        **{"attention.key_length": 16, "attention.value_length": 16},
        "rope.dimension_count": 12,  # hidden size / heads, of a rotation that there is not
    },
}
# Changes of the models of test_hybrid_families.py: what GGUF's files can say.
CHANGES: dict[str, tuple[str, dict]] = {
    "lfm2": ("lfm2", {"conv_bias": False}),
    "lfm2moe": ("lfm2-moe", {"routed_scaling_factor": 1.0}),
    "falcon-h1": (
        "falcon-h1",
        {
            **{"attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0},
            **{"ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "key_multiplier": 1.0},
            **{"mlp_multipliers": None, "ssm_multipliers": None, "lm_head_multiplier": 1.0},
            **{"embedding_multiplier": 1.0, "mamba_norm_before_gate": False},
        },
    ),
    "nemotron_h_moe": (
        "nemotron-h",
        {
            **{"layers_block_type": ["moe", "linear_attention", "full_attention"]},
            **{"n_group": 1, "topk_group": 1, "time_step_min": 0.001},
        },
    ),
}


def content(name: str, array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor as llama.cpp's converter writes it."""
    if name.endswith("ssm_a"):
        array = -np.exp(array)
    if name.endswith(("ssm_a", "ssm_d")):
        array = array[:, None]
    elif "conv" in name and array.ndim == 3:
        array = array[:, 0]
    elif "ssm_norm" in name:
        array = array.reshape(2, -1)
    array = np.ascontiguousarray(array, np.float32)
    return "F32", array.shape, array.tobytes()


def write(architecture: str, model) -> bytes:
    tensors = {}
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        array = tensor.detach().numpy()
        name = path
        for theirs, own in NAMES[architecture].items():
            name = name.replace(theirs, own, 1)
        name = name.replace("model.layers", "blk")
        if "mixer.up_proj" in name or "mixer.down_proj" in name:
            name = name.replace(".mixer.", ".ffn_").replace("_proj", "")
        if name.endswith("feed_forward.experts.gate_up_proj"):  # a stack of both
            for half, part in zip(("gate", "up"), np.split(array, 2, 1), strict=True):
                own = name.replace("feed_forward.experts.gate_up_proj", f"ffn_{half}_exps.weight")
                tensors[own] = content(own, part)
        elif name.endswith("feed_forward.experts.down_proj"):
            own = name.replace("feed_forward.experts.down_proj", "ffn_down_exps.weight")
            tensors[own] = content(own, array)
        elif "inv_freq" not in name and "mup_vector" not in name:
            tensors[name] = content(name, array)
    config = model.config
    epsilon = next(
        float(getattr(config, key))
        for key in ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
        if hasattr(config, key)
    )
    theta = float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 1e4))
    keys = {
        **{"block_count": config.num_hidden_layers, "context_length": 256},
        **{"embedding_length": 64, "attention.head_count": 4},
        "attention.layer_norm_rms_epsilon": epsilon,
        "rope.freq_base": theta,
    } | KEYS[architecture]
    metadata = {"general.architecture": architecture, **vocabulary()}
    metadata |= {f"{architecture}.{key}": own for key, own in keys.items()}
    return gguf(metadata, tensors)


@pytest.fixture(scope="module", params=CHANGES)
def case(request):
    name, changes = CHANGES[request.param]
    family, base = FAMILIES[name]
    sizes = {"vocab_size": len(VOCABULARY), "tie_word_embeddings": "lfm2" in request.param}
    model = build(family, base | changes | sizes)
    return request.param, model, write(request.param, model)


def test_logits_are_those_of_the_model(case, tmp_path):
    _, model, data = case
    (tmp_path / "m.gguf").write_bytes(data)
    lm = mpjax.load(tmp_path / "m.gguf", precision="W32A32KV16", dtype="float32")
    expected = reference_logits(model, TOKENS)
    assert abs(expected).max() > 1
    found = np.asarray(lm.model(TOKENS.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize(
    ("architecture", "key", "given", "message"),
    [
        ("lfm2", "attention.head_count_kv", [1, 2, 0], r"head_count_kv is \[1, 2\]: expected one"),
        (
            "lfm2",
            "attention.head_count_kv",
            [0, 2],
            "ndarray of 2: expected a list of 3 numbers",
        ),
        ("nemotron_h_moe", "moe_latent_size", 16, "moe_latent_size' is 16, which is not supported"),
        ("lfm2moe", "expert_gating_func", 1, "expert_gating_func is 1: expected 2, the sigmoid"),
    ],
)
def test_what_is_wrong_is_named(architecture, key, given, message, monkeypatch, tmp_path):
    monkeypatch.setitem(KEYS, architecture, KEYS[architecture] | {key: given})
    name, changes = CHANGES[architecture]
    family, base = FAMILIES[name]
    data = write(architecture, build(family, base | changes | {"vocab_size": len(VOCABULARY)}))
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(tmp_path / "m.gguf")


def test_a_rate_is_below_0(tmp_path, monkeypatch):
    name, changes = CHANGES["falcon-h1"]
    family, base = FAMILIES[name]
    model = build(family, base | changes | {"vocab_size": len(VOCABULARY)})
    model.model.layers[1].mamba.A_log.data[3] = -float("inf")
    (tmp_path / "m.gguf").write_bytes(write("falcon-h1", model))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mamba\.A_log: a number of ssm_a is not"):
        mpjax.load(tmp_path / "m.gguf", dtype="float32")
