"""An architecture that is defined here alone: a class, a kind of MLP, names, and one entry."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.kernels import ActivationFormat
from mpjax.models import (
    FAMILIES,
    Decoder,
    DecoderConfig,
    GatedMLPSpec,
    GroupedQuerySpec,
    LayerSpec,
    Linear,
    LinearMaps,
    MLPSpec,
)
from mpjax.models.parameters import Names
from mpjax.quantization.pipeline import quantize_decoder
from mpjax.quantization.text import Windows
from tests.pallas_kernels.oracles import softmax_attention


@dataclasses.dataclass(frozen=True)
class SquaredMLPSpec(MLPSpec):
    """exit(ReLU(entry(x))² · gain), with a gain for each channel, which is never quantised."""

    kind: ClassVar[str] = "squared"

    def build(self, config, rngs):
        return SquaredMLP(config, self, rngs)

    def linear_maps(self, config):
        hidden, inner = config.hidden_size, self.intermediate_size
        return LinearMaps("entry", ((hidden, inner),)), LinearMaps("exit", ((inner, hidden),))

    def arrays(self, config):
        return {"gain": (self.intermediate_size,)}


class SquaredMLP(nnx.Module):
    def __init__(self, config: DecoderConfig, spec: SquaredMLPSpec, rngs: nnx.Rngs):
        entry, exit = (maps.shapes[0] for maps in spec.linear_maps(config))
        self.entry = Linear.create(entry, bias=False, dtype=config.dtype, rngs=rngs)
        self.exit = Linear.create(exit, bias=False, dtype=config.dtype, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(spec.intermediate_size, config.dtype))

    @property
    def activations(self) -> ActivationFormat:
        return self.entry.activations

    def terms(self, x, *, quantized):
        inner = jnp.square(jax.nn.relu(self.entry(x)))
        return self.exit.terms(inner * jnp.expand_dims(self.gain.get_value(), (0, 1)))

    def inputs(self, x):
        inner = jnp.square(jax.nn.relu(self.entry(x)))
        return {"entry": x, "exit": inner * jnp.expand_dims(self.gain.get_value(), (0, 1))}


class Toy(Decoder):
    """Every second layer has the other MLP, and nothing is called as in Llama."""

    specs = (GroupedQuerySpec, GatedMLPSpec, SquaredMLPSpec)
    names: ClassVar[Names] = {
        "embedding": "transformer.wte.weight",
        "norm.weight": "transformer.ln_f.weight",
        "head": "output.weight",
        "attention_norm.weight": "transformer.h.{layer}.ln_1.weight",
        "attention.qkv": tuple(f"transformer.h.{{layer}}.attn.w{which}" for which in "qkv"),
        "attention.output": "transformer.h.{layer}.attn.wo",
        "mlp_norm.weight": "transformer.h.{layer}.ln_2.weight",
        "mlp.gate_up": ("transformer.h.{layer}.ff.w1", "transformer.h.{layer}.ff.w3"),
        "mlp.down": "transformer.h.{layer}.ff.w2",
        "mlp.entry": "transformer.h.{layer}.ff.entry",
        "mlp.exit": "transformer.h.{layer}.ff.exit",
        "mlp.gain": "transformer.h.{layer}.ff.gain",
    }

    @classmethod
    def read_config(cls, hf):
        mlps = GatedMLPSpec(hf["d_ff"]), SquaredMLPSpec(hf["d_ff"])
        return DecoderConfig(
            vocab_size=hf["n_vocab"],
            hidden_size=hf["d_model"],
            num_heads=hf["n_heads"],
            num_kv_heads=hf["n_heads"],
            head_dim=hf["d_model"] // hf["n_heads"],
            layers=tuple(LayerSpec(GroupedQuerySpec(), mlps[i % 2]) for i in range(hf["n_layers"])),
            max_position_embeddings=64,
            dtype="float32",
        )


HF = {
    "architectures": ["ToyForCausalLM"],
    "n_vocab": 24,
    "d_model": 64,
    "d_ff": 96,
    "n_heads": 4,
    "n_layers": 2,
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    width, inner, h = 64, 96, "transformer.h"
    found = {"transformer.wte.weight": draw(24, width) * 8, "output.weight": draw(24, width) * 4}
    found["transformer.ln_f.weight"] = 1 + draw(width)
    for layer in range(2):
        for name in ("ln_1", "ln_2"):
            found[f"{h}.{layer}.{name}.weight"] = 1 + draw(width)
        for name in ("wq", "wk", "wv", "wo"):
            found[f"{h}.{layer}.attn.{name}.weight"] = draw(width, width)
    for name in ("w1", "w3"):
        found[f"{h}.0.ff.{name}.weight"] = draw(inner, width)
    found[f"{h}.0.ff.w2.weight"] = draw(width, inner)
    found[f"{h}.1.ff.entry.weight"] = draw(inner, width)
    found[f"{h}.1.ff.exit.weight"] = draw(width, inner)
    found[f"{h}.1.ff.gain"] = 1 + draw(inner)
    return found


@pytest.fixture
def folder(tensors, tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "ToyForCausalLM", Toy)
    (tmp_path / "toy").mkdir()
    save_file(tensors, tmp_path / "toy" / "model.safetensors")
    (tmp_path / "toy" / "config.json").write_text(json.dumps(HF))
    return tmp_path / "toy"


def logits(tensors: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """The architecture's logits, in float64, from the tensors by their names in the file."""
    wide = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * wide[f"{name}.weight"]

    def linear(x, name):
        return x @ wide[f"{name}.weight"].T

    def turn(x):
        angles = np.arange(x.shape[1])[:, None, None] * 10000.0 ** (-np.arange(8) / 8)
        turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    batch, length = tokens.shape
    x = wide["transformer.wte.weight"][tokens]
    for layer in (f"transformer.h.{i}" for i in range(2)):
        heads = [
            linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.{name}").reshape(batch, length, 4, 16)
            for name in ("wq", "wk", "wv")
        ]
        positions, lengths = np.tile(np.arange(length), (batch, 1)), np.full(batch, length)
        query, key = turn(heads[0]), turn(heads[1])
        attended = softmax_attention(query, key, heads[2], positions, lengths, 0.25, None)
        x = x + linear(attended.reshape(batch, length, 64), f"{layer}.attn.wo")
        inner = norm(x, f"{layer}.ln_2")
        if layer.endswith("0"):
            gate, up = linear(inner, f"{layer}.ff.w1"), linear(inner, f"{layer}.ff.w3")
            x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.ff.w2")
        else:
            squared = np.maximum(linear(inner, f"{layer}.ff.entry"), 0) ** 2
            x = x + linear(squared * wide[f"{layer}.ff.gain"], f"{layer}.ff.exit")
    return linear(norm(x, "transformer.ln_f"), "output")


