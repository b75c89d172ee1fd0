"""The architectures of GGUF files, as config.json and names of Hugging Face's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpjax.checkpoint.gguf import architectures
from mpjax.checkpoint.gguf.architectures import ARCHITECTURES
from mpjax.checkpoint.gguf.blocks import TYPES
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError
from mpjax.models import FAMILIES
from tests.mpjax.checkpoint.gguf.write_gguf import llama_metadata

EMBEDDING = {"token_embd.weight": Tensor("token_embd.weight", TYPES[0], (96, 64), 0, 0)}
SSM = {
    **{"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 8},
    **{"ssm.time_step_rank": 4, "ssm.group_count": 1},
}
EXTRA = {
    "lfm2": {"lfm2.shortconv.l_cache": 3, "lfm2.attention.head_count_kv": np.array([0, 2])},
    "falcon-h1": {f"falcon-h1.{key}": size for key, size in SSM.items()},
    "nemotron_h": {
        **{f"nemotron_h.{key}": size for key, size in SSM.items()},
        "nemotron_h.attention.head_count_kv": np.array([0, 2]),
        "nemotron_h.feed_forward_length": np.array([96, 0]),
    },
    "qwen35": {
        **{f"qwen35.{key}": size for key, size in (SSM | {"ssm.group_count": 2}).items()},
        **{"qwen35.attention.key_length": 16, "qwen35.rope.dimension_count": 4},
        "qwen35.full_attention_interval": 2,
    },
    "granitehybrid": {
        **{f"granitehybrid.{key}": size for key, size in SSM.items()},
        "granitehybrid.attention.head_count_kv": np.array([0, 2]),
        **{
            f"granitehybrid.{key}": 2.0
            for key in ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
        },
    },
    "granite": {
        f"granite.{key}": 2.0
        for key in ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
    },
}
EXTRA |= {
    name: {f"{name}.attention.layer_norm_epsilon": 1e-5}
    for name in ("command-r", "cohere2", "starcoder2")
}
OF_GEMMA = {
    **{"attention.sliding_window_pattern": np.array([True, False]), "attention.sliding_window": 8},
    "embedding_length_per_layer_input": 16,
}
OF_3N = {
    **{**OF_GEMMA, "activation_sparsity_scale": np.float32([-np.inf, 1.0])},
    **{"altup.active_idx": 0, "altup.num_inputs": 4},
}
EXTRA["gemma3n"] = {f"gemma3n.{key}": value for key, value in OF_3N.items()}
SIZES = {"attention.key_length": 32, "attention.key_length_swa": 16}
EXTRA["gemma4"] = {f"gemma4.{key}": value for key, value in (OF_GEMMA | SIZES).items()}
EXTRA["apertus"] = {f"xielu.alpha_{sign}": np.float32([0.5, 0.7]) for sign in "pn"}
YARN = {
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 1.5, "attention.temperature_scale": 0.1},
    **{"rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 0.1},
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
EXTRA["mistral3"] = {f"mistral3.{key}": value for key, value in YARN.items()}
# Mixtures, with the keys that their readers expect.
OF_EXPERTS: dict[str, dict] = {
    "qwen2moe": {"expert_shared_feed_forward_length": 64},
    **{"qwen3moe": {}, "qwen3vlmoe": {}, "hunyuan-moe": {}},
    "glm4moe": {"leading_dense_block_count": 1},
    "dots1": {"expert_gating_func": 2, "leading_dense_block_count": 1},
    "minimax-m2": {"expert_gating_func": 2},
    "gpt-oss": {"attention.sliding_window": 8},
    "llama4": {"interleave_moe_layer_step": 2},
    "ernie4_5-moe": {"interleave_moe_layer_step": 1, "leading_dense_block_count": 1},
    "granitemoe": {
        key: 2.0 for key in ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
    },
}
LATENT = {
    **{"attention.kv_lora_rank": 24, "attention.head_count_kv": 4, "rope.dimension_count": 8},
    **{"attention.key_length": 20, "attention.value_length": 16, "attention.q_lora_rank": 12},
    "leading_dense_block_count": 1,
}
OF_EXPERTS["phimoe"] = {"attention.sliding_window": 8}
OF_EXPERTS["kimi-linear"] = {
    **{**LATENT, "attention.head_count_kv": np.array([0, 1]), "kda.head_dim": 16},
    **{"ssm.conv_kernel": 4, "expert_weights_norm": False, "attention.q_lora_rank": 0},
}
OF_EXPERTS |= {"deepseek2": LATENT | {"expert_gating_func": 2}, "mistral4": LATENT | YARN}
for _name, _keys in OF_EXPERTS.items():
    EXTRA[_name] = {f"{_name}.{key}": value for key, value in (EXPERTS | _keys).items()}
HEAD = {"output.weight": EMBEDDING["token_embd.weight"]}


def read(changes=(), tensors=EMBEDDING, name="llama"):
    values = llama_metadata(name) | EXTRA.get(name, {}) | dict(changes)
    return architectures.read_config(Metadata(Path("m.gguf"), values), tensors, {})


def test_the_config_json_of_a_file():
    assert read({"llama.attention.key_length": 32}) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    untied = read(tensors={**EMBEDDING, **HEAD, "blk.0.attn_q.bias": EMBEDDING})
    assert (untied["tie_word_embeddings"], untied["attention_bias"]) == (False, True)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OF_EXPERTS])
def test_every_architecture_is_a_family_here(name):
    config = read(name=name)
    family = FAMILIES[config["architectures"][0]]
    assert family.config_from_hf(config).num_layers == 2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_name_of_a_family_has_one_in_the_file(name):
    """Names are those of the family's places, each once, and others stay as they are."""
    architecture, config = ARCHITECTURES[name], read(name=name)
    family = FAMILIES[config["architectures"][0]]
    built = family.config_from_hf(config)
    wanted = {place.name.removesuffix(".weight") for place in family.array_places(built)}
    wanted |= {n for place in family.linear_places(built) for n in place.names}
    wanted = {n for n in wanted if not n.endswith(("norm.bias", "alpha_p", "alpha_n"))}
    known = [f"blk.{layer}.{kind}" for layer in range(2) for kind in architecture.names]
    found = [architecture.translate(n) for n in (*architecture.tables, *known)]
    found += [architecture.array(f"blk.{i}.{n}") for n in architecture.arrays for i in range(2)]
    assert wanted <= set(found)
    halves = 2 if architecture.joins else 0  # of layers whose gate and up are one map
    assert len(set(found)) == len(found) - halves
    assert architecture.translate("output") == "lm_head"
    assert architecture.translate("blk.0.other") == "blk.0.other"


