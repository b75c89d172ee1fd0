"""An EAGLE-3 head in a folder of its own is added to a loaded model."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.checkpoint.drafter import add_drafter, write_drafter
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat, QuantizedTensor
from mpjax.models.config import RopeScaling
from mpjax.models.eagle import tokens_place, with_eagle, with_usual_eagle
from tests.models.small import CONFIG, eagle_model, small_config, small_model
from tests.mpjax.checkpoint.test_huggingface_parity import edit_config

OPTIONS = {"max_new_tokens": 12, "sampling": {"temperature": 0}}
LAYER, TABLE = "midlayer.self_attn.q_proj.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random head for the bundled model, in SafeAILab's layout."""
    base = mpjax.load(mpjax.bundled_model(), dtype="float32").config
    sizes = {name: getattr(base, name) for name in ("hidden_size", "vocab_size", "num_heads")}
    head = small_config((None,), intermediate_size=96, **sizes, num_kv_heads=4, head_dim=32)
    model = small_model(with_eagle(base, head, (1, 2, 4), vocabulary=64))
    model.put_array(tokens_place(model.config), jnp.arange(7, 71, dtype=jnp.int32))
    path = tmp_path_factory.mktemp("head") / "folder"
    write_drafter(model, path)
    return path


def copied(folder, path, tensors=None, **changes):
    """A copy of a head with other tensors, and keys of its config.json; None removes one."""
    path.mkdir()
    save_file(load_file(folder / "model.safetensors") | (tensors or {}), path / "a.safetensors")
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    edit_config(path, **changes)
    return path


def load(drafter, **options):
    options = {"precision": "W32A32KV16", "dtype": "float32"} | options
    return mpjax.load(mpjax.bundled_model(), drafter=drafter, **options)


def test_it_is_read_with_the_model_and_its_arrays_are_those_of_the_files(folder, tmp_path):
    plain, lm = load(None), load(folder)
    tensors = load_file(folder / "model.safetensors")
    layer = lm.model.layers[-1]
    assert lm.config.depth == plain.config.num_layers == lm.config.num_layers - 1
    for name, found in {
        "midlayer.input_layernorm.weight": layer.attention.embedding_norm.weight,
        "midlayer.hidden_norm.weight": layer.attention.hidden_norm.weight,
        "midlayer.post_attention_layernorm.weight": layer.mlp_norm.weight,
        "norm.weight": layer.attention.norm.weight,
    }.items():
        np.testing.assert_array_equal(found.get_value(), tensors[name])
    for name, linear in {
        "fc": layer.attention.fc,
        "midlayer.self_attn.o_proj": layer.attention.attention.output,
        "lm_head": layer.attention.head,
    }.items():
        np.testing.assert_array_equal(linear.kernel.get_value().T, tensors[f"{name}.weight"])
    np.testing.assert_array_equal(layer.attention.tokens.get_value(), np.arange(7, 71))
    assert layer.attention.taps == (1, 2, 4)
    told = mpjax.generate(lm, "def ", speculate="eagle", **OPTIONS)
    assert told.tokens == mpjax.generate(plain, "def ", **OPTIONS).tokens
    assert told.speculation.proposed[0] > 0
    # A saved model has no head; one is added to it as to a checkpoint.
    mpjax.save(lm, tmp_path / "saved")
    again = mpjax.load(tmp_path / "saved", drafter=folder)
    assert again.config == lm.config
    both = (jax.tree.leaves(nnx.state(one.model)) for one in (lm, again))
    jax.tree.map(np.testing.assert_array_equal, *both)
    assert mpjax.load(tmp_path / "saved").config == plain.config
    with pytest.raises(ValueError, match="head is not possible: load it without mtp=True and dra"):
        mpjax.quantize(again, "W4A16KV16")


def test_an_update_writes_the_models_table_and_not_the_heads_of_that_name():
    lm = mpjax.LanguageModel(eagle_model(), None, KVFormat(16), mpjax.bundled_model())
    own = np.asarray(lm.model.layers[-1].attention.head.kernel.get_value())
    table = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    mpjax.update(lm, {"lm_head.weight": table})
    np.testing.assert_array_equal(lm.model.head.get_value(), table)
    np.testing.assert_array_equal(lm.model.layers[-1].attention.head.kernel.get_value(), own)


