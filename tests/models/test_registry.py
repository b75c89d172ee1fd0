from __future__ import annotations

import re

import pytest

from mpjax.models import FAMILIES, ConfigError, Decoder, Llama, Mistral, Qwen2, Qwen3, family


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


@pytest.mark.parametrize(
    ("hf", "found"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "'FalconForCausalLM'"),
        ({"architectures": ["A", "B"]}, "'A', 'B'"),
        ({"architectures": [], "model_type": "gpt2"}, r"none \(model_type 'gpt2'\)"),
        ({}, r"none \(model_type None\)"),
        (
            {"architectures": ["Starcoder2ForCausalLM"]},
            "'Starcoder2ForCausalLM', which has norms that subtract the mean, and an MLP without a",
        ),
    ],
)
def test_what_is_not_supported_is_named_beside_what_is(hf, found):
    with pytest.raises(ConfigError, match=f"unsupported architecture: {found}.*Qwen3ForCausalLM"):
        family(hf)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [["LlamaForCausalLM"]], 5, {"a": 1}, [None]])
def test_names_are_a_list(names):
    message = re.escape(
        f"config.json: architectures is {names!r}: expected a list of names, such as"
    )
    with pytest.raises(ConfigError, match=message):
        family({"architectures": names})
