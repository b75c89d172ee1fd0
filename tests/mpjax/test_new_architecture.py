"""An architecture that is defined here alone: a class, a mixer, an MLP, names, and one entry."""

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
from mpjax.kernels import ActivationFormat, KVFormat
from mpjax.models import (
    FAMILIES,
    Decoder,
    DecoderConfig,
    FusedLinear,
    GatedMLPSpec,
    GroupedQuerySpec,
    LayerSpec,
    Linear,
    LinearMaps,
    MixerSpec,
    MLPSpec,
    SequenceState,
)
from mpjax.models.parameters import Names
from mpjax.models.recurrent import RecurrentMixer
from mpjax.models.state import Room
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

    def terms(self, x, context):
        inner = jnp.square(jax.nn.relu(self.entry(x)))
        return self.exit.terms(inner * jax.lax.broadcast_to_rank(self.gain.get_value(), inner.ndim))

    def inputs(self, x):
        inner = jnp.square(jax.nn.relu(self.entry(x)))
        return {
            "entry": x,
            "exit": inner * jax.lax.broadcast_to_rank(self.gain.get_value(), inner.ndim),
        }


@dataclasses.dataclass(frozen=True)
class DeltaSpec(MixerSpec):
    """A delta rule: each head keeps a matrix that maps keys to values, and corrects it by a token.

    With a key k of length 1, a value v and a rate b in (0, 1), the matrix S becomes
    S + b · (v − S · k) · kᵀ, and the output is S · q.
    """

    kind: ClassVar[str] = "delta"

    def build(self, config, rngs):
        return Delta(config, self, rngs)

    def linear_maps(self, config):
        hidden = config.hidden_size
        heads = (hidden, config.num_heads)
        maps = LinearMaps("qkv", ((hidden, hidden),) * 3), LinearMaps("rate", (heads,))
        return (*maps, LinearMaps("output", ((hidden, hidden),)))

    def readers(self, config):
        return "qkv", "rate"

    def state(self, config):
        return SequenceState(((config.num_heads, config.head_dim, config.head_dim),))


