from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.checkpoint.trees import open_tree
from tests.mpjax.checkpoint.saved_models import require_same_bits
from tests.mpjax.checkpoint.test_naming import maxtext_tree, tensors

__all__ = ["tensors"]  # a fixture


@pytest.fixture(scope="module")
def weights(tensors, tmp_path_factory):
    """A checkpoint of a MaxText trainer: its weights, in one stack, and its optimizer's state."""
    path = tmp_path_factory.mktemp("checkpoint") / "items"
    params = {"params": maxtext_tree(tensors, "llama", is_stacked=True)}
    state = {"params": params, "opt_state": {"count": np.zeros(1)}, "step": np.zeros(1)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, jax.tree.map(np.ascontiguousarray, state))
        checkpointer.wait_until_finished()
    return path


def test_a_trainers_checkpoint_is_loaded_as_the_files_are(weights):
    given = {"precision": "W4A16KV8", "progress": False}
    folder = mpjax.bundled_model()
    lm = mpjax.load(folder, weights=weights, names="maxtext-llama", **given)
    require_same_bits(lm, mpjax.load(folder, **given))
    assert lm.tokenizer is not None


def test_a_tree_with_lists(tmp_path, rng):
    """Tunix keeps layers in a list; scales of bfloat16 keep their dtype."""
    layers = [{"input_layernorm": {"w": rng.normal(size=4).astype("f4")}} for _ in range(3)]
    tree = {"layers": layers, "final_norm": {"w": np.zeros(4, jax.numpy.bfloat16)}}
    with ocp.StandardCheckpointer() as checkpointer:
        state = {"params": tree, "opt_state": ({"count": np.zeros(1)}, None)}
        checkpointer.save(tmp_path / "items", state)
        checkpointer.wait_until_finished()
    found, expected = open_tree(tmp_path / "items", "tunix"), mpjax.by_file_names(tree, "tunix")
    assert found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found.read(name).dtype == tensor.dtype
        np.testing.assert_array_equal(found.read(name), tensor)


def test_a_layer_of_a_stack_is_made_alone(tmp_path):
    """Its rule's change sees one layer for each tensor that is read, not all of them."""
    seen = []

    def change(array):
        seen.append(array.shape)
        return array

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "items", {"stack": np.arange(12, dtype="f4").reshape(3, 4)})
        checkpointer.wait_until_finished()
    found = open_tree(tmp_path / "items", [mpjax.Rule("stack", "{}.norm", "lo", change)])
    seen.clear()
    np.testing.assert_array_equal(found.read("1.norm"), np.arange(4.0, 8.0))
    assert seen == [(4,)]


def test_what_can_not_be_read(weights, tmp_path):
    def load(**given):
        return mpjax.load(mpjax.bundled_model(), progress=False, **given)

    with pytest.raises(CheckpointError, match="which no rule names"):
        load(weights=weights, names="tunix")
    with pytest.raises(CheckpointError, match="can't be read as an Orbax checkpoint"):
        load(weights=tmp_path, names="tunix")
    for given in ({"weights": weights}, {"names": "tunix"}, {"weights": 3, "names": "tunix"}):
        with pytest.raises(ValueError, match="expected the folder of an Orbax checkpoint"):
            load(**given)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="a GGUF file, which has weights of its own"):
        mpjax.load(tmp_path / "model.gguf", weights=weights, names="tunix")
    with pytest.raises(ValueError, match="names is 'flax': expected 'tunix'"):
        load(weights=weights, names="flax")
