"""Each key of each family's config.json, changed, against transformers in float32.

Either the logits follow those of transformers, or loading refuses the value and names the key, or
the key is one of IRRELEVANT, and no logits change. A key of a class in transformers that has no
values here fails the test.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from mpjax.loading import load
from mpjax.models import FAMILIES, ConfigError, Decoder
from mpjax.models.config_keys import NEUTRAL
from mpjax.models.muse import MuseGlimmer
from tests.mpjax.checkpoint import (
    cohere_keys,
    gemma_keys,
    hybrid_keys,
    latent_keys,
    saved_models,
)
from tests.sweeps import in_sweep

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.any_version
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

TOKENS = np.random.default_rng(0).integers(0, 48, (1, 24)).astype(np.int32)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "pad_token_id": None,
}
OTHER_SIZES = {
    **{"vocab_size": 80, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
KINDS = [["full_attention", "sliding_attention"], ["sliding_attention", "sliding_attention"]]
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
# By the class in transformers: the architecture, and keys that make all others count.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "Mixtral": ("MixtralForCausalLM", {"sliding_window": 8, "num_local_experts": 4}),
    "Qwen2": ("Qwen2ForCausalLM", {**WINDOW, "max_window_layers": 1}),
    "Qwen3": ("Qwen3ForCausalLM", {**WINDOW, "max_window_layers": 1}),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM",
        {
            **{**EXPERTS, **WINDOW, "num_experts": 4, "shared_expert_intermediate_size": 32},
            "max_window_layers": 1,
        },
    ),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {**EXPERTS, **WINDOW, "num_experts": 4}),
    "Gemma": ("GemmaForCausalLM", {}),
    "Gemma2": ("Gemma2ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "Gemma3Text": (
        "Gemma3ForCausalLM",
        {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    ),
    "Granite": ("GraniteForCausalLM", {"attention_multiplier": 0.2}),
    "Olmo2": ("Olmo2ForCausalLM", {}),
    "Phi3": ("Phi3ForCausalLM", {"original_max_position_embeddings": 16, "head_dim": 8}),
    "SmolLM3": ("SmolLM3ForCausalLM", {**WINDOW, "no_rope_layer_interval": 2}),
    "GptOss": ("GptOssForCausalLM", {"sliding_window": 8, "num_local_experts": 4}),
}
SIGMOIDS = {
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2},
    **{"moe_intermediate_size": 48, "first_k_dense_replace": 1},
}
MODELS |= {
    "Apertus": ("ApertusForCausalLM", {}),
    "Cohere": ("CohereForCausalLM", {}),
    "Cohere2": ("Cohere2ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "Dots1": ("Dots1ForCausalLM", {**SIGMOIDS, "sliding_window": 8, "max_window_layers": 1}),
    "Ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "Ernie4_5_Moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    ),
    "Exaone4": ("Exaone4ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "Glm4": ("Glm4ForCausalLM", {}),
    "Glm4Moe": ("Glm4MoeForCausalLM", SIGMOIDS),
    "GraniteMoe": ("GraniteMoeForCausalLM", {"attention_multiplier": 0.2}),
    "GraniteMoeShared": (
        "GraniteMoeSharedForCausalLM",
        {"attention_multiplier": 0.2, "shared_intermediate_size": 32},
    ),
    "HunYuanDenseV1": ("HunYuanDenseV1ForCausalLM", {}),
    "HunYuanMoEV1": ("HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": 2}),
    "Ministral3": (
        "Ministral3ForCausalLM",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
                **{"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
            }
        },
    ),
    "MiniMaxM2": ("MiniMaxM2ForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Olmo3": ("Olmo3ForCausalLM", {"sliding_window": 8, "num_hidden_layers": 4}),
    "Llama4Text": (
        "Llama4ForCausalLM",
        {
            **{"no_rope_layer_interval": 2, "attention_chunk_size": 8, "floor_scale": 4},
            **{"attn_scale": 0.5, "num_local_experts": 4, "intermediate_size_mlp": 64},
            "interleave_moe_layer_step": 2,
        },
    ),
    "Phimoe": ("PhimoeForCausalLM", {"num_local_experts": 4, "router_jitter_noise": 0.4}),
    "SeedOss": ("SeedOssForCausalLM", {}),
    "Starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 8}),
}
ORIGINAL = "original_max_position_embeddings"
FACTORS = {"short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4], "long_factor": [3.0] * 8}
OF_PHI = {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [3.0] * 4, ORIGINAL: 16}
LONGROPE = {"rope_type": "longrope", **FACTORS, ORIGINAL: 16}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SCALINGS: list[dict[str, Any]] = [
    LINEAR,
    {"rope_type": "default", "rope_theta": 100.0},
    LINEAR | {"rope_theta": 100.0},
    LLAMA3,
    LLAMA3 | {ORIGINAL: 16},
    LLAMA3 | {ORIGINAL: 16, "high_freq_factor": 1.0},
    YARN,
    YARN | {"beta_fast": 4.0, "beta_slow": 2.0, "rope_theta": 100.0},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 1.5},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    YARN | {"mscale": 0.5},
    {"rope_type": "yarn", "factor": 4.0},
    LONGROPE,
    LONGROPE | {"attention_factor": 1.5, ORIGINAL: 32},
    LONGROPE | {"factor": 8.0},
]
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
NESTED = [
    {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": LINEAR},
    {"sliding_attention": YARN | {"rope_theta": 100.0}},
    {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 1000.0}},
    {"full_attention": YARN, "sliding_attention": LONGROPE},
]
# Values other than those of MODELS and the classes' defaults, each changed alone.
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["relu"],
    "hidden_activation": ["relu"],
    "rms_norm_eps": [0.1],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "qkv_bias": [False],
    "mlp_bias": [True],
    "rope_parameters": [LINEAR, {"rope_type": "default", "rope_theta": 100.0}],
    "rope_scaling": [LINEAR, {"type": "linear", "factor": 4.0, "rope_theta": 100.0}],
    "rope_theta": [100.0],
    "rope_local_base_freq": [100.0],
    "sliding_window": [4],
    "sliding_window_pattern": [1],
    "use_sliding_window": [False],
    "max_window_layers": [0, 2],
    "layer_types": KINDS,
    "no_rope_layers": [[0, 1], [1, 1]],
    "no_rope_layer_interval": [1, 3],
    "query_pre_attn_scalar": [64],
    "attn_logit_softcapping": [0.5, None],
    "final_logit_softcapping": [0.5, None],
    "use_bidirectional_attention": [True],
    "embedding_multiplier": [3.0],
    "logits_scaling": [2.0],
    "residual_multiplier": [0.3],
    "attention_multiplier": [0.5],
    "num_experts_per_tok": [3],
    "num_local_experts": [6],
    "num_experts": [6],
    "moe_intermediate_size": [64],
    "shared_expert_intermediate_size": [64],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[0], []],
    "lm_head_bias": [True],
    "intermediate_size_mlp": [80],
    "moe_layers": [[0, 1], []],
    "interleave_moe_layer_step": [1],
    "use_qk_norm": [True, False],
    "attention_chunk_size": [5, None],
    "attn_temperature_tuning": [False],
    "floor_scale": [8],
    "attn_scale": [0.2],
    "norm_topk_prob": [True],
    "n_routed_experts": [12],
    "n_shared_experts": [2],
    "n_group": [1, 4],
    "topk_group": [2],
    "first_k_dense_replace": [0, 2],
    "routed_scaling_factor": [2.5],
    "shared_intermediate_size": [48],
    "moe_topk": [3, [1, 2]],
    "moe_num_experts": [6],
    "moe_k": [3],
    "moe_num_shared_experts": [0, 1],
    "moe_layer_start_index": [0],
    "moe_layer_end_index": [0],
    "moe_layer_interval": [3],
    "moe_norm_min": [0.5],
    "use_bias": [True, False],
    "attention_out_bias": [True],
    "layer_norm_eps": [0.1],
    "norm_epsilon": [0.1],
    "logit_scale": [0.5],
    "rotary_dim": [8],
    "partial_rotary_factor": [1.0, 0.25],
    "swiglu_alpha": [1.0],
    "swiglu_limit": [0.05],
    ORIGINAL: [32],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.1}}],
}
# Keys that change no logits, all changed at once. `max_position_embeddings` limits lengths, where
# no scaling depends on it, and `eos_token_id` ends texts: both are read.
IRRELEVANT: dict[str, Any] = {
    **{"transformers_version": "4.0.0", "return_dict": True, "chunk_size_feed_forward": 4},
    **{"id2label": {"0": "x"}, "label2id": {"x": 0}, "problem_type": "regression"},
    **{"initializer_range": 0.5, "use_cache": False, "pretraining_tp": 2},
    **{"pad_token_id": 3, "bos_token_id": 3, "eos_token_id": 3, "max_position_embeddings": 128},
    **{"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    **{"eod_token_id": 4, "sep_token_id": 5},
    **{"residual_dropout": 0.5, "embedding_dropout": 0.5, "num_mtp_layers": 2},
    **{
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "router_jitter_noise": 0.5,
        "input_jitter_noise": 0.5,
    },
}
# Keys with tests of their own, or without another value for a causal language model.
ELSEWHERE = ("architectures", "dtype", "is_encoder_decoder", "output_hidden_states")
TOLERANCE = 3e-5  # of the largest logit
LIMITS = ("max_position_embeddings", "stop_ids")
# Keys that are not fields of the classes, which they read all the same.
MORE = ("rope_scaling", "rope_theta", "per_layer_config")
READ = {
    "Mixtral": (*MORE, "num_experts"),
    "GptOss": (*MORE, "num_experts"),
    "Gemma3Text": (*MORE, "rope_local_base_freq", "sliding_window_pattern"),
    "MiniMaxM2": (*MORE, "num_experts", "rotary_dim", "partial_rotary_factor"),
    "Ernie4_5_Moe": (*MORE, "num_experts", "num_experts_per_tok"),
    "Glm4": (*MORE, "partial_rotary_factor"),
    "Glm4Moe": (*MORE, "partial_rotary_factor", "num_local_experts"),
    "Dots1": (*MORE, "num_local_experts"),
    "HunYuanMoEV1": (*MORE, "num_local_experts", "num_experts_per_tok"),
    "Cohere2": (*MORE, "sliding_window_pattern"),
}
# Changes of several keys, of which one decides what another means.
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "Llama": [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
        {"rope_parameters": YARN | {ORIGINAL: 32}, ORIGINAL: 16},
        {"rope_parameters": LLAMA3 | {ORIGINAL: 32}, ORIGINAL: 16},
        {"rope_parameters": LONGROPE | {ORIGINAL: 32}, ORIGINAL: 16},
        {"rope_parameters": LINEAR | {"rope_theta": 100.0}, "rope_theta": 1000.0},
        {"rope_scaling": LINEAR, "rope_theta": 100.0},
    ],
    "Gemma3Text": [
        {"rope_parameters": NESTED[1], "rope_theta": 100.0, "rope_local_base_freq": 1000.0},
        {"rope_parameters": NESTED[4], ORIGINAL: 32},
    ],
}
# Values of one family, in the place of those for all.
OWN: dict[tuple[str, str], list[Any]] = {
    ("Llama", "rope_parameters"): SCALINGS,
    ("Gemma3Text", "rope_parameters"): NESTED,
    ("Dots1", "layer_types"): KINDS[1:],
    ("MiniMaxM2", "partial_rotary_factor"): [0.25],
    ("Olmo3", "layer_types"): [[*KINDS[0], *KINDS[1]]],
    ("Apertus", "rope_theta"): [],  # which its default rope_parameters have
    ("Ministral3", "rope_theta"): [],
    ("HunYuanDenseV1", "rope_parameters"): [ALPHA, LINEAR, YARN],
    ("HunYuanMoEV1", "rope_parameters"): [ALPHA],
    ("Ministral3", "rope_parameters"): [
        YARN | {"llama_4_scaling_beta": 0.2, "rope_theta": 100.0},
        YARN | {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5},
    ],
    ("Ministral3", "rope_scaling"): [YARN | {"llama_4_scaling_beta": 2.0}],
    ("Olmo3", "rope_parameters"): NESTED,
    ("Olmo3", "rope_scaling"): [YARN, YARN | {"rope_theta": 100.0}],
    ("Gemma3Text", "use_bidirectional_attention"): [],  # which has no logits
    ("Gemma3Text", "rope_scaling"): [LINEAR | {"rope_theta": 100.0}],
    ("Phi3", "rope_parameters"): [
        {"rope_type": "default", "rope_theta": 100.0},
        *({**OF_PHI, "rope_type": name} for name in ("longrope", "su", "yarn")),
        OF_PHI | {"rope_type": "longrope", "attention_factor": 1.5, ORIGINAL: 32},
        OF_PHI | {"rope_type": "longrope", "factor": 8.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    ("Phi3", "rope_scaling"): [{**OF_PHI, "type": "longrope", "rope_theta": 100.0}],
    ("Phi3", ORIGINAL): [],  # which LongRoPE reads
    ("Qwen2Moe", "max_window_layers"): [0],
    ("Phimoe", "rope_parameters"): [
        {"rope_type": "default", "rope_theta": 100.0},
        LONGROPE | {"short_mscale": 1.5, "long_mscale": 1.5, ORIGINAL: 32},
        LINEAR | {"short_mscale": 1.5, "long_mscale": 1.5, ORIGINAL: 32},
    ],
    ("Phimoe", "rope_scaling"): [],
    ("Llama4Text", "layer_types"): [["full_attention", "chunked_attention"]],
    ("Llama4Text", "no_rope_layer_interval"): [1],
    ("Llama4Text", "no_rope_layers"): [[0, 1], [0, 0]],
    ("Llama4Text", "rope_parameters"): [
        LINEAR,
        LLAMA3 | {ORIGINAL: 16, "rope_theta": 100.0},
    ],
    ("Phimoe", "router_jitter_noise"): [0.1],
    **dict.fromkeys([(name, "layer_types") for name in ("SmolLM3", "Qwen2", "Qwen3")], KINDS[1:]),
}
KEYS = hybrid_keys, latent_keys, gemma_keys, cohere_keys
for keys in KEYS:
    for common, own in (
        (MODELS, keys.MODELS),
        (VALUES, keys.VALUES),
        (IRRELEVANT, keys.IRRELEVANT),
        (TOGETHER, keys.TOGETHER),
        (OWN, keys.OWN),
    ):
        common.update(own)
    READ |= {name: (*MORE, *more) for name, more in keys.READ.items()}
REFUSED = ("hidden_act", "hidden_activation", "use_bidirectional_attention", *NEUTRAL)
REFUSED_BY = {
    "NemotronH": (*REFUSED, *hybrid_keys.REFUSED),
    "Gemma3Text": (*REFUSED, "attn_logit_softcapping"),
    "Cohere": (*REFUSED, "use_qk_norm"),
    "Cohere2Moe": (*REFUSED, "rope_scaling"),
    "Ernie4_5_Moe": (*REFUSED, "use_bias", "moe_norm_min"),
    **{name: (*REFUSED, *hybrid_keys.OF_GATES) for name in MODELS if name.startswith("Qwen3_5")},
    "Qwen3Next": (*REFUSED, *hybrid_keys.OF_GATES),
    "Phimoe": (*REFUSED, "num_experts_per_tok"),
    "KimiLinear": (*REFUSED, "attention_bias"),
    "DeepseekV2": (*REFUSED, *latent_keys.REFUSED),
    "DeepseekV32": (*REFUSED, "mlp_bias"),
    "Gemma4Text": (*REFUSED, *gemma_keys.REFUSED),
}


class Case(NamedTuple):
    """A model of transformers and the same in mpjax, with the logits of both."""

    hf: dict[str, Any]
    theirs: Any
    model: Decoder
    expected: np.ndarray
    found: np.ndarray


def build(name: str, hf: dict[str, Any]) -> Any:
    """transformers' model of a config.json, whose parameters follow from their names alone."""
    architecture, _ = MODELS[name]
    written = json.loads(json.dumps(hf)) | {"attn_implementation": "eager"}
    config = getattr(transformers, f"{name}Config")(**written)
    model = getattr(transformers, architecture)(config).to(torch.float32).eval()
    with torch.no_grad():
        ends = "bias", "layer_scalar"
        biases = [each for each in model.named_buffers() if each[0].endswith(ends)]
        for path, parameter in [*model.named_parameters(), *biases]:
            rng = np.random.default_rng(zlib.crc32(path.encode()))
            noise = rng.standard_normal(parameter.shape) * (0.3 if parameter.ndim > 1 else 0.2)
            noise += parameter.ndim == 1 and not path.endswith(("bias", "sinks"))
            parameter.copy_(torch.from_numpy(noise.astype(np.float32)))
    return model


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