class Delta(RecurrentMixer):
    def __init__(self, config: DecoderConfig, spec: DeltaSpec, rngs: nnx.Rngs):
        qkv, rate, output = spec.linear_maps(config)
        self.qkv = FusedLinear.create(qkv, config.dtype, rngs)
        self.rate, self.output = (
            Linear.create(maps.shapes[0], bias=False, dtype=config.dtype, rngs=rngs)
            for maps in (rate, output)
        )
        self.heads, self.state = config.num_heads, spec.state(config)

    @property
    def activations(self) -> ActivationFormat:
        return self.qkv.activations

    def project(self, x, context):
        return *self.qkv(x, context), self.rate(x, context)

    def advance(self, inputs, context, state):
        x = inputs[0]
        query, key, value, rate = (self.heads_of(part) for part in inputs)
        key /= jnp.linalg.norm(key, axis=-1, keepdims=True)
        rate = jax.nn.sigmoid(rate)
        sequence, is_real = context.places(x.shape[:-1])
        if state is None:
            [matrices] = self.state.create(Room(0, len(x), KVFormat(), 16), None)
        else:
            matrices = context.rows(state[0]).take(state[0])

        def advance(matrices, token):
            at, is_real, q, k, v, b = token
            before = matrices[at]  # [heads, values, keys]
            error = v - jnp.einsum("hvk,hk->hv", before, k)
            after = before + jnp.einsum("h,hv,hk->hvk", b[:, 0], error, k)
            after = jnp.where(is_real, after, before)
            return matrices.at[at].set(after), jnp.einsum("hvk,hk->hv", after, q)

        tokens = sequence, is_real, query, key, value, rate
        matrices, mixed = jax.lax.scan(advance, matrices, tokens)
        mixed = mixed.reshape(x.shape)
        if state is None:
            return mixed, None
        return mixed, (context.rows(state[0]).put(state[0], matrices),)

    def heads_of(self, x):
        """The heads of each token, one after another: float32 [tokens, heads, channels]."""
        return x.astype(jnp.float32).reshape(-1, self.heads, x.shape[-1] // self.heads)

    def terms(self, mixed, context):
        return self.output.terms(mixed, context)

    def inputs(self, x, mixed):
        return {"qkv": x, "rate": x, "output": mixed}


class Toy(Decoder):
    """Every second layer has the other mixer and MLP, and nothing is called as in Llama."""

    specs = (GroupedQuerySpec, DeltaSpec, GatedMLPSpec, SquaredMLPSpec)
    names: ClassVar[Names] = {
        "embedding": "transformer.wte.weight",
        "norm.weight": "transformer.ln_f.weight",
        "head": "output.weight",
        "attention_norm.weight": "transformer.h.{layer}.ln_1.weight",
        "attention.qkv": tuple(f"transformer.h.{{layer}}.attn.w{which}" for which in "qkv"),
        "attention.rate": "transformer.h.{layer}.attn.wb",
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
        kinds = GroupedQuerySpec(), DeltaSpec()
        mlps = GatedMLPSpec(hf["d_ff"]), SquaredMLPSpec(hf["d_ff"])
        return DecoderConfig(
            vocab_size=hf["n_vocab"],
            hidden_size=hf["d_model"],
            num_heads=hf["n_heads"],
            num_kv_heads=hf["n_heads"],
            head_dim=hf["d_model"] // hf["n_heads"],
            layers=tuple(LayerSpec(kinds[i % 2], mlps[i % 2]) for i in range(hf["n_layers"])),
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
    found[f"{h}.1.attn.wb.weight"] = draw(4, width) * 4
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


def delta(query, key, value, rate):
    """The delta rule in NumPy, [batch, tokens, heads, channels]; rate: [batch, tokens, heads]."""
    batch, length, heads, size = query.shape
    found = np.zeros_like(query)
    for place in np.ndindex(batch, heads):
        matrix = np.zeros((size, size))
        for t in range(length):
            q, k, v, b = (x[place[0], t, place[1]] for x in (query, key, value, rate))
            k = k / np.linalg.norm(k)
            matrix = matrix + b * np.outer(v - matrix @ k, k)
            found[place[0], t, place[1]] = matrix @ q
    return found


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
        if layer.endswith("0"):
            positions, lengths = np.tile(np.arange(length), (batch, 1)), np.full(batch, length)
            query, key = turn(heads[0]), turn(heads[1])
            attended = softmax_attention(query, key, heads[2], positions, lengths, 0.25, None)
        else:
            rate = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.wb")
            attended = delta(*heads, 1 / (1 + np.exp(-rate)))  # type: ignore[call-arg]
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
        *("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"),
        *("attention.rate", "mlp.entry", "mlp.exit"),
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


def test_an_engine_keeps_a_state_for_each_row(folder):
    """Rows that come and go in slots, pieces of prompts, preemption, and nothing to share."""
    lm = dataclasses.replace(mpjax.load(folder), page_size=16)
    prompts = [TOKENS[0, : 4 + n].tolist() * 3 for n in range(5)]
    options = {"max_new_tokens": 12, "sampling": {"stop_ids": ()}}
    tokens = np.zeros((5, 24), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.array([len(prompt) for prompt in prompts])
    alone = mpjax.generate_tokens(lm.model, tokens, lengths, **options).tokens.tolist()
    small = {"slots": 3, "max_tokens": 48, "chunk_tokens": 8, "steps": 4}
    with mpjax.Engine(lm, cache_memory=60_000, table_states=0, **small) as engine:
        for _ in range(2):
            handles = [engine.submit(prompt, **options) for prompt in prompts]
            assert [handle.result().tokens for handle in handles] == alone
        assert engine.statistics()["shared_tokens"] == 0
        assert engine.statistics()["preemptions"] > 0
    speculated = mpjax.generate_tokens(
        lm.model, tokens, lengths, speculate=mpjax.Ngram(1, 2), **options
    )
    assert speculated.tokens.tolist() == alone


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
