"""Every key below an architecture's prefix is used, irrelevant, neutral, or refused by its name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mpjax.checkpoint.gguf.architectures import ARCHITECTURES, MIXTURES
from mpjax.checkpoint.gguf.known_keys import IRRELEVANT, NEUTRAL, require_known
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError
from mpjax.models import FAMILIES
from tests.mpjax.checkpoint.gguf.test_architectures import OF_EXPERTS, read
from tests.mpjax.checkpoint.gguf.write_gguf import llama_metadata

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.any_version

# Keys that the readers here take, with another value than test_architectures.py has.
TAKEN = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 3,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 8,
    "attention.layer_norm_rms_epsilon": 0.1,
    "rope.freq_base": 100.0,
    "rope.scaling.factor": 2.0,
    "rope.scale_linear": 2.0,
}
USED = {"expert_count": 6, "expert_used_count": 1}
EXPERTS = USED | {"expert_feed_forward_length": 64}
ALL_EXPERTS = EXPERTS | {"feed_forward_length": False}  # of dense layers, which there are not
GROUPED = {
    **{**EXPERTS, "expert_group_count": 2, "expert_shared_count": 2, "expert_weights_scale": 2.5},
    **{"expert_weights_norm": True, "leading_dense_block_count": 2},
}
YARN = {
    **{"attention.temperature_scale": 0.5, "rope.scaling.yarn_log_multiplier": 0.5},
    **{"rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 4.0},
    **{"rope.scaling.yarn_beta_slow": 2.0, "rope.scale_linear": False},
}
LATENT = {
    **{"attention.q_lora_rank": 16, "attention.kv_lora_rank": 32, "attention.key_length_mla": 24},
    **{"attention.value_length_mla": 24, "attention.key_length": 24, "attention.value_length": 24},
    **{"rope.dimension_count": 4, "attention.head_count_kv": None},
    "attention.head_count": None,
}
LAYER_NORM = {"attention.layer_norm_epsilon": 0.1, "attention.layer_norm_rms_epsilon": None}
# Of single architectures: None of keys that they refuse, False of keys that change nothing.
OF_ONE: dict[str, dict] = {
    "gemma2": {
        "attention.sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3": {
        "attention.sliding_window": 4,
        "final_logit_softcapping": 2.0,
        "rope.freq_base_swa": 100.0,
    },
    "gemma3n": {
        **{"attention.sliding_window": 4, "final_logit_softcapping": 2.0},
        **{"rope.freq_base_swa": 100.0, "embedding_length_per_layer_input": 8},
        **{"altup.active_idx": 1, "altup.num_inputs": 8},
        "attention.sliding_window_pattern": np.array([False, False]),
        "activation_sparsity_scale": np.float32([0.5, 1.0]),
    },
    "gemma4": {
        **{"attention.sliding_window": 4, "final_logit_softcapping": 2.0},
        **{"rope.freq_base_swa": 100.0, "embedding_length_per_layer_input": 8},
        "attention.sliding_window_pattern": np.array([False, False]),
        **{"attention.key_length_swa": 8, "rope.scaling.factor": None, "rope.scale_linear": None},
    },
    "granite": {
        "embedding_scale": 3.0,
        "attention.scale": 3.0,
        "residual_scale": 3.0,
        "logit_scale": 3.0,
    },
    "granitehybrid": dict.fromkeys(
        ("embedding_scale", "attention.scale", "residual_scale", "logit_scale"), 3.0
    ),
    "phi3": {"attention.sliding_window": 4, "rope.dimension_count": 8},
    "glm4": {"rope.dimension_count": 8},
    "olmo2": {"attention.sliding_window": 4},
    "exaone4": {"attention.sliding_window": 4},
    "command-r": {**LAYER_NORM, "logit_scale": 0.5},
    "cohere2": {**LAYER_NORM, "logit_scale": 0.5, "attention.sliding_window": 4},
    "starcoder2": LAYER_NORM,
    "mistral3": YARN,
    "qwen2moe": ALL_EXPERTS | {"expert_shared_feed_forward_length": 48},
    "qwen3moe": ALL_EXPERTS,
    "qwen3vlmoe": ALL_EXPERTS,
    "glm4moe": GROUPED | {"rope.dimension_count": 8},
    "dots1": GROUPED,
    "ernie4_5-moe": {
        **{**EXPERTS, "expert_shared_count": 3, "leading_dense_block_count": 2},
        "interleave_moe_layer_step": 3,
    },
    "hunyuan-moe": {**USED, "expert_feed_forward_length": None},
    "granitemoe": {
        **{**USED, "embedding_scale": 3.0, "attention.scale": 3.0, "residual_scale": 3.0},
        **{"logit_scale": 3.0, "expert_shared_feed_forward_length": 48},
    },
    "minimax-m2": {**USED, "rope.dimension_count": 8},
    "llama4": {
        **{**EXPERTS, "interleave_moe_layer_step": 1, "attention.sliding_window": None},
    },
    "gpt-oss": {**USED, "attention.sliding_window": 4},
    "phimoe": {"expert_count": 6, "attention.sliding_window": 4},
    "kimi-linear": {
        **{**GROUPED, **LATENT, "ssm.conv_kernel": 6},
        **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), False),  # without RoPE
    },
    "deepseek2": GROUPED | LATENT,
    "mistral4": GROUPED | LATENT | YARN,
}

# Keys that count beside others: test_rotary.py.
OF_YARN = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")


def keys() -> list[str]:
    """All keys of the format below an architecture's prefix."""
    groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM, gguf.Keys.WKV)
    found = [value for group in groups for name, value in vars(group).items() if name.isupper()]
    return [key.removeprefix("{arch}.") for key in found if key.startswith("{arch}.")]


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OF_EXPERTS])
def test_every_key_of_the_format_is_used_or_refused(name):
    before = read(name=name)
    family = FAMILIES[before["architectures"][0]]
    built = family.config_from_hf(before)
    for key in dict.fromkeys([*keys(), *TAKEN]):
        taken = (TAKEN | OF_ONE.get(name, {})).get(key)
        is_unused = taken is False or (taken is None and key in (*IRRELEVANT, *OF_YARN))
        value = True if key == "rope.scaling.finetuned" else 7 if is_unused else 7.0
        value = value if taken is None or taken is False else taken
        changes = {f"{name}.{key}": value}
        architecture = ARCHITECTURES.get(name) or MIXTURES[name]
        if key == "block_count" and (
            architecture.is_mixed or architecture.is_uneven
        ):  # which lists the layers' heads
            with pytest.raises(CheckpointError, match=f"expected a list of {value} numbers"):
                read(changes, name=name)
        elif is_unused:
            assert family.config_from_hf(read(changes, name=name)) == built, key
        elif taken is not None:
            found = read(changes, name=name)
            assert FAMILIES[found["architectures"][0]].config_from_hf(found) != built, key
        else:
            with pytest.raises(CheckpointError, match=re.escape(f"{name}.{key}")):
                read(changes, name=name)