def ours(model: Decoder) -> np.ndarray:
    """Logits, one operation after the other: a program for each value would take compiling."""
    with jax.disable_jit():
        return np.asarray(model(TOKENS))


def read(theirs: Any, hf: dict[str, Any], folder: Path) -> Decoder:
    """The model in mpjax, from tensors that transformers writes, and this config.json."""
    theirs.save_pretrained(folder)
    saved_models.as_published(folder)
    (folder / "config.json").write_text(json.dumps(hf))
    return load(folder, dtype="float32", progress=False).model


def alike(name: str, base: Case, hf: dict[str, Any], theirs: Any, folder: Path) -> Decoder:
    """The model in mpjax of a changed config.json; reads files only where parameters differ."""
    config = FAMILIES[MODELS[name][0]].config_from_hf(hf)
    graph, state = nnx.split(nnx.eval_shape(lambda: type(base.model)(config, nnx.Rngs(0))))
    held = nnx.state(base.model)
    kinds = [jax.tree.map(lambda x: x.shape, one) for one in (state, held)]
    return nnx.merge(graph, held) if kinds[0] == kinds[1] else read(theirs, hf, folder)


@functools.cache
def base_of(name: str, folder: Path) -> Case:
    architecture, more = MODELS[name]
    hf = {**SIZES, **more, "architectures": [architecture]}
    theirs = build(name, hf)
    model = read(theirs, hf, folder)
    return Case(hf, theirs, model, logits(theirs), ours(model))


