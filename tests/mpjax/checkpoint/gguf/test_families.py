"""GGUF files of families of attention and experts against transformers' models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mpjax
from mpjax.errors import CheckpointError
from tests.models.sharded_families import keys
from tests.mpjax.checkpoint.gguf.family_files import CASES, VOCABULARY, write, written
from tests.sweeps import in_sweep

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

PROMPT = np.random.default_rng(0).integers(0, len(VOCABULARY), (2, 20))

# Read as others are, with other keys of their headers.
SIMILAR = ("qwen3vl", "qwen3vlmoe", "deepseek2-flash", "seed_oss")


@pytest.mark.parametrize("name", [in_sweep(n) if n in SIMILAR else n for n in CASES])
def test_logits_are_those_of_the_model(name, tmp_path):
    """Codes of experts are kept in the formats of their types."""
    expected, found = logits(model := written(name, tmp_path), tmp_path, None)
    assert abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=5e-5 * abs(expected).max())
    if any("experts" in path for path, _ in model.named_parameters()):
        counts = mpjax.load(tmp_path / "m.gguf", progress=False).summary()["linear_maps"]
        assert {*counts["mlp.experts.gate_up"], *counts["mlp.experts.down"]} == {"W8g32sym"}


def logits(
    model: Any, folder: Any, precision: str | None = "W32A32KV16"
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of transformers' model, and of the file in the folder."""
    with torch.no_grad():
        expected = model(torch.from_numpy(PROMPT)).logits.numpy()
    lm = mpjax.load(folder / "m.gguf", precision=precision, dtype="float32", progress=False)
    return expected, np.asarray(lm.model(PROMPT.astype(np.int32)))


@pytest.mark.parametrize("is_joint", [False, True])
def test_maps_of_latents_are_dequantised(is_joint, tmp_path):
    """In the halves of newer files, and in the joint map of older ones."""
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 64}
    model = written("deepseek2", tmp_path, **sizes)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")

    def edit(writer: Any) -> None:
        values = writer.kv_data[0]
        for key in ("key_length", "value_length") if is_joint else ():
            values[f"deepseek2.attention.{key}"] = values.pop(f"deepseek2.attention.{key}_mla")
        if is_joint:
            values["deepseek2.attention.head_count_kv"].value = 3

    q8, hf = gguf.GGMLQuantizationType.Q8_0, model.config.to_dict()
    write(tmp_path / "m.gguf", "deepseek2", hf, tensors, q8, edit=edit, is_joint=is_joint)
    expected, found = logits(model, tmp_path)
    # Of most numbers: a token may have other experts.
    assert np.median(abs(found - expected)) < 0.02 * abs(expected).max()
    lm = mpjax.load(tmp_path / "m.gguf", progress=False)
    assert lm.summary()["linear_maps"]["attention.expand"] == {"W16": 2}
    assert lm.summary()["linear_maps"]["attention.output"] == {"W8g32sym": 2}


def test_tables_and_maps_of_streams_are_dequantised(tmp_path):
    model, q8 = written("gemma3n", tmp_path), gguf.GGMLQuantizationType.Q8_0
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    write(tmp_path / "m.gguf", "gemma3n", model.config.to_dict(), tensors, q8)
    expected, found = logits(model, tmp_path)
    assert 0 < abs(found - expected).mean() < 0.05 * abs(expected).mean()
    lm = mpjax.load(tmp_path / "m.gguf", dtype="float32", progress=False)
    assert lm.summary()["linear_maps"]["mlp.down"] == {"W8g32sym": 4}


def test_codes_of_experts_with_alternating_outputs_are_kept(tmp_path):
    model, kind = written("gpt-oss", tmp_path), gguf.GGMLQuantizationType.MXFP4
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    write(tmp_path / "m.gguf", "gpt-oss", model.config.to_dict(), tensors, kind)
    lm = mpjax.load(tmp_path / "m.gguf", dtype="float32", progress=False)
    assert lm.summary()["linear_maps"]["mlp.experts.gate_up"] == {"WMXFP4": 2}
    for name in ("gate_up", "down"):
        weight = tensors[f"model.layers.1.mlp.experts.{name}_proj"].swapaxes(1, 2)
        blocks = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
        rounded = gguf.quants.dequantize(blocks, kind)
        if name == "gate_up":  # behind each other on the device
            rounded = np.concatenate([rounded[:, ::2], rounded[:, 1::2]], axis=1)
        kernel = getattr(lm.model.layers[1].mlp.experts, name).kernel.get_value()
        np.testing.assert_array_equal(kernel.dequantize(), rounded.swapaxes(1, 2))


def test_a_layer_that_predicts_a_second_token_is_left_out(tmp_path):
    model = written("glm4moe", tmp_path)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    last = {k.replace(".1.", ".2.", 1): v for k, v in tensors.items() if "layers.1." in k}
    hf = model.config.to_dict() | {"num_hidden_layers": 3}
    edit = lambda writer: writer.add_nextn_predict_layers(1)  # noqa: E731
    write(tmp_path / "m.gguf", "glm4moe", hf, tensors | last, edit=edit)
    expected, found = logits(model, tmp_path)
    np.testing.assert_allclose(found, expected, atol=5e-5 * abs(expected).max())
    with pytest.raises(CheckpointError, match="no MTP head of this family is implemented"):
        mpjax.load(tmp_path / "m.gguf", mtp=True)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "glm4",
            lambda writer: writer.add_rope_dimension_sections([2, 3, 3, 0]),
            r"glm4.rope.dimension_sections is \[.*\], as in the text model of GLM-4V: expected 0",
        ),
        (
            "apertus",
            lambda writer: writer.kv_data[0].pop("xielu.beta") and writer.add_xielu_beta([0.7]),
            "xielu.beta is 0.69.*: expected 0.5, as in Apertus",
        ),
        (
            "deepseek2",
            lambda writer: writer.kv_data[0].pop("deepseek2.rope.scaling.yarn_log_multiplier"),
            "has no 'deepseek2.rope.scaling.yarn_log_multiplier': expected a number",
        ),
        (
            "deepseek2-lite",
            lambda writer: writer.add_expert_weights_norm(True),
            "deepseek2.expert_weights_norm is true with softmax scores: expected false",
        ),
        (
            "dots1",
            lambda writer: writer.kv_data[0].pop("dots1.expert_gating_func"),
            "dots1.expert_gating_func is 0: expected 2, the sigmoid",
        ),
    ],
)
def test_other_models_of_an_architecture_are_refused(name, edit, message, tmp_path):
    hf = keys(f"{CASES[name][0]}ForCausalLM") | CASES[name][1]
    config = getattr(transformers, f"{CASES[name][0]}Config")(
        **{key: value for key, value in hf.items() if key != "head_dim" or value}
    )
    embedding = {"model.embed_tokens.weight": np.zeros((51, 64), np.float32)}
    if name == "apertus":
        embedding |= {f"act_fn.{key}": np.float32([1.0]) for key in ("alpha_n", "alpha_p", "beta")}
    write(tmp_path / "m.gguf", name, config.to_dict(), embedding, edit=edit)
    with pytest.raises(CheckpointError, match=message):
        mpjax.load(tmp_path / "m.gguf")
