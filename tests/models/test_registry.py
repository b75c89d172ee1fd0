from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpjax.models import FAMILIES, ConfigError, Decoder, Llama, Mistral, Qwen2, Qwen3, family
from mpjax.models.registry import CHECKED_WITH, read_config, table_lines, unknown_keys
from tests.models.sharded_families import keys


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LlamaForCausalLM", Llama),
        ("MistralForCausalLM", Mistral),
        ("Qwen2ForCausalLM", Qwen2),
        ("Qwen3ForCausalLM", Qwen3),
    ],
)
def test_family(name, expected):
    assert family({"architectures": [name]}) is expected
    assert family({"architectures": ["Unknown", name]}) is expected


def test_every_family_is_a_decoder_that_reads_its_own_config():
    for cls in FAMILIES.values():
        assert issubclass(cls, Decoder)
        assert "read_config" in vars(cls)


def test_a_bare_model_has_the_layers_of_its_causal_one():
    hf = keys("GraniteMoeSharedForCausalLM")
    _, expected = read_config(hf)
    _, found = read_config(hf | {"architectures": ["GraniteMoeSharedModel"]})
    assert found.layers == expected.layers
    assert found.layers[0].mlp.shared_size == 48


@pytest.mark.parametrize(
    ("architecture", "changes", "unknown"),
    [
        ("NemotronHForCausalLM", {"use_bias": False}, []),
        ("Lfm2ForCausalLM", {"tie_embedding": False, "block_ff_dim": 80}, []),
        ("Glm4MoeForCausalLM", {}, []),
        ("Qwen3NextForCausalLM", {"mlp_only_layers": [1]}, []),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"]}, ["layer_types"]),
    ],
)
def test_keys_that_a_family_reads_are_known(architecture, changes, unknown):
    hf = keys(architecture) | changes | {"new_key": 3, "empty_key": None}
    assert unknown_keys(hf, FAMILIES[architecture]) == [*unknown, "new_key"]


@pytest.mark.parametrize(
    ("hf", "found"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "'FalconForCausalLM'"),
        ({"architectures": ["A", "B"]}, "'A', 'B'"),
        ({"architectures": [], "model_type": "gpt2"}, r"none \(model_type 'gpt2'\)"),
        ({}, r"none \(model_type None\)"),
        (
            {"architectures": ["PhiForCausalLM"]},
            "'PhiForCausalLM', which has two norms that both read a layer's input",
        ),
    ],
)
def test_what_is_not_supported_is_named_beside_what_is(hf, found):
    expected = rf"unsupported architecture: {found}; supported are .*\bqwen3\b"
    with pytest.raises(ConfigError, match=expected):
        family(hf)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [["LlamaForCausalLM"]], 5, {"a": 1}, [None]])
def test_names_are_a_list(names):
    message = re.escape(
        f"config.json: architectures is {names!r}: expected a list of names, such as"
    )
    with pytest.raises(ConfigError, match=message):
        family({"architectures": names})


def test_the_docs_list_every_family():
    text = (Path(__file__).resolve().parents[2] / "docs/families.md").read_text(encoding="utf-8")
    assert "\n".join(table_lines()) in text
    assert f"transformers {CHECKED_WITH}" in text
