"""Muse Glimmer's text model against transformers, which has it only beside a vision encoder."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import mpjax
from mpjax.models import ConfigError
from mpjax.models.muse import MuseGlimmer
from tests.models.sharded_families import VOCABULARY, keys

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **keys("MuseGlimmerForCausalLM"),
    **{"num_hidden_layers": 5, "sliding_window": 6, "rms_norm_eps": 0.01, "post_norm_eps": 0.02},
    **{"pad_token_id": None, "bos_token_id": None, "final_logit_softcapping": 3.0},
    "output_multiplier": 0.7,
}
VISION = {
    **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
    **{"intermediate_size": 32, "pos_emb_height": 4, "pos_emb_width": 4},
}
WHOLE = {"projector_hidden_size": 32, "out_hidden_size": 128, "tie_word_embeddings": False}
WHOLE |= {"image_token_id": VOCABULARY + 1, "video_token_id": VOCABULARY + 2}  # no texts have these
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, (2, 20))
# Each key of the text model's class, changed alone, but those that test_config_sweep.py changes in
# other families.
CHANGES: list[dict[str, Any]] = [
    {"layer_types": ["sliding_attention", *["full_attention"] * 3, "sliding_attention"]},
    {"layer_rope_theta": [10000.0, 0, 10000.0, 10000.0, 10000.0]},
    {"qk_scale_factor": 1.0},
    {"output_multiplier": 2.0},
    {"final_logit_softcapping": 1.0},
    {"post_norm_eps": 0.5},
    {"rms_norm_eps": 0.5},
    {"sliding_window": 3},
    {"head_dim": 16, "num_key_value_heads": 4},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
]


def build(changes: dict[str, Any]):
    text = {**SIZES, **changes}
    if "rope_parameters" in changes:
        text.pop("rope_theta")
    config = transformers.MuseGlimmerConfig(text_config=text, vision_config=VISION, **WHOLE)
    torch.manual_seed(0)
    model = transformers.MuseGlimmerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5)
            elif "vision" not in name:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    return model


def logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def require_alike(found, expected, tolerance: float = 1e-5) -> None:
    assert np.abs(np.asarray(found) - expected).max() < tolerance * np.abs(expected).max()


def test_logits_greedy_tokens_and_eight_bits(tmp_path):
    model = build({})
    model.save_pretrained(tmp_path / "source")
    expected = logits(model, TOKENS)
    lm = mpjax.load(tmp_path / "source", dtype="float32", precision="W32A32KV16", progress=False)
    require_alike(lm.model(TOKENS.astype(np.int32)), expected)
    options = {"max_new_tokens": 30, "sampling": {"stop_ids": ()}}
    new = mpjax.generate(lm, TOKENS[:, :8].tolist(), **options).tokens
    whole = np.concatenate([TOKENS[:, :8], np.array(new)], 1)
    np.testing.assert_array_equal(new, logits(model, whole).argmax(-1)[:, 7:-1])
    assert len(np.unique(new)) > 3
    packed = mpjax.load(tmp_path / "source", dtype="float32", precision="W8g32A16KV8")
    near = np.asarray(packed.model(TOKENS.astype(np.int32)))
    assert 0 < abs(near - expected).mean() < 0.1 * abs(expected).mean()
    mpjax.save(packed, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved", progress=False)
    np.testing.assert_array_equal(again.model(TOKENS.astype(np.int32)), near)


@pytest.mark.sweep
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_a_changed_key_is_followed(changes, tmp_path):
    model, expected = build(changes), logits(build({}), TOKENS)
    model.save_pretrained(tmp_path)
    changed = logits(model, TOKENS)
    assert abs(changed - expected).max() > 1e-3 * abs(expected).max()
    lm = mpjax.load(tmp_path, dtype="float32", progress=False)
    require_alike(lm.model(TOKENS.astype(np.int32)), changed, 3e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"hidden_activation": "relu"},
        {"layer_rope_theta": [100.0] * 5},
        {"layer_types": ["full_attention"]},
    ],
)
def test_other_values_are_refused_by_name(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        MuseGlimmer.config_from_hf(SIZES | changes)


def test_every_key_of_the_text_model_is_known_here():
    """Or changes no logits, as in test_config_sweep.py."""
    fields = {field.name for field in dataclasses.fields(transformers.MuseGlimmerTextConfig)}
    changed = {key for changes in CHANGES for key in changes}
    others = {"attention_bias", "hidden_activation", "tie_word_embeddings", "attention_dropout"}
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    sizes |= {"num_attention_heads", "max_position_embeddings"}
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    plain = {"initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
    assert fields - common - plain - sizes - others <= changed