def same(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    scale = np.abs(expected).max()
    return found.shape == expected.shape and np.abs(found - expected).max() < tolerance * scale


def changes_of(name: str) -> list[dict[str, Any]]:
    """Changes of a family's keys: sizes at once, keys without a meaning at once, others alone."""
    kind = getattr(transformers, f"{name}Config")
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    known = dict.fromkeys([*fields, *READ.get(name, MORE)])
    own = {key for family, key in OWN if family == name}
    found = [{key: value for key, value in IRRELEVANT.items() if key in known and key not in own}]
    sizes = (keys.OTHER_SIZES.get(name, {}) for keys in KEYS)
    found.append(functools.reduce(operator.or_, sizes, OTHER_SIZES))
    for key in known:
        if key in (*IRRELEVANT, *OTHER_SIZES, *ELSEWHERE) and key not in own:
            continue
        values = OWN.get((name, key), VALUES.get(key))
        assert values is not None, f"{kind.__name__} has the key {key}: give it values here"
        found += [{key: value} for value in values if value != fields.get(key)]
    return found + TOGETHER.get(name, [])


def became(name: str, changes: dict[str, Any], folder: Path, tmp_path: Path) -> str:
    """Compares a changed config.json with transformers; returns what became of the change."""
    base = base_of(name, tmp_path / "base")
    hf, family = base.hf | changes, FAMILIES[MODELS[name][0]]
    try:
        config = family.config_from_hf(hf)
    except ConfigError as error:
        is_named = any(key in str(error) for key in changes)
        return "refused" if is_named else f"refused without its name: {error}"
    theirs = build(name, hf)
    expected = logits(theirs)
    is_changed = not same(expected, base.expected, 1e-3)
    limits = {field: getattr(config, field) for field in LIMITS}
    if dataclasses.replace(family.config_from_hf(base.hf), **limits) == config:
        assert not is_changed, "the change is ignored"
        return "nothing"
    found = ours(alike(name, base, hf, theirs, folder))
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"logits differ by {error:.1e}"
    return "followed" if is_changed else "nothing"


# Llama has all kinds of rotary scaling; others have keys that no other family has.
DEFAULT = ("Llama", "Gemma3Text", "SmolLM3", "GptOss", "Phi3")


@pytest.mark.parametrize("name", [n if n in DEFAULT else in_sweep(n) for n in MODELS])
def test_keys(name, tmp_path):
    base = base_of(name, tmp_path / "base")
    assert same(base.found, base.expected)
    faults = []
    for number, changes in enumerate(changes_of(name)):
        wanted = "refused" if {*changes} <= {*REFUSED_BY.get(name, REFUSED)} else "followed"
        wanted = "nothing" if not number else wanted  # keys without a meaning
        try:
            found = became(name, changes, tmp_path / str(number), tmp_path)
        except Exception as error:  # to show all faults of a family at once
            found = f"{type(error).__name__}: {error}"
        if found != wanted:
            faults.append(f"{changes}: {found[:200]}, not {wanted}")
    assert not faults, "\n".join(faults)


def test_every_family_is_here():
    """Muse Glimmer, whose text model transformers has only beside another, has its own test."""
    here = {FAMILIES[architecture] for architecture, _ in MODELS.values()}
    assert here == {*FAMILIES.values()} - {MuseGlimmer}