def test_its_maps_have_the_format_of_the_models(folder):
    lm = load(folder, precision="W4g32A16KV8", dtype="bfloat16")
    layer = lm.model.layers[-1]
    for linear in (layer.attention.fc, layer.attention.head, layer.mlp.down):
        assert isinstance(linear.kernel.get_value(), QuantizedTensor)
    assert "W4" in lm.precision
    assert "W16" not in lm.precision


def test_other_layouts(folder, tmp_path):
    """Speculators' keys and names, ids as vLLM counts them, and an embedding of the head's own."""
    hf = json.loads((folder / "config.json").read_text())
    own = ("draft_vocab_size", "eagle_config", "architectures")
    inner = {key: value for key, value in hf.items() if key not in own}
    path = copied(folder, tmp_path / "speculators")
    tensors = load_file(path / "a.safetensors")
    table = np.random.default_rng(0).standard_normal((2048, 256)).astype(np.float32)
    wide = np.full(3 * 256, 0.5, np.float32)
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    tensors |= {"embed_tokens.weight": table, "input_norm.weight": wide}
    save_file(tensors, path / "a.safetensors")
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
        "draft_vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), True),
    }
    (path / "config.json").write_text(json.dumps(config))
    lm = load(path)
    spec, mixer = lm.config.layers[-1].attention, lm.model.layers[-1].attention
    assert (spec.taps, spec.norm_before_residual, spec.norm_output) == ((1, 3, 5), True, True)
    np.testing.assert_array_equal(mixer.fc_norm.weight.get_value(), wide)
    np.testing.assert_array_equal(mixer.embedding.get_value(), table)
    np.testing.assert_array_equal(mixer.embedding_of(jnp.array([5])), table[[5]])


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({}, {"draft_vocab_size": None}, "config.json has no 'draft_vocab_size'"),
        ({}, {"draft_vocab_size": 4096}, "draft_vocab_size is 4096: expected at most 2048"),
        ({}, {"hidden_size": 128}, "hidden_size is 128: expected 256, as in the model"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2: expected 1"),
        ({}, {"fc_norm": True}, "fc_norm is True: expected False"),
        ({}, {"use_sliding_window": True}, "use_sliding_window is True: expected False"),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "_state is False: expected True"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}, r"are \[2, 2\]: exp"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["2"]}}, "expected numbers of"),
        ({"midlayer.x": np.zeros(1)}, {}, r"holds 1 tensor \(midlayer.x\) that the model has no"),
        ({LAYER: np.zeros((128, 256), "f")}, {}, r"q_proj.weight is float32 .*\[128, 512\]"),
        ({TABLE: np.zeros((63, 256), "f")}, {}, r"lm_head.weight is float32 .*\[64, 256\]"),
        ({"d2t": np.zeros(63, np.int64)}, {}, r"d2t is int64 .*expected integers of shape \[64\]"),
        ({"d2t": np.arange(64) - 1}, {}, "d2t gives the token ids -1 to 125"),
        ({"d2t": np.arange(0, -64, -1)}, {}, "gives the token ids 0 to 0: expected different"),
        ({"t2d": np.ones(2048, bool)}, {}, "t2d marks 2048 token ids, which are not the 64"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(folder, tmp_path, tensors, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(copied(folder, tmp_path / "head", tensors, **changes))


def test_folders_without_a_readable_head_are_refused(folder, tmp_path):
    path = copied(folder, tmp_path / "pickle")
    (path / "a.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle, which mpjax doesn't"):
        load(path)
    with pytest.raises(CheckpointError, match="does not exist: expected a checkpoint folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"drafter is 5: expected .*, the folder of an EAGLE-3"):
        load(5)
    with pytest.raises(ValueError, match="is not empty: choose another folder"):
        write_drafter(load(folder).model, folder)


def test_a_head_is_read_as_it_was_trained_if_the_model_has_a_rotary_scaling(tmp_path):
    scaling = RopeScaling("llama3", 8.0, original_context=64)
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    model = small_model(with_usual_eagle(config, config.vocab_size))
    ids = jnp.arange(config.vocab_size, dtype=jnp.int32)
    model.put_array(tokens_place(model.config), ids)
    write_drafter(model, tmp_path / "head")
    read = add_drafter(model.without_drafts(), tmp_path / "head")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, 40)))
    hidden = jax.random.normal(jax.random.key(0), (1, 40, config.hidden_size))
    found, expected = (each.draft_whole(tokens, hidden)[0] for each in (read, model))
    np.testing.assert_array_equal(found, expected)
