"""Adapters that are trained here, written, and read by PEFT; and those that are folded in."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import mpjax
from mpjax.adapters.collection import Adapters
from tests.mpjax.checkpoint.adapters import test_peft_parity as parity
from tests.mpjax.checkpoint.adapters.write_adapter import BEFORE, write_adapter
from tests.mpjax.checkpoint.test_huggingface_parity import build
from tests.mpjax.conftest import TINY

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytestmark = parity.pytestmark


def peft_logits(folder, written, tokens, family, changes):
    """The logits of a base with the adapter that PEFT reads from a folder."""
    model = peft.PeftModel.from_pretrained(build(family, changes), folder / written).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("name", ["patterns", "tables", "saved-head", "experts", "rslora"])
def test_what_is_read_is_written_again(name, tmp_path):
    (family, changes), keys = parity.CASES[name]
    tokens, _, expected = parity.write_both(tmp_path, family, changes, **keys)
    lm = mpjax.load(tmp_path / "base", dtype="float32", adapters={"x": tmp_path / "adapter"})
    mpjax.save_adapter(lm, tmp_path / "written", "x")
    found = peft_logits(tmp_path, "written", tokens, family, changes)
    np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize("name", ["dora", "experts", "tables", "saved-head"])
def test_merged_weights(name, tmp_path):
    (family, changes), keys = parity.CASES[name]
    tokens, _, expected = parity.write_both(tmp_path, family, changes, **keys)
    lm = mpjax.load(tmp_path / "base", dtype="float32", adapters={"x": tmp_path / "adapter"})
    before = jax.tree.leaves(nnx.state(lm.model))
    found = mpjax.merge(lm, "x")
    np.testing.assert_allclose(found.model(tokens.astype(np.int32)), expected, atol=1e-4)
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(lm.model)), before, strict=True))
    assert found.adapters.names == []


def test_merged_weights_are_rounded_as_they_were(tiny_folder, tmp_path):
    folder = write_adapter(tmp_path / "a", TINY, leaves=("q_proj", "up_proj"))
    file = folder / "adapter_model.safetensors"
    norm = {f"{BEFORE}model.norm.weight": np.full(128, 2.0, np.float32)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | norm, file)
    lm = mpjax.load(tiny_folder, precision="W8A32KV16H8")
    adapter = mpjax.read_adapter(folder, lm.model)
    merged = mpjax.merge(lm, adapter)
    assert merged.precision == lm.precision
    path = "layers.0.mlp.gate_up"
    own, new = (model.layers[0].mlp.gate_up.parts[0].kernel for model in (lm.model, merged.model))
    down, ups, _ = adapter.changes[path].arrays
    halves = zip(np.split(down, 2, -1), ups, strict=True)
    change = np.concatenate([part @ up for part, up in halves], -1)
    expected = own.get_value().dequantize(jnp.float32) + change
    step = np.abs(expected).max() / 100
    np.testing.assert_allclose(new.get_value().dequantize(jnp.float32), expected, atol=step)
    np.testing.assert_array_equal(merged.model.norm.weight.get_value(), 2)
    mpjax.save(merged, tmp_path / "saved")


def test_a_trained_adapter_is_served_and_read_by_peft(tmp_path):
    model = build("Llama", {})
    model.save_pretrained(tmp_path / "base")
    lm = mpjax.load(tmp_path / "base", precision="W8g32A32KV16")
    tuned = mpjax.lora(lm, 3, ["q_proj", "v_proj", "mlp.down_proj"], seed=1)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 12)).astype(np.int32)
    base = lm.model(tokens)
    np.testing.assert_array_equal(tuned.model(tokens), base)
    structure, pairs, frozen = nnx.split(tuned.model, nnx.LoRAParam, ...)

    def loss(pairs, frozen):
        logprobs = jax.nn.log_softmax(nnx.merge(structure, pairs, frozen)(tokens[:, :-1]))
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1).mean()

    step = jax.jit(jax.value_and_grad(loss))
    losses = []
    for _ in range(4):
        value, gradient = step(pairs, frozen)
        pairs = jax.tree.map(lambda pair, g: pair - 2.0 * g, pairs, gradient)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.05
    nnx.update(tuned.model, pairs)
    expected = tuned.model(tokens)
    lm.add_adapter("mine", mpjax.Adapter.of(tuned.model))
    place = lm.adapters["mine"].place
    np.testing.assert_allclose(lm.adapted(tokens, jnp.array([0, place]))[1], expected[1], atol=2e-5)
    mpjax.save_adapter(tuned, tmp_path / "written")
    again = dataclasses.replace(lm, adapters=Adapters())
    again.add_adapter("mine", tmp_path / "written")
    found = again.with_adapter("mine").model(tokens)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    names = safetensors.numpy.load_file(tmp_path / "written" / "adapter_model.safetensors")
    assert not [name for name in names if "k_proj" in name]
    change = peft_logits(tmp_path, "written", tokens.astype(np.int64), "Llama", {})
    with torch.no_grad():
        plain = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    # The base of PEFT is not rounded; what the adapter changes is nearly the same.
    np.testing.assert_allclose(
        change - plain, expected - base, atol=0.15 * abs(expected - base).max()
    )


def test_what_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="targets is 'q_proj': expected 'all-linear', or a list"):
        mpjax.lora(tiny, 4, "q_proj")
    with pytest.raises(ValueError, match="no linear map of the model is called x_proj"):
        mpjax.lora(tiny, 4, ["q_proj", "x_proj"])
    with pytest.raises(ValueError, match="rank is 0"):
        mpjax.lora(tiny, 0)
    with pytest.raises(ValueError, match="lm is 1: expected a LanguageModel"):
        mpjax.lora(1)
    tuned = mpjax.lora(tiny, 4)
    with pytest.raises(ValueError, match="the model has an adapter itself: take the base"):
        mpjax.lora(tuned, 4)
    with pytest.raises(ValueError, match="the model has no adapter itself: mpjax"):
        mpjax.save_adapter(tiny, tmp_path / "x")
    with pytest.raises(ValueError, match="is not empty: choose another folder"):
        mpjax.save_adapter(tuned, write_adapter(tmp_path / "a", TINY))
    with pytest.raises(ValueError, match="there is no adapter 'x': the model has none"):
        mpjax.merge(dataclasses.replace(tiny, adapters=Adapters()), "x")
