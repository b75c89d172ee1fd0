"""GGUF files of families of attention and experts, written with the format's own package.

Tensor names come from the package's table, and what a converter changes is written here by the
rules of llama.cpp's conversion: the reader's tables are used nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mpjax
from mpjax.errors import CheckpointError
from tests.models.sharded_families import keys
from tests.mpjax.checkpoint.gguf.write_gguf import KINDS, MERGES
from tests.mpjax.checkpoint.gguf.write_gguf import TOKENS as VOCABULARY
from tests.mpjax.checkpoint.test_every_family import build
from tests.sweeps import in_sweep

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

PROMPT = np.random.default_rng(0).integers(0, len(VOCABULARY), (2, 20))
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
    **{"original_max_position_embeddings": 64, "mscale": 0.707, "mscale_all_dim": 0.707},
}
OF_GPT_OSS = {
    **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "truncate": False},
    **{"original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0},
}
FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
# GGUF's architecture: the class in transformers, and changed keys of its config.json.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "command-r": ("Cohere", {}),
    # Whose files have no pattern: each fourth layer has full attention.
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "layer_types": None}),
    "exaone4": ("Exaone4", {}),
    "glm4": ("Glm4", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", {"sliding_window": None, "norm_epsilon": 1e-3}),
    "apertus": ("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "mistral3": ("Ministral3", {"sliding_window": None}),
    "olmo2": ("Olmo3", {}),
    "qwen2vl": ("Qwen2", {}),
    "qwen3vl": ("Qwen3", {}),
    "qwen3vlmoe": ("Qwen3Moe", {"norm_topk_prob": True}),
    "seed_oss": ("SeedOss", {"attention_bias": True}),
    "glm4moe": ("Glm4Moe", {"norm_topk_prob": True, "attention_bias": True}),
    "dots1": (
        "Dots1",
        {"num_hidden_layers": 2, "first_k_dense_replace": 1, "sliding_window": None},
    ),
    "ernie4_5-moe": ("Ernie4_5_Moe", {"moe_layer_start_index": 1}),
    "hunyuan-moe": ("HunYuanMoEV1", {}),
    "granitemoe": ("GraniteMoeShared", {"head_dim": 16}),
    "minimax-m2": ("MiniMaxM2", {}),
    "gpt-oss": ("GptOss", {"sliding_window": 12, "rope_parameters": OF_GPT_OSS}),
    # With the sizes of chunks and steps that llama.cpp has, of which a test has no tokens.
    "llama4": (
        "Llama4",
        {
            **{"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "moe_layers": None},
            **{"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
            "attn_scale": 0.1,
        },
    ),
    "deepseek2": ("DeepseekV3", {"rope_parameters": YARN, "norm_topk_prob": True}),
    "deepseek2-lite": ("DeepseekV2", {"rope_parameters": YARN, "norm_topk_prob": False, **FOUR}),
    "deepseek2-flash": ("Glm4MoeLite", {"norm_topk_prob": True}),
    "mistral4": (
        "Mistral4",
        {
            "rope_parameters": YARN | {"mscale": 1.0, "llama_4_scaling_beta": 0.5},
            "first_k_dense_replace": 0,
        },
    ),
}
ROTATED_IN_PAIRS = ("mistral3", "granitemoe")  # whose query and key rows the converter moves
# Keys of config.json, as llama.cpp's converter reads them, and the writer's method for each.
KEYS: dict[str, str] = {
    **{"num_hidden_layers": "block_count", "max_position_embeddings": "context_length"},
    **{"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length"},
    **{"num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv"},
    **{"rms_norm_eps": "layer_norm_rms_eps", "layer_norm_eps": "layer_norm_eps"},
    **{"norm_epsilon": "layer_norm_eps", "num_local_experts": "expert_count"},
    **{"num_experts": "expert_count", "n_routed_experts": "expert_count"},
    **{"moe_num_experts": "expert_count", "moe_k": "expert_used_count"},
    **{"moe_topk": "expert_used_count", "num_experts_per_tok": "expert_used_count"},
    **{"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
    **{"moe_intermediate_size": "expert_feed_forward_length", "logit_scale": "logit_scale"},
    **{"n_shared_experts": "expert_shared_count", "logits_scaling": "logit_scale"},
    **{"moe_num_shared_experts": "expert_shared_count", "sliding_window": "sliding_window"},
    **{"first_k_dense_replace": "leading_dense_block_count", "rotary_dim": "rope_dimension_count"},
    **{"moe_layer_start_index": "leading_dense_block_count"},
    **{"moe_layer_interval": "interleave_moe_layer_step"},
    **{"routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm"},
    **{"embedding_multiplier": "embedding_scale", "attention_multiplier": "attention_scale"},
    **{"residual_multiplier": "residual_scale", "kv_lora_rank": "kv_lora_rank"},
    **{"q_lora_rank": "q_lora_rank", "qk_rope_head_dim": "rope_dimension_count"},
    **{"shared_intermediate_size": "expert_shared_feed_forward_length"},
}


def write_metadata(writer: Any, name: str, hf: dict[str, Any]) -> None:
    """The header, by the converter's rules."""
    is_latent = "kv_lora_rank" in hf
    if name == "llama4":
        writer.add_interleave_moe_layer_step(hf["interleave_moe_layer_step"])
        writer.add_expert_feed_forward_length(hf["intermediate_size"])
        hf = hf | {"intermediate_size": hf["intermediate_size_mlp"]}
    for key, method in KEYS.items():
        if (value := hf.get(key)) is not None:
            getattr(writer, f"add_{method}")(value)
    if is_latent:
        writer.add_head_count_kv(1)
        writer.add_key_length(hf["kv_lora_rank"] + hf["qk_rope_head_dim"])
        writer.add_value_length(hf["kv_lora_rank"])
        writer.add_key_length_mla(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        writer.add_value_length_mla(hf["v_head_dim"])
    elif name not in ("granitemoe",):
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])
    if name.startswith("glm4"):
        share = hf["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(hf["head_dim"] * share))
    if "vl" in name:
        writer.add_rope_dimension_sections([2, 3, 3, 0])
        writer.add_num_deepstack_layers(3)
    if name in ("glm4moe", "dots1", "minimax-m2", "deepseek2", "deepseek2-flash"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if hf.get("sliding_window") and name != "cohere2":
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in hf["layer_types"]])
    write_rotation(writer, name, hf["rope_parameters"], 0.1 if is_latent else 1.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)