def test_modules_of_experts_alone_have_a_number():
    mixture = architectures.MIXTURES["qwen3moe"]
    expert = "model.layers.0.mlp.experts.3.gate_proj"
    assert mixture.translate("blk.0.ffn_gate_exps.3") == expert
    for name in ("blk.0.ffn_gate_exps", "blk.0.attn_q.3", "blk.0.ffn_gate_shexp.3"):
        assert mixture.translate(name) == name


def test_the_rows_of_queries_and_keys_are_separated():
    """llama.cpp's converter interleaves the halves of each head; `change` undoes that."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for name, heads in (("blk.3.attn_q", 4), ("blk.3.attn_k", 2)):
        for shape in ((heads * 8, 5), (heads * 8,)):
            rows = np.arange(np.prod(shape)).reshape(shape)
            written = rows.reshape(heads, 2, 4, *shape[1:]).swapaxes(1, 2).reshape(shape)
            change = ARCHITECTURES["llama"].change(name, config)
            np.testing.assert_array_equal(change(written), rows)
    assert change(np.ones(7)).shape == (7,)  # `make_plan` refuses it
    assert ARCHITECTURES["llama"].change("blk.3.attn_v", config) is None
    assert ARCHITECTURES["qwen2"].change("blk.3.attn_q", config) is None


def test_gemma():
    norm = ARCHITECTURES["gemma3"].change("blk.0.attn_q_norm", {})
    np.testing.assert_array_equal(norm(np.float32([1.5, 0.0])), [0.5, -1.0])
    changes = {
        "gemma3.attention.key_length": 32,
        "gemma3.attention.sliding_window": 8,
        "gemma3.rope.freq_base": 1e6,
    }
    built = FAMILIES["Gemma3ForCausalLM"].config_from_hf(read(changes, name="gemma3"))
    assert (built.rope_theta, built.local_rope_theta) == (1e6, 1e4)
    assert (built.layers[0].attention.window, built.layers[0].attention.scale) == (8, 32**-0.5)  # type: ignore[attr-defined]
    large = read({"gemma2.block_count": 46, "gemma2.final_logit_softcapping": 30.0}, name="gemma2")
    assert (large["query_pre_attn_scalar"], large["final_logit_softcapping"]) == (16, 30)


def test_granite_4():
    """Without experts the MLP's size is the file's; a flag tells of the rotary embedding."""
    found = read({"granitehybrid.rope.scaling.finetuned": False}, name="granitehybrid")
    assert (found["position_embedding_type"], found["shared_intermediate_size"]) == ("nope", 96)
    assert read(name="granitehybrid")["position_embedding_type"] == "rope"
    with pytest.raises(CheckpointError, match="inner_size is 60: expected a multiple of the 4"):
        read({"granitehybrid.ssm.inner_size": 60}, name="granitehybrid")


def test_phi():
    found = read({"phi3.rope.dimension_count": 12, "phi3.attention.sliding_window": 8}, name="phi3")
    assert (found["partial_rotary_factor"], found["sliding_window"]) == (0.75, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.type": "mmproj"}, "is the encoder of a model's images or sounds: expected"),
        ({"general.architecture": "clip"}, "is the encoder of a model's images or sounds"),
        ({"general.type": "adapter"}, "is an adapter: expected a model; take"),
        ({"general.architecture": "rwkv7"}, "general.architecture is 'rwkv7': expected one of"),
        ({"llama.expert_count": 8}, "has no 'llama.expert_used_count': expected a whole number"),
        ({"llama.rope.dimension_count": 3}, "llama.rope.dimension_count is 3: expected "),
        ({"llama.block_count": 2.5}, "'llama.block_count' is 2.5: expected a whole number"),
    ],
)
def test_files_that_are_refused(changes, said):
    with pytest.raises(CheckpointError, match=rf"^m\.gguf.*{said}"):
        read(changes)


def test_a_file_without_a_language_model():
    with pytest.raises(CheckpointError, match=r"no tensor 'token_embd\.weight' of two dimensions"):
        read(tensors={})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_package_of_the_format_has_these_names(name):
    gguf = pytest.importorskip("gguf")
    number = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(number, 2)
    kinds = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[number]}
    kept = [kind for kind in ARCHITECTURES[name].names if f"blk.{{bid}}.{kind}" in kinds]
    assert len(kept) >= 6
    for kind in kept:
        if ARCHITECTURES[name].joins and kind.startswith("ffn_") and kind != "ffn_norm":
            continue  # whose names differ between models with and without experts
        own = ARCHITECTURES[name].translate(f"blk.1.{kind}")
        found = names.get_name(own) or names.get_name(f"{own}.weight")  # Falcon-H1's norm
        assert found == f"blk.1.{kind}", own
