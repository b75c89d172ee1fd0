"""Families that differ from Llama in more than sizes, against transformers, in float32."""

from __future__ import annotations

import numpy as np
import pytest

from mpjax.generation.decoding import generate_tokens
from mpjax.loading import load
from tests.mpjax.checkpoint.test_huggingface_parity import (
    BATCH,
    SIZES,
    TWO_LAYERS,
    VOCABULARY,
    build,
    transformers,
)
from tests.sweeps import in_sweep, is_asked_for

torch = pytest.importorskip("torch")

WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]} | TWO_LAYERS
GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
ORIGINAL = "original_max_position_embeddings"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 16}
FAMILIES: dict[str, tuple[str, dict]] = {
    "gemma": ("Gemma", GEMMA),
    "gemma2": (
        "Gemma2",
        {**GEMMA, **WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3", {**GEMMA, **WINDOW, "query_pre_attn_scalar": 24}),
    "granite": (
        "Granite",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.4, "logits_scaling": 0.5, "rms_norm_eps": 0.01},
        },
    ),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "phi3-short": (
        "Phi3",
        {"rope_parameters": LONGROPE, ORIGINAL: 64, "max_position_embeddings": 256},
    ),
    "phi3-long": (
        "Phi3",
        {"rope_parameters": LONGROPE, ORIGINAL: 24, "max_position_embeddings": 256},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1], **TWO_LAYERS}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "llama-dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 24,
        },
    ),
}


# Windows and capped logits, layers without a rotation, and angles that depend on the length, which
# passes the original context behind the fourth new token.
GREEDY = ("gemma2", "phi3-long", "llama-dynamic", "smollm3")
PROMPT, NEW = 20, 12


@pytest.mark.parametrize(
    "name", [in_sweep(n) if n in ("gemma", "phi3", "phi3-short") else n for n in FAMILIES]
)
def test_logits_and_greedy_tokens(name, tmp_path, request):
    family, changes = FAMILIES[name]
    model = build(family, changes, "Gemma3Text" if family == "Gemma3" else family)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype="float32").model
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, 40))
    if name in GREEDY or is_asked_for(request.config):
        prompt = tokens[:, :PROMPT]
        # Before longer sequences, whose theta transformers keeps with dynamic scaling.
        greedy = model.generate(
            torch.from_numpy(prompt),
            attention_mask=torch.ones(BATCH, PROMPT, dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW,
        )
        lengths, options = np.full(BATCH, PROMPT), {"sampling": {"stop_ids": ()}}
        found = generate_tokens(loaded, prompt, lengths, max_new_tokens=NEW, **options).tokens
        np.testing.assert_array_equal(found, greedy.numpy()[:, PROMPT:])
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    found = np.asarray(loaded(tokens.astype(np.int32)))
    assert abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "text"), [("Gemma3", "gemma3_text"), ("Mistral3", "mistral")])
def test_text_models_of_models_that_read_images(family, text, tmp_path):
    sizes = SIZES | {"head_dim": 32, "model_type": text, "tie_word_embeddings": family == "Gemma3"}
    sizes |= WINDOW | {"query_pre_attn_scalar": 24} if family == "Gemma3" else {}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision |= {"model_type": "siglip_vision_model" if family == "Gemma3" else "pixtral"}
    whole = getattr(transformers, f"{family}Config")(
        **{"text_config": sizes, "vision_config": vision, "eos_token_id": None},
        **{"tie_word_embeddings": family == "Gemma3", "image_token_index": 95},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(whole).eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 90, (BATCH, 40))
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    found = np.asarray(load(tmp_path, dtype="float32").model(tokens.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=5e-5 * max(1, abs(expected).max()))