TOKENS = np.random.default_rng(1).integers(0, 24, (2, 9)).astype(np.int32)


def test_it_loads_by_its_own_names(folder, tensors):
    lm = mpjax.load(folder)
    assert type(lm.model) is Toy
    np.testing.assert_allclose(lm.model(TOKENS), logits(tensors, TOKENS), atol=2e-4)
    assert lm.num_parameters == sum(tensor.size for tensor in tensors.values())
    assert [*lm.summary()["linear_maps"]] == [
        *("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down", "mlp.entry", "mlp.exit"),
    ]


def test_its_weights_are_quantised_with_a_text(folder, tensors):
    lm = mpjax.load(folder)
    found = {}
    for method in ("rtn", "awq+gptq"):
        model = nnx.clone(lm.model)
        batches = [Windows(TOKENS.repeat(8, 0), np.ones((16, 9), bool))]
        recipe = mpjax.Recipe.of("W4g32A16KV16", method)
        quantize_decoder(model, lambda number: (lm.model.layers[number], False), batches, recipe)
        found[method] = np.abs(model(TOKENS) - logits(tensors, TOKENS)).mean()
    assert 0 < found["awq+gptq"] < 0.9 * found["rtn"]


def test_it_takes_steps_in_a_cache(folder, tensors):
    lm = mpjax.load(folder)
    cache = lm.model.create_cache(2, 16, "KV16", 16)
    found, cache = lm.model.step(TOKENS[:, :8], jnp.array([8, 8]), cache, fresh=True)
    np.testing.assert_allclose(found, logits(tensors, TOKENS[:, :8])[:, -1], atol=2e-4)
    found, _ = lm.model.step(TOKENS[:, 8:], jnp.array([1, 1]), cache)
    np.testing.assert_allclose(found, logits(tensors, TOKENS)[:, -1], atol=2e-4)


def test_it_is_quantised_saved_and_restored(folder, tensors, tmp_path):
    lm = mpjax.load(folder, precision="W8g32A16KV16", dtype="float32")
    assert lm.precision == "W8g32A32KV16"
    found = lm.model(TOKENS)
    assert np.abs(found - logits(tensors, TOKENS)).mean() < 0.02 * np.abs(found).mean()
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved")
    assert (type(again.model), again.config) == (Toy, lm.config)
    np.testing.assert_array_equal(again.model(TOKENS), found)


def test_what_is_wrong_is_said_in_its_names(folder, tensors):
    without = {name: array for name, array in tensors.items() if "entry" not in name}
    save_file(without, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor \(transformer\.h\.1\.ff\.entry\.w"):
        mpjax.load(folder)
    (folder / "config.json").write_text(json.dumps(HF | {"n_heads": 64}))
    with pytest.raises(
        CheckpointError, match=r"toy/config\.json: head_dim .* is 1: expected a pos"
    ):
        mpjax.load(folder)
