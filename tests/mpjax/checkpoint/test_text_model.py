"""Text models in checkpoints that also read images."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import huggingface
from mpjax.checkpoint.text_model import matches, text_config, written_names
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint

MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
TEXT = {k: v for k, v in LLAMA.items() if k not in ("architectures", "torch_dtype", "eos_token_id")}
WHOLE = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": TEXT | {"model_type": "mistral", "eos_token_id": 1, "sliding_window": None},
    "vision_config": {"model_type": "pixtral"},
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def older(name):
    return f"language_model.{name}"


def newer(name):
    return name.replace("model.", "model.language_model.", 1) if name != "lm_head.weight" else name


@pytest.mark.parametrize(("rename", "prefix"), [(older, ""), (newer, "model.")])
def test_the_text_model_is_that_of_its_own_files(rename, prefix, tmp_path, rng):
    plain = random_tensors(MISTRAL, rng)
    images = {
        f"{prefix}vision_tower.transformer.layers.0.attention.q_proj.weight": np.ones((2, 2)),
        f"{prefix}multi_modal_projector.linear_1.weight": np.ones((2, 2)),
    }
    tensors = {rename(name): array for name, array in plain.items()}
    images = {name: array.astype(np.float32) for name, array in images.items()}
    whole = mpjax.load(write_checkpoint(tmp_path / "whole", WHOLE, tensors | images))
    alone = mpjax.load(write_checkpoint(tmp_path / "alone", MISTRAL, plain))
    require_same_bits(whole, alone)
    assert whole.config == alone.config
    assert whole.config.stop_ids == (2,)
    assert whole.config.windows == (None, None)  # null is no window, and not the default
    if rename is older:
        mpjax.export(whole, tmp_path / "out")
        hf = huggingface.read_config(tmp_path / "out")
        assert hf["architectures"] == ["MistralForCausalLM"]
        require_same_bits(mpjax.load(tmp_path / "out"), alone)


@pytest.mark.parametrize("rename", [older, newer])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "lm_head.weight"])
def test_names_in_files_are_known_by_those_of_the_text_model(rename, name):
    assert rename(name) in written_names(name)
    assert name in written_names(name)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r".*language_model\.(model\.)?layers", True),
        (r"language_model\.model\.layers\.1\.", True),
        (r"model\.language_model\.layers\.1\.", True),
        (r"model\.layers\.1\.", True),
        (r".*language_model\.model\.layers\.2\.", False),
        (r"(?!model\.layers)", False),  # which the name in the files would match
        (r"vision_tower", False),
    ],
)
def test_patterns_match_names_in_files(pattern, expected):
    assert matches(re.compile(pattern), "model.layers.1.mlp.up_proj") is expected


@pytest.mark.parametrize("inner", [{}, {"tie_word_embeddings": False}])
def test_the_whole_says_whether_the_head_is_tied(inner, tmp_path, rng):
    tied = MISTRAL | {"tie_word_embeddings": True}
    tensors = random_tensors(tied, rng)
    text = {k: v for k, v in WHOLE["text_config"].items() if k != "tie_word_embeddings"} | inner  # type: ignore[attr-defined]
    hf = WHOLE | {"tie_word_embeddings": True, "text_config": text}
    named = {older(name): array for name, array in tensors.items()}
    whole = mpjax.load(write_checkpoint(tmp_path / "whole", hf, named))
    assert whole.config.tie_word_embeddings
    require_same_bits(whole, mpjax.load(write_checkpoint(tmp_path / "alone", tied, tensors)))


def test_keys_that_gemma_3_leaves_out():
    written = {"hidden_size": 2560, "num_hidden_layers": 34, "model_type": "gemma3_text"}
    hf = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": written | {"vocab_size": None},
        "quantization_config": {"quant_method": "awq"},
    }
    found = text_config(hf)
    assert found["architectures"] == ["Gemma3ForCausalLM"]
    assert (found["vocab_size"], found["num_attention_heads"]) == (262208, 8)
    assert found["quantization_config"] == hf["quantization_config"]
    assert text_config(hf | {"architectures": "x"}) == hf | {"architectures": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: text_config is None: expected an object"),
        ({"model_type": "mistral9"}, "text_config has the model_type 'mistral9': expected 'mi"),
    ],
)
def test_other_text_models_are_refused(text, message, tmp_path, rng):
    folder = write_checkpoint(tmp_path, WHOLE | {"text_config": text}, random_tensors(LLAMA, rng))
    with pytest.raises(CheckpointError, match=message) as caught:
        mpjax.load(folder)
    assert str(caught.value).startswith(str(folder))
