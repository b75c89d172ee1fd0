from __future__ import annotations

import json

import jax
import jax.numpy as jnp

import mpjax
from mpjax.bench import checkpoint
from tests.mpjax.bench.rows import SMALL_MODEL


def test_it_loads_as_an_awq_model_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BYTES_PER_SHARD", 20_000)
    checkpoint.write_awq(tmp_path / "new", SMALL_MODEL)
    lm = mpjax.load(tmp_path / "new", precision="W4A16KV8")
    assert lm.config == SMALL_MODEL
    assert lm.precision == "W4A16KV8"
    logits = jax.jit(lambda model, tokens: model(tokens))(lm.model, jnp.arange(5)[None])
    assert bool(jnp.isfinite(logits).all())
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