def write_rotation(writer: Any, name: str, rope: dict[str, Any], unit: float) -> None:
    """The keys of the rotary embedding. unit: of YaRN's multiplier, which depends on the family."""
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if (growth := rope.get("mscale_all_dim")) is not None:
            writer.add_rope_scaling_yarn_log_mul(growth * unit)
        if name in ("mistral3", "mistral4"):
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor for all experts of a layer, in the place of one for each."""
    found, experts = {}, {}
    for name, array in tensors.items():
        if (match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)) is None:
            found[name] = array
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
    return found | {
        name: np.stack([own[i] for i in range(len(own))]) for name, own in experts.items()
    }


def rotated_in_pairs(hf: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    """Rows of queries or keys, of which those of each head's halves alternate."""
    pairs = rows.reshape(-1, 2, hf["head_dim"] // 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def converted(
    name: str, hf: dict[str, Any], path: str, array: np.ndarray, is_joint: bool
) -> dict[str, np.ndarray]:
    """The tensors that the converter makes of one, by names that the package's table knows."""
    if path.endswith("kv_b_proj.weight") and not is_joint:
        heads = hf["num_attention_heads"]
        keys, values = np.split(
            array.reshape(heads, -1, array.shape[1]), [hf["qk_nope_head_dim"]], 1
        )
        return {
            path.replace("kv_b_proj", "k_b_proj"): keys.swapaxes(1, 2),
            path.replace("kv_b_proj", "v_b_proj"): values,
        }
    if "input_linear" in path:  # Granite's fused gate and up
        gate, up = np.split(array, 2, axis=-2)
        block = path.partition("input_linear")[0]
        return {f"{block}gate.weight": gate, f"{block}up.weight": up}
    if name in ROTATED_IN_PAIRS and re.search(r"self_attn\.[qk]_proj", path):
        return {path: rotated_in_pairs(hf, array)}
    if path.endswith("sinks"):
        return {f"{path}.weight": array}
    if name in ("gpt-oss", "llama4") and ".experts." in path:
        block, is_bias = path.partition(".experts.")[0] + ".experts", path.endswith("_bias")
        turned, suffix = (array, "bias") if is_bias else (array.swapaxes(1, 2), "weight")
        if "down_proj" in path:
            return {f"{block}.down_proj.{suffix}": turned}
        gate, up = np.split(turned, 2, axis=1)
        if name == "gpt-oss":
            gate, up = turned[:, ::2], turned[:, 1::2]
        halves = {"gate": gate, "up": up}
        return {f"{block}.{half}_proj.{suffix}": own for half, own in halves.items()}
    if name == "mistral4" and path.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {f"{path}.weight": array}
    return {path: array}


