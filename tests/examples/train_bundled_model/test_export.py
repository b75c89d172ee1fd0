"""The Hugging Face folder: names, layout, and what transformers makes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.train_bundled_model import export, optimize
from examples.train_bundled_model.train import MODEL
from mpjax.models import Llama

TINY = MODEL | {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


@pytest.fixture(scope="module")
def model() -> Llama:
    config = Llama.config_from_hf(TINY | {"dtype": "float32"})
    initial = Llama(config, nnx.Rngs(0))
    # Large weights, and norms other than one: a wrong place must show in the logits.
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda w: 5 * w + 0.1 * jax.random.normal(next(keys), w.shape), initial)


@pytest.fixture
def folder(model, tmp_path):
    export.write_checkpoint(model, TINY, tmp_path / "new" / "model")
    return tmp_path / "new" / "model"


def test_the_real_model_fits_the_repository_and_4_bit_groups():
    model = nnx.eval_shape(lambda: Llama(Llama.config_from_hf(MODEL), nnx.Rngs(0)))
    assert sum(weight.size * 2 for weight in jax.tree.leaves(model)) <= 9_000_000
    places = Llama.linear_places(Llama.config_from_hf(MODEL))
    assert all(channels % 128 == 0 for place in places for channels, _ in place.shapes)


@pytest.mark.filterwarnings("default")  # transformers' and torch's own
def test_transformers_computes_the_same_logits(model, folder, rng):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens = rng.integers(0, 40, (2, 30))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    assert loaded.generation_config.eos_token_id == 0
    with torch.no_grad():
        expected = loaded(torch.from_numpy(tokens)).logits.numpy()
    rounded = optimize.cast(optimize.cast(model, "bfloat16"), "float32")
    found = np.asarray(rounded(jnp.asarray(tokens, jnp.int32)))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)
