"""Keys that files leave out, against the defaults of transformers' configuration classes."""

from __future__ import annotations

from typing import Any

import pytest

from mpjax.models import FAMILIES, ConfigError
from mpjax.models.config_keys import DEFAULTS, complete

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.any_version

# Keys without a default here: a file has to have them.
NEEDED = {
    "vocab_size": 300_000,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
EXPERTS = {"moe_intermediate_size": 256}
NEEDED_BY = {
    "Qwen2MoeForCausalLM": EXPERTS | {"shared_expert_intermediate_size": 512},
    "Qwen3MoeForCausalLM": EXPERTS,
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 4},
    **{
        f"{name}ForCausalLM": {"num_key_value_heads": 32}
        for name in ("DeepseekV3", "DeepseekV32", "Glm4MoeLite")
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Gemma3nForCausalLM": {"num_hidden_layers": 20},
    "Gemma4ForCausalLM": {"vocab_size_per_layer_input": 300_000},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
}
# Families whose text models have classes of their own.
OF_TEXT = ("Gemma3", "Gemma3n", "Gemma4", "Qwen3_5", "Qwen3_5Moe", "Llama4", "MuseGlimmer")
# Keys by which others count.
SWITCHES: list[dict] = [
    {},
    {"use_sliding_window": True},
    {
        "head_dim": 64,
        "partial_rotary_factor": 1.0,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1] * 32,
            "long_factor": [2] * 32,
            "original_max_position_embeddings": 1024,
            "llama_4_scaling_beta": 0.1,  # which Ministral 3 asks for
            **{"short_mscale": 1.2, "long_mscale": 1.2},  # and PhiMoE for these
        },
    },
]


def needed(architecture: str) -> dict:
    return NEEDED | NEEDED_BY.get(architecture, {})


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_are_those_of_transformers(architecture):
    name = architecture.removesuffix("ForCausalLM").replace("PhiMoE", "Phimoe")
    kind: Any = getattr(transformers, f"{name}Config")
    if name in OF_TEXT:
        kind = getattr(transformers, f"{name}TextConfig")
    family = FAMILIES[architecture]
    # transformers reads no rope_scaling of these, and fails to check that of Gemma 4.
    for switches in SWITCHES[: 2 if name in ("Gemma4", "Cohere2Moe") else None]:
        bare = needed(architecture) | switches
        full = kind(**bare).to_dict()
        assert family.config_from_hf(bare) == family.config_from_hf(full), switches


@pytest.mark.parametrize("architecture", FAMILIES)
def test_keys_without_a_default_are_asked_for(architecture):
    bare = needed(architecture)
    for key in bare:
        # The MLP size of layers without experts.
        if key == "intermediate_size" and ("Moe" in architecture or "Next" in architecture):
            continue
        is_listed = key == "num_hidden_layers" and "NemotronH" in architecture  # by the pattern
        if is_listed or key in FAMILIES[architecture].defaults:
            continue
        with pytest.raises(ConfigError, match=f"config.json has no '{key}'"):
            FAMILIES[architecture].config_from_hf({k: v for k, v in bare.items() if k != key})


def test_null_stands_for_the_default_but_where_it_means_none():
    found = complete(
        {"a": None, "b": None, "sliding_window": None}, {"a": 1, "sliding_window": 2}, {}
    )
    assert found == {**DEFAULTS, "a": 1, "sliding_window": None}


def test_a_default_stop_token_is_one_of_the_vocabulary():
    stop = {"eos_token_id": 9}
    for hf, expected in (
        ({"vocab_size": 10}, 9),
        ({"vocab_size": 9}, None),
        ({"vocab_size": 5} | stop, 9),  # which is refused later
    ):
        assert complete(hf, stop, {}).get("eos_token_id") == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("switch", True, "null or false"), ("per_layer_config", {"0": {}}, "null or {}")],
)
def test_other_values_than_neutral_ones_are_refused(key, value, expected):
    neutral = {"switch": (None, False)}
    for allowed in ({}, {"switch": False}, {"per_layer_config": {}}):
        complete(allowed, {}, neutral)
    with pytest.raises(
        ConfigError, match=f"^config.json: {key} is .*: expected {expected}, since no"
    ):
        complete({key: value}, {}, neutral)