# Modules of Granite's mixtures, whose halves the converter names itself.
OF_GRANITE = {
    "block_sparse_moe.gate": "ffn_gate_exps",
    "block_sparse_moe.up": "ffn_up_exps",
    "shared_mlp.gate": "ffn_gate_shexp",
    "shared_mlp.up": "ffn_up_shexp",
}


def write(
    path: Any,
    name: str,
    hf: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: Any = None,
    *,
    edit: Callable[[Any], Any] | None = None,
    is_joint: bool = False,
) -> None:
    """The GGUF file of a model.

    kind: the type of matrices with whole blocks, or None. edit: changes the header. is_joint: with
    one map from latents to keys and values, as in older files.
    """
    architecture = re.sub("-(lite|flash)$", "", name)
    number = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    table = gguf.get_tensor_name_map(number, hf["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, name, hf)
    numbers: dict[str, list[float]] = {}
    for theirs, whole in stacked(tensors).items():
        if theirs == "lm_head.weight" and hf["tie_word_embeddings"]:
            continue
        if match := re.search(r"act_fn\.(\w+)$", theirs):
            numbers.setdefault(match[1], []).append(float(whole.reshape(())))
            continue
        for own, array in converted(name, hf, theirs, whole, is_joint).items():
            module, _, suffix = own.rpartition(".")
            suffix = suffix if suffix in ("weight", "bias") else "bias"  # of selection biases
            layer, _, granite = module.removeprefix("model.layers.").partition(".")
            found = table.get_name(own, try_suffixes=(".weight", ".bias"))
            if name == "granitemoe" and granite in OF_GRANITE:
                found = f"blk.{layer}.{OF_GRANITE[granite]}.weight"
            elif "correction_bias" in own:
                found = f"blk.{layer}.exp_probs_b.bias"
            assert found is not None, own
            if (
                kind is None
                or array.ndim < 2
                or suffix == "bias"
                or array.shape[-1] % 32
                or "norm" in found
            ):
                writer.add_tensor(found, np.ascontiguousarray(array, np.float32))
            else:
                blocks = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind)
                writer.add_tensor(found, blocks, raw_dtype=kind)
    for key, values in numbers.items():
        getattr(writer, f"add_xielu_{key}")(values)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def written(name: str, folder: Any, **more: Any) -> Any:
    """transformers' model of a case, and its GGUF file in the folder. more: of config.json."""
    family, changes = CASES[name]
    architecture = f"{family}ForCausalLM"
    sizes = {"vocab_size": len(VOCABULARY), "pad_token_id": None}
    hf = keys(architecture) | sizes | changes | more
    model = build(
        architecture, {key: value for key, value in hf.items() if key != "head_dim" or value}
    )
    model.save_pretrained(folder / "hf")
    tensors = load_file(folder / "hf" / "model.safetensors")
    write(folder / "m.gguf", name, model.config.to_dict(), tensors)
    return model


# Read as others are, with other keys of their headers.
SIMILAR = ("qwen3vl", "qwen3vlmoe", "deepseek2-flash", "seed_oss")


@pytest.mark.parametrize("name", [in_sweep(n) if n in SIMILAR else n for n in CASES])
def test_logits_are_those_of_the_model(name, tmp_path):
    expected, found = logits(written(name, tmp_path), tmp_path)
    assert abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=5e-5 * abs(expected).max())


