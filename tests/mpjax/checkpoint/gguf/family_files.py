"""GGUF files of families of attention and experts, written with the format's own package.

Tensor names come from the package's table, and what a converter changes is written here by the
rules of llama.cpp's conversion: the reader's tables are used nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models.sharded_families import keys
from tests.mpjax.checkpoint.gguf.write_gguf import KINDS, MERGES
from tests.mpjax.checkpoint.gguf.write_gguf import TOKENS as VOCABULARY
from tests.mpjax.checkpoint.test_every_family import build

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

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
SCALED = (4 / 3) ** 0.5  # the converter's factor for a context of 256 after one of 64
CASES |= {
    "phimoe": (
        "Phimoe",
        {
            **{"router_jitter_noise": 0.01, "rms_norm_eps": 1e-3},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": SCALED},
                **{"short_factor": [1.0 + 0.1 * i for i in range(16)], "long_mscale": SCALED},
                **{"long_factor": [3.0] * 16, "original_max_position_embeddings": 64},
            },
        },
    ),
    "kimi-linear": ("KimiLinear", {"num_experts": 8, "num_attention_heads": 3}),
    "gemma3n": ("Gemma3n", {}),
    # As 26B-A4B, with parts of E2B.
    "gemma4": ("Gemma4", {"vocab_size_per_layer_input": len(VOCABULARY)}),
    "gemma4-lite": (
        "Gemma4",
        {
            **{"enable_moe_block": False, "attention_k_eq_v": False, "use_double_wide_mlp": True},
            **{"num_experts": None, "top_k_experts": None, "num_global_key_value_heads": None},
            "vocab_size_per_layer_input": len(VOCABULARY),
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
    **{"linear_head_dim": "kda_head_dim", "linear_conv_kernel_dim": "ssm_conv_kernel"},
    **{"altup_active_idx": "altup_active_idx", "altup_num_inputs": "altup_num_inputs"},
    **{"hidden_size_per_layer_input": "embedding_length_per_layer_input"},
    **{"num_kv_shared_layers": "shared_kv_layers", "top_k_experts": "expert_used_count"},
    **{"final_logit_softcapping": "final_logit_softcapping", "model_max_length": "context_length"},
    **{"num_experts_per_token": "expert_used_count", "num_shared_experts": "expert_shared_count"},
    **{"moe_renormalize": "expert_weights_norm"},
}


def write_metadata(writer: Any, name: str, hf: dict[str, Any]) -> None:
    """The header, by the converter's rules."""
    write_sizes(writer, name, hf)
    if name.startswith("glm4"):
        share = hf["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(hf["head_dim"] * share))
    if "vl" in name:
        writer.add_rope_dimension_sections([2, 3, 3, 0])
        writer.add_num_deepstack_layers(3)
    if name in ("glm4moe", "dots1", "minimax-m2", "deepseek2", "deepseek2-flash", "kimi-linear"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if hf.get("sliding_window") and name not in ("cohere2", "phimoe"):
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in hf["layer_types"]])
    if rope := hf.get("rope_parameters"):
        write_rotation(writer, name, rope, 0.1 if "kv_lora_rank" in hf else 1.0)
    write_gemma(writer, name, hf)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)


def write_sizes(writer: Any, name: str, hf: dict[str, Any]) -> None:
    """The keys in KEYS, and the sizes of heads."""
    if name == "llama4":
        writer.add_interleave_moe_layer_step(hf["interleave_moe_layer_step"])
        writer.add_expert_feed_forward_length(hf["intermediate_size"])
        hf = hf | {"intermediate_size": hf["intermediate_size_mlp"]}
    for key, method in KEYS.items():
        if (value := hf.get(key)) is not None:
            getattr(writer, f"add_{method}")(value)
    if "kv_lora_rank" in hf:
        kinds = hf["layer_types"] if name == "kimi-linear" else []
        writer.add_head_count_kv([int(kind == "full_attention") for kind in kinds] or 1)
        writer.add_key_length(hf["kv_lora_rank"] + hf["qk_rope_head_dim"])
        writer.add_value_length(hf["kv_lora_rank"])
        writer.add_key_length_mla(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        writer.add_value_length_mla(hf["v_head_dim"])
    elif name not in ("granitemoe",):
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])