@pytest.mark.parametrize("key", [*IRRELEVANT, *NEUTRAL])
def test_what_changes_nothing_is_accepted(key):
    for value in NEUTRAL.get(key, ("any text",)):
        require_known(Metadata(Path("m.gguf"), {f"llama.{key}": value, "qwen2.other": 1}), "llama")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("logit_scale", 0.5, "0 or 1"),
        ("attention.causal", False, "True"),
        ("attention.sliding_window", 4096, "0;"),
        ("attention.sliding_window", np.arange(3), "0;"),
        ("made_up", "text", "a file without it"),
    ],
)
def test_other_values_are_refused(key, value, expected):
    metadata = Metadata(Path("m.gguf"), {f"llama.{key}": value})
    with pytest.raises(CheckpointError, match=rf"m\.gguf: 'llama\.{key}' is .*: expected"):
        require_known(metadata, "llama")


def test_a_granite_without_a_rotary_embedding():
    with pytest.raises(CheckpointError, match=r"granite\.rope\.scaling\.finetuned is false"):
        read({"granite.rope.scaling.finetuned": False}, name="granite")


def test_gemma_without_windows_and_caps():
    """llama.cpp has no window in Gemma 3 where a file names none, and 0 for none."""
    gemma3 = FAMILIES["Gemma3ForCausalLM"].config_from_hf(read(name="gemma3"))
    assert {layer.attention.rope for layer in gemma3.layers} == {"global"}  # type: ignore[attr-defined]
    assert gemma3.windows == (None, None)
    none = {"gemma2.attn_logit_softcapping": 0.0, "gemma2.final_logit_softcapping": 0.0}
    gemma2 = FAMILIES["Gemma2ForCausalLM"].config_from_hf(read(none, name="gemma2"))
    assert (gemma2.logit_softcap, gemma2.layers[0].attention.softcap) == (None, None)  # type: ignore[attr-defined]


def test_the_head_size_is_that_of_the_format():
    """And not the default of a family's config.json."""
    values = llama_metadata("qwen3")
    assert read(name="qwen3")["head_dim"] == values["qwen3.embedding_length"] // 4
    with pytest.raises(CheckpointError, match=r"qwen3\.attention\.value_length is 8: expected 16"):
        read({"qwen3.attention.value_length": 8}, name="qwen3")