def logits(model: Any, folder: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits of transformers' model, and of the file in the folder."""
    with torch.no_grad():
        expected = model(torch.from_numpy(PROMPT)).logits.numpy()
    lm = mpjax.load(folder / "m.gguf", precision="W32A32KV16", dtype="float32", progress=False)
    return expected, np.asarray(lm.model(PROMPT.astype(np.int32)))


@pytest.mark.parametrize("is_joint", [False, True])
def test_maps_of_latents_are_dequantised(is_joint, tmp_path):
    """In the halves of newer files, and in the joint map of older ones."""
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 64}
    model = written("deepseek2", tmp_path, **sizes)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")

    def edit(writer: Any) -> None:
        values = writer.kv_data[0]
        for key in ("key_length", "value_length") if is_joint else ():
            values[f"deepseek2.attention.{key}"] = values.pop(f"deepseek2.attention.{key}_mla")
        if is_joint:
            values["deepseek2.attention.head_count_kv"].value = 3

    q8, hf = gguf.GGMLQuantizationType.Q8_0, model.config.to_dict()
    write(tmp_path / "m.gguf", "deepseek2", hf, tensors, q8, edit=edit, is_joint=is_joint)
    expected, found = logits(model, tmp_path)
    # Of most numbers: a token may have other experts.
    assert np.median(abs(found - expected)) < 0.02 * abs(expected).max()
    lm = mpjax.load(tmp_path / "m.gguf", progress=False)
    assert lm.summary()["linear_maps"]["attention.expand"] == {"W16": 2}
    assert lm.summary()["linear_maps"]["attention.output"] == {"W8g32sym": 2}


def test_codes_of_experts_with_alternating_outputs_are_kept(tmp_path):
    model, kind = written("gpt-oss", tmp_path), gguf.GGMLQuantizationType.MXFP4
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    write(tmp_path / "m.gguf", "gpt-oss", model.config.to_dict(), tensors, kind)
    lm = mpjax.load(tmp_path / "m.gguf", dtype="float32", progress=False)
    assert lm.summary()["linear_maps"]["mlp.experts.gate_up"] == {"WMXFP4": 2}
    for name in ("gate_up", "down"):
        weight = tensors[f"model.layers.1.mlp.experts.{name}_proj"].swapaxes(1, 2)
        blocks = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
        rounded = gguf.quants.dequantize(blocks, kind)
        if name == "gate_up":  # behind each other on the device
            rounded = np.concatenate([rounded[:, ::2], rounded[:, 1::2]], axis=1)
        kernel = getattr(lm.model.layers[1].mlp.experts, name).kernel.get_value()
        np.testing.assert_array_equal(kernel.dequantize(), rounded.swapaxes(1, 2))


def test_a_layer_that_predicts_a_second_token_is_left_out(tmp_path):
    model = written("glm4moe", tmp_path)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    last = {k.replace(".1.", ".2.", 1): v for k, v in tensors.items() if "layers.1." in k}
    hf = model.config.to_dict() | {"num_hidden_layers": 3}
    edit = lambda writer: writer.add_nextn_predict_layers(1)  # noqa: E731
    write(tmp_path / "m.gguf", "glm4moe", hf, tensors | last, edit=edit)
    expected, found = logits(model, tmp_path)
    np.testing.assert_allclose(found, expected, atol=5e-5 * abs(expected).max())


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "glm4",
            lambda writer: writer.add_rope_dimension_sections([2, 3, 3, 0]),
            r"glm4.rope.dimension_sections is \[.*\], as in the text model of GLM-4V: expected 0",
        ),
        (
            "apertus",
            lambda writer: writer.kv_data[0].pop("xielu.beta") and writer.add_xielu_beta([0.7]),
            "xielu.beta is 0.69.*: expected 0.5, as in Apertus",
        ),
        (
            "deepseek2",
            lambda writer: writer.kv_data[0].pop("deepseek2.rope.scaling.yarn_log_multiplier"),
            "has no 'deepseek2.rope.scaling.yarn_log_multiplier': expected a number",
        ),
        (
            "deepseek2-lite",
            lambda writer: writer.add_expert_weights_norm(True),
            "deepseek2.expert_weights_norm is true with softmax scores: expected false",
        ),
        (
            "dots1",
            lambda writer: writer.kv_data[0].pop("dots1.expert_gating_func"),
            "dots1.expert_gating_func is 0: expected 2, the sigmoid",
        ),
    ],
)
def test_other_models_of_an_architecture_are_refused(name, edit, message, tmp_path):
    hf = keys(f"{CASES[name][0]}ForCausalLM") | CASES[name][1]
    config = getattr(transformers, f"{CASES[name][0]}Config")(
        **{key: value for key, value in hf.items() if key != "head_dim" or value}
    )
    embedding = {"model.embed_tokens.weight": np.zeros((51, 64), np.float32)}
    if name == "apertus":
        embedding |= {f"act_fn.{key}": np.float32([1.0]) for key in ("alpha_n", "alpha_p", "beta")}
    write(tmp_path / "m.gguf", name, config.to_dict(), embedding, edit=edit)
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(tmp_path / "m.gguf")