def write_gemma(writer: Any, name: str, hf: dict[str, Any]) -> None:
    """The keys of Gemma 3n's and 4's layers, which differ."""
    if not name.startswith("gemma"):
        return
    writer.add_rope_freq_base_swa(hf["rope_parameters"]["sliding_attention"]["rope_theta"])
    if name == "gemma3n":
        shares = torch.tensor(hf["activation_sparsity_pattern"])
        writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
        return
    whole, local, is_local = (
        hf["global_head_dim"],
        hf["head_dim"],
        [kind == "sliding_attention" for kind in hf["layer_types"]],
    )
    for size, end in ((whole, ""), (local, "_swa")):
        for key in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{key}{end}")(size)
    inner, own = hf["intermediate_size"], len(is_local) - hf["num_kv_shared_layers"]
    if hf["use_double_wide_mlp"]:
        writer.add_feed_forward_length([inner * (1 + (i >= own)) for i in range(len(is_local))])
    if (heads := hf["num_global_key_value_heads"]) is not None:
        both = heads, hf["num_key_value_heads"]
        writer.add_head_count_kv([both[each] for each in is_local])
    share = hf["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    turned = int(whole * share / 2)
    writer.add_tensor(
        "rope_freqs.weight", np.float32([1.0] * turned + [1e30] * (whole // 2 - turned))
    )


def write_rotation(writer: Any, name: str, rope: dict[str, Any], unit: float) -> None:
    """The keys of the rotary embedding. unit: of YaRN's multiplier, which depends on the family."""
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(SCALED)
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.float32(rope[f"{kind}_factor"]))
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
        if (match := re.fullmatch(r"(.+\.experts|.+\.altup_\w+)\.(\d+)\.(.+)", name)) is None:
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
    return of_kimi(path, array) if name == "kimi-linear" else {weight_of(name, path): array}


def weight_of(name: str, path: str) -> str:
    """The name of a tensor, with `.weight` where the converter adds it."""
    ends = ("_scalar", "output_scale", "experts.gate_up_proj", "experts.down_proj")
    adds = name.startswith(("mistral4", "gemma")) and path.endswith(ends)
    return f"{path}.weight" if adds else path


def of_kimi(path: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The tensor that the converter makes of one of Kimi Linear."""
    if "_conv1d" in path:
        return {path: array.reshape(1, -1, 1, array.shape[-1])}
    if path.endswith("self_attn.A_log"):
        return {path: -np.exp(array)}
    # Published files name dense MLPs otherwise than transformers does.
    path = re.sub(r"block_sparse_moe\.((?:gate|up|down)_proj)", r"mlp.\1", path)
    return {path.replace("dt_bias", "dt_proj.bias"): array}


OF_GEMMA = {
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
}
# Modules of Granite's mixtures, whose halves the converter names itself.
OF_GRANITE = {
    "block_sparse_moe.gate": "ffn_gate_exps",
    "block_sparse_moe.up": "ffn_up_exps",
    "shared_mlp.gate": "ffn_gate_shexp",
    "shared_mlp.up": "ffn_up_shexp",
}


def name_in_file(name: str, table: Any, own: str) -> str | None:
    """The name of a tensor in the file, some of which the converter chooses itself."""
    module = own.rpartition(".")[0].removeprefix("model.layers.")
    layer, _, rest = module.partition(".")
    if name == "granitemoe" and rest in OF_GRANITE:
        return f"blk.{layer}.{OF_GRANITE[rest]}.weight"
    for end, kind in OF_GEMMA.items():
        if own.endswith(end):
            return f"blk.{layer}.{kind}"
    if "correction_bias" in own:
        return f"blk.{layer}.exp_probs_b.bias"
    found: str | None = table.get_name(own, try_suffixes=(".weight", ".bias"))
    return found


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
            suffix = own.rpartition(".")[2]
            suffix = suffix if suffix in ("weight", "bias") else "bias"  # of selection biases
            found = name_in_file(name, table, own)
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


def round_exactly(parameters: Iterable[Any]) -> None:
    """Gives matrices among them random codes times a power of two, which Q8_0 holds exactly.

    Each 32 neighbours, of rows and of columns, have a largest code, which sets their scale.
    """
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in (each for each in parameters if each.ndim > 1):
            inputs, outputs = parameter.shape[-2:]
            codes = rng.integers(-127, 128, parameter.shape)
            at_most = np.add.outer(np.arange(inputs), np.arange(outputs)) % 32 == 0
            codes = np.where(at_most, 127, codes)
            scale = 2.0 ** -round(np.log2(50 * min(inputs, outputs) ** 0.5))
            parameter.copy_(torch.from_numpy(np.float32(codes * scale)))


def written(name: str, folder: Any, **more: Any) -> Any:
    """transformers' model of a case, and its GGUF file in the folder, of experts in Q8_0.

    more: of config.json.
    """
    family, changes = CASES[name]
    architecture = f"{family}ForCausalLM"
    sizes = {"vocab_size": len(VOCABULARY), "pad_token_id": None}
    hf = keys(architecture) | sizes | changes | more
    model = build(
        architecture, {key: value for key, value in hf.items() if key != "head_dim" or value}
    )
    kind = None
    if any("experts" in path for path, _ in model.named_parameters()):
        kind = gguf.GGMLQuantizationType.Q8_0
        round_exactly(model.parameters())
    model.save_pretrained(folder / "hf")
    tensors = load_file(folder / "hf" / "model.safetensors")
    # Gemma 4's sizes by kind of layer are in `hf` alone.
    write(folder / "m.gguf", name, hf | model.config.to_dict(), tensors, kind)
    return model
