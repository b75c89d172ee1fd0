"""The Hugging Face folder: names, layout, and what transformers makes of it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

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
SHAPES = {
    "input_layernorm": (32,),
    "post_attention_layernorm": (32,),
    "self_attn.q_proj": (64, 32),
    "self_attn.k_proj": (32, 32),
    "self_attn.v_proj": (32, 32),
    "self_attn.o_proj": (32, 64),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
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


def test_names_and_shapes_are_those_of_llama(folder):
    expected = {"model.embed_tokens.weight": (40, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        expected |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in SHAPES.items()}
    tensors = load_file(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_a_fused_product_is_that_of_its_parts(model, folder, rng):
    tensors = load_file(folder / "model.safetensors")
    x = rng.normal(size=(3, 32)).astype(np.float32)
    attention, mlp = model.layers[1].attention, model.layers[1].mlp
    parts = {
        **dict(zip(("q", "k", "v"), attention.qkv(x), strict=True)),
        **dict(zip(("gate", "up"), mlp.gate_up(x), strict=True)),
    }
    for name, expected in parts.items():
        module = "mlp" if name in ("gate", "up") else "self_attn"
        weight = tensors[f"model.layers.1.{module}.{name}_proj.weight"].astype(np.float32)
        np.testing.assert_allclose(x @ weight.T, expected, rtol=0.05, atol=0.05)


def test_an_untied_head_is_written():
    config = Llama.config_from_hf(TINY | {"tie_word_embeddings": False})
    tensors = export.hugging_face_tensors(Llama(config, nnx.Rngs(0)))
    assert tensors["lm_head.weight"].shape == (40, 32)


def test_config_files(folder):
    assert json.loads((folder / "config.json").read_text()) == TINY
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    assert json.loads((folder / "generation_config.json").read_text()) == ids


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
