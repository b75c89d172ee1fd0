"""Families of one file each against transformers, in float32: logits, and greedy tokens.

The configurations are those of tests/models/sharded_families.py, which divides each family among
two devices. test_config_sweep.py changes each of their keys.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import mpjax
from tests.models.sharded_families import VOCABULARY, keys
from tests.sweeps import is_asked_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)
NEW = 40
# Heads whose channels are normed or rotated otherwise, and layers that Llama has not.
FAMILIES = (
    *(
        "Apertus",
        "Cohere",
        "Cohere2",
        "Cohere2Moe",
        "Dots1",
        "Ernie4_5",
        "Ernie4_5_Moe",
        "Exaone4",
        "Glm4",
    ),
    *("GraniteMoe", "GraniteMoeShared", "Llama4"),
    *("HunYuanDenseV1", "HunYuanMoEV1", "Ministral3"),
    *("Glm4Moe", "MiniMaxM2", "Olmo3", "Phimoe", "SeedOss", "Starcoder2"),
)


# One for each mechanism; the engine's programs of a family take seconds to compile.
GREEDY = (
    "Apertus",
    "Cohere2Moe",
    "Ernie4_5_Moe",
    "HunYuanDenseV1",
    "Llama4",
    "Ministral3",
    "Olmo3",
    "Phimoe",
)


def build(architecture: str, hf: dict):
    """transformers' model of a config.json with all of its parameters and buffers random."""
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**hf, attn_implementation="eager")).to(torch.float32).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if parameter.ndim > 1 and "correction" not in name:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            elif "norm" in name and not name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
            elif "act_fn.beta" not in name and "act_fn.eps" not in name:
                parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens(name, tmp_path, request):
    architecture = f"{name}ForCausalLM"
    model = build(architecture, keys(architecture) | {"pad_token_id": None})
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == [architecture]
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, (2, 8))
    with torch.no_grad():
        greedy = model.generate(
            torch.from_numpy(prompt),
            attention_mask=torch.ones(2, 8, dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected = model(greedy[:, : 8 + NEW // 2]).logits.numpy()
    lm = mpjax.load(tmp_path, dtype="float32", progress=False)
    found = np.asarray(lm.model(greedy[:, : 8 + NEW // 2].numpy().astype(np.int32)))
    assert abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=5e-5 * abs(expected).max())
    if name in GREEDY or is_asked_for(request.config):
        options = {"max_new_tokens": NEW, "sampling": {"stop_ids": ()}}
        assert mpjax.generate(lm, prompt.tolist(), **options).tokens == greedy[:, 8:].tolist()


def test_experts_whose_inputs_are_weighed_in_eight_bits(tmp_path):
    """Each expert's gate and up are one transposed tensor in files."""
    architecture = "Llama4ForCausalLM"
    model = build(architecture, keys(architecture) | {"pad_token_id": None})
    model.save_pretrained(tmp_path / "source")
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (2, 20))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    lm = mpjax.load(tmp_path / "source", dtype="float32", precision="W8g32A16KV8", progress=False)
    found = np.asarray(lm.model(tokens.astype(np.int32)))
    assert 0 < abs(found - expected).mean() < 0.1 * abs(expected).mean()
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved", progress=False)
    np.testing.assert_array_equal(again.model(tokens.astype(np.int32)), found)


VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "intermediate_size": 32}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True}
OF_LLAMA4 = {
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
}
IMAGES = {
    "Llama4": ("llama4_text", "Llama4ForCausalLM"),
    "Mistral3": ("ministral3", "Ministral3ForCausalLM"),
    "Qwen2VL": ("qwen2_vl_text", {"rope_scaling": MROPE, "head_dim": 16}),
    "Qwen3VL": ("qwen3_vl_text", {"rope_scaling": INTERLEAVED}),
}


@pytest.mark.parametrize(
    ("name", "is_flat"), [*((each, False) for each in IMAGES), ("Qwen2VL", True)]
)
def test_text_models_of_models_that_read_images(name, is_flat, tmp_path):
    kind, changes = IMAGES[name]
    changes = keys(changes) if isinstance(changes, str) else keys("Qwen3ForCausalLM") | changes
    text = {**changes, "model_type": kind, "pad_token_id": None}
    vision = VISION | {"Mistral3": {"image_size": 28}, "Llama4": OF_LLAMA4}.get(name, {})
    vision = vision | {"model_type": "pixtral"} if name == "Mistral3" else vision
    whole = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    architecture = f"{name}ForConditionalGeneration"
    model = getattr(transformers, architecture)(whole).eval()
    model.save_pretrained(tmp_path)
    if is_flat:
        flat = {**text, "model_type": "qwen2_vl", "architectures": [architecture]}
        (tmp_path / "config.json").write_text(json.dumps(flat))
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (2, 20))
    with torch.no_grad():
        # Llama 4's whole model fails without an image.
        theirs = model.language_model if name == "Llama4" else model
        expected = theirs(input_ids=torch.from_numpy(tokens)).logits.numpy()
    found = np.asarray(mpjax.load(tmp_path, progress=False).model(tokens.astype(np.int32)))
    np.testing.assert_allclose(found, expected, atol=5e-5 * abs(expected).max())
