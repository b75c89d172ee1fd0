"""GGUF files of families whose mixers keep a state, against transformers' models."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import mpjax
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.gguf.family_files import round_exactly
from tests.mpjax.checkpoint.gguf.write_gguf import TOKENS as VOCABULARY
from tests.mpjax.checkpoint.gguf.write_gguf import gguf, vocabulary
from tests.mpjax.checkpoint.test_huggingface_parity import reference_logits
from tests.mpjax.checkpoint.test_hybrid_families import FAMILIES, build
from tests.mpjax.checkpoint.test_mtp import head_tensors

pytest.importorskip("torch")
gguf_package = pytest.importorskip("gguf")

TOKENS = np.random.default_rng(0).integers(0, len(VOCABULARY), (2, 20))
_MAMBA = {
    **{".in_proj": ".ssm_in", ".conv1d": ".ssm_conv1d", ".out_proj": ".ssm_out"},
    **{".A_log": ".ssm_a", ".dt_bias": ".ssm_dt.bias", ".D": ".ssm_d"},
}
_HALVES = ("gate", "up", "down")
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
_QWEN = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{**_ATTENTION, ".self_attn.o_proj": ".attn_output", ".self_attn.q_norm": ".attn_q_norm"},
    **{".self_attn.k_norm": ".attn_k_norm", ".input_layernorm": ".attn_norm"},
    **{".post_attention_layernorm": ".post_attention_norm", ".conv1d": ".ssm_conv1d"},
    **{".linear_attn.in_proj_qkv.": ".attn_qkv.", ".linear_attn.in_proj_z": ".attn_gate"},
    **{".linear_attn.in_proj_b.": ".ssm_beta.", ".linear_attn.in_proj_a": ".ssm_alpha"},
    **{".linear_attn.in_proj_ba": ".ssm_ba", ".linear_attn.A_log": ".ssm_a"},
    **{".linear_attn.norm": ".ssm_norm", ".linear_attn.out_proj": ".ssm_out"},
    **{".linear_attn.dt_bias": ".ssm_dt.bias", ".linear_attn.ssm": ".ssm"},
    **{".mlp.gate.": ".ffn_gate_inp.", ".mlp.shared_expert_gate": ".ffn_gate_inp_shexp"},
    **{f".mlp.shared_expert.{which}_proj": f".ffn_{which}_shexp" for which in _HALVES},
    **{f".mlp.{which}_proj": f".ffn_{which}" for which in _HALVES},
    **{f".mlp.experts.{which}_proj": f".ffn_{which}_exps.weight" for which in ("gate_up", "down")},
}
_GRANITE = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    **{f".mamba{name}": own for name, own in _MAMBA.items()},
    **{**_ATTENTION, ".self_attn.o_proj": ".attn_output", ".mamba.norm": ".ssm_norm"},
    **{".input_layernorm": ".attn_norm", ".post_attention_layernorm": ".ffn_norm"},
    ".block_sparse_moe.router.": ".ffn_gate_inp.",
    ".block_sparse_moe.experts.down_proj": ".ffn_down_exps.weight",
    ".shared_mlp.output_linear": ".ffn_down_shexp",
}
NAMES["granitehybrid"] = _GRANITE
NAMES |= dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _QWEN)
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
# Sizes of heads with whole blocks, and a head that predicts a second token.
_DELTA = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.inner_size": 192},
    **{"ssm.time_step_rank": 6, "attention.key_length": 32, "attention.value_length": 32},
    **{"attention.head_count_kv": 2, "rope.dimension_count": 8, "full_attention_interval": 2},
    "rope.dimension_sections": [2, 1, 1, 0],
}
_OF_EXPERTS = {
    **{"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 32},
    "expert_shared_feed_forward_length": 96,
}
KEYS |= {
    "qwen35": {
        **{**_DELTA, "feed_forward_length": 128, "block_count": 3, "nextn_predict_layers": 1},
        "attention.recurrent_layers": [True, False, False],
    },
    "qwen35moe": {**_DELTA, **_OF_EXPERTS, "block_count": 3, "nextn_predict_layers": 1},
    "qwen3next": {**_DELTA, **_OF_EXPERTS},
    "granitehybrid": {
        **{"attention.head_count_kv": [0, 2, 0], "feed_forward_length": 128},
        **{"ssm.conv_kernel": 3, "ssm.state_size": 12, "ssm.inner_size": 128},
        **{"ssm.group_count": 2, "ssm.time_step_rank": 8, "expert_count": 4},
        **{"expert_used_count": 2, "expert_shared_feed_forward_length": 96},
        **{"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4},
        **{"logit_scale": 0.5},
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


CHANGES |= {
    "qwen35": ("qwen3.5", {"linear_value_head_dim": 32, "attention_bias": False}),
    "granitehybrid": (
        "granite-hybrid",
        {"time_step_limit": [0.0, float("inf")], "position_embedding_type": "rope"},
    ),
    "qwen35moe": ("qwen3.5-moe", {"linear_value_head_dim": 32}),
    "qwen3next": (
        "qwen3-next",
        {"linear_value_head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": []},
    ),
}


def as_qwen(architecture: str, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor of Gated DeltaNet in the order of llama.cpp, before other changes, or several."""
    heads, size = 6, 32

    def tiled(rows: np.ndarray, size: int) -> np.ndarray:  # head h · 3 + j becomes j · 2 + h
        order = [h * 3 + j for j in range(3) for h in range(2)]
        return rows.reshape(heads, size, *rows.shape[1:])[order].reshape(rows.shape)

    if name.endswith("norm.weight") and "ssm_norm" not in name:
        return {name: array + 1}
    if name.endswith("in_proj_qkvz.weight"):  # of each key head
        parts = array.reshape(2, -1, array.shape[1])
        split = np.split(parts, [8, 16, 16 + 3 * size], axis=1)
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in split)
        begin = name.partition(".linear_attn")[0]
        return {
            f"{begin}.attn_qkv.weight": np.concatenate([q, k, v]),
            f"{begin}.attn_gate.weight": z,
        }
    if architecture == "qwen3next":
        return {name: array}
    if "attn_qkv" in name or "conv1d" in name:
        return {name: np.concatenate([array[:32], tiled(array[32:], size)])}
    if "attn_gate" in name:
        return {name: tiled(array, size)}
    if "ssm_out" in name:
        return {name: tiled(array.T, size).T}
    if any(kind in name for kind in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")):
        return {name: tiled(array, 1)}
    return {name: array}


def content(
    name: str, array: np.ndarray, quantized: tuple[str, ...] = ()
) -> tuple[str, tuple[int, ...], bytes]:
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
    if any(kind in name for kind in quantized):
        blocks = gguf_package.quants.quantize(array, gguf_package.GGMLQuantizationType.Q8_0)
        return "Q8_0", array.shape, blocks.tobytes()
    return "F32", array.shape, array.tobytes()


def parts(architecture: str, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that files have for one of a model; none for numbers that it computes."""
    if any(kind in name for kind in ("inv_freq", "mup_vector")):
        return {}
    for theirs, own in NAMES[architecture].items():
        name = name.replace(theirs, own, 1)
    name = name.replace("model.layers", "blk")
    if "mixer.up_proj" in name or "mixer.down_proj" in name:
        name = name.replace(".mixer.", ".ffn_").replace("_proj", "")
    if name.endswith("feed_forward.experts.gate_up_proj"):  # a stack of both
        begin = name.removesuffix("feed_forward.experts.gate_up_proj")
        halves = zip(("gate", "up"), np.split(array, 2, 1), strict=True)
        return {f"{begin}ffn_{half}_exps.weight": part for half, part in halves}
    if name.endswith("feed_forward.experts.down_proj"):
        return {name.replace("feed_forward.experts.down_proj", "ffn_down_exps.weight"): array}
    if name.endswith(("input_linear.weight", "block_sparse_moe.experts.gate_up_proj")):
        begin, axis = ".".join(name.split(".")[:2]), array.ndim - 2
        end = "exps" if array.ndim == 3 else "shexp"
        halves = zip(("up", "gate"), np.split(array, 2, axis)[::-1], strict=True)
        return {f"{begin}.ffn_{half}_{end}.weight": part for half, part in halves}
    if architecture == "granitehybrid" and (".attn_q." in name or ".attn_k." in name):
        pairs = array.reshape(-1, 2, 8, array.shape[1])  # neighbours are rotated together
        return {name: pairs.swapaxes(1, 2).reshape(array.shape)}
    return as_qwen(architecture, name, array) if "qwen" in architecture else {name: array}


NEXTN = {
    **{"fc": "eh_proj", "norm": "shared_head_norm"},
    **{"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"},
}


def head_contents(architecture: str, quantized: tuple[str, ...]) -> dict[str, tuple]:
    """The tensors of the multi-token-prediction head, as llama.cpp's converter writes them."""
    found = {}
    for name, array in head_tensors(FAMILIES[CHANGES[architecture][0]][1]).items():
        own = {name.replace("mtp.layers.0", "model.layers.2"): array}
        if "layers.0" not in name:
            module = NEXTN[name.split(".")[1]]
            own = {f"blk.2.nextn.{module}.weight": array + ("norm" in module)}
        for written, values in own.items():
            found |= parts(architecture, written, values) if "layers" in written else own
    return {name: content(name, array, quantized) for name, array in found.items()}


def write(architecture: str, model, quantized: tuple[str, ...] = (), more=None) -> bytes:
    tensors = {name: content(name, array) for name, array in (more or {}).items()}
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for name, array in parts(architecture, path, tensor.detach().numpy()).items():
            tensors[name] = content(name, array, quantized)
    if KEYS[architecture].get("nextn_predict_layers"):
        tensors |= head_contents(architecture, quantized)
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
    round_exactly(each for path, each in model.named_parameters() if ".experts." in path)
    return request.param, model, write(request.param, model, ("_exps",))


def test_logits_are_those_of_the_model(case, tmp_path):
    """With experts in Q8_0, whose codes are kept."""
    name, model, data = case
    (tmp_path / "m.gguf").write_bytes(data)
    lm = mpjax.load(tmp_path / "m.gguf", dtype="float32")
    counts = lm.summary()["linear_maps"]
    assert {*counts.get("mlp.experts.down", ())} == (
        {"W8g32sym"} if "expert_count" in KEYS[name] else set()
    )
    expected = reference_logits(model, TOKENS)
    assert abs(expected).max() > 1
    found = np.asarray(lm.model(TOKENS.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_the_head_is_read_if_it_is_asked_for(architecture, tmp_path):
    name, changes = CHANGES[architecture]
    family, base = FAMILIES[name]
    model = build(family, base | changes | {"vocab_size": len(VOCABULARY)})
    expected = head_tensors(base)
    for quantized in ((), ("eh_proj", "attn_output")):
        (tmp_path / "m.gguf").write_bytes(write(architecture, model, quantized))
        precision, options = "W32A32KV16", {"max_new_tokens": 9, "sampling": {"temperature": 0}}
        read = functools.partial(mpjax.load, tmp_path / "m.gguf", dtype="float32")
        plain, lm = read(precision=precision), read(precision=precision, mtp=True)
        assert lm.config.num_layers == plain.config.num_layers + 1
        mixer = lm.model.layers[-1].attention
        found = {
            "fc": mixer.joint.get_value(),
            **{"norm": mixer.norm.weight.get_value() - 1},
            "pre_fc_norm_embedding": mixer.embedding_norm.weight.get_value() - 1,
            "pre_fc_norm_hidden": mixer.hidden_norm.weight.get_value() - 1,
            "layers.0.self_attn.o_proj": mixer.attention.output.kernel.get_value().T,
        }
        for module, array in found.items():
            np.testing.assert_allclose(array, expected[f"mtp.{module}.weight"], atol=5e-3)
        both = [mpjax.generate(one, [[5, 3, 9]], **options) for one in (plain, lm)]
        told = mpjax.generate(lm, [[5, 3, 9]], speculate="mtp", **options)
        assert told.tokens == both[0].tokens == both[1].tokens
        assert told.speculation.proposed[0] > 0


def test_a_head_with_its_own_table_is_refused(tmp_path):
    name, changes = CHANGES["qwen35"]
    family, base = FAMILIES[name]
    model = build(family, base | changes | {"vocab_size": len(VOCABULARY)})
    table = "blk.2.nextn.embed_tokens.weight"
    (tmp_path / "m.gguf").write_bytes(write("qwen35", model, more={table: np.zeros((9, 64))}))
    mpjax.load(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=f"{table} is a table of the multi-token-prediction"):
        mpjax.load(tmp_path / "m.gguf", mtp=True)


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("qwen35", None), ("qwen35", "W8gKA16KV16"), ("qwen3next", None)],
)
def test_heads_are_put_back_in_blocks(architecture, precision, tmp_path):
    """Heads are put in order in Q8_0 maps too, with codes kept or requantised to other groups."""
    name, changes = CHANGES[architecture]
    family, base = FAMILIES[name]
    model = build(family, base | changes | {"vocab_size": len(VOCABULARY)})
    kinds = ("ssm_out", "attn_qkv", "attn_gate", "ssm_ba", "ssm_beta", "ssm_alpha")
    (tmp_path / "m.gguf").write_bytes(write(architecture, model, kinds))
    lm = mpjax.load(tmp_path / "m.gguf", precision=precision, dtype="float32")
    expected = reference_logits(model, TOKENS)
    found = np.asarray(lm.model(TOKENS.astype(np.int32)))
    # Of most numbers: a token may have other experts.
    assert np.median(abs(found - expected)) < 0.01 * abs(expected).max()


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
        ("qwen35", "ssm.time_step_rank", 5, "has 2 key heads, 5 value heads and 192 channels"),
        ("qwen35", "nextn_predict_layers", 3, "is 3: expected fewer than the 3 layers"),
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
