from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import mpjax
from mpjax.checkpoint import CheckpointError
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
    with pytest.raises(ValueError, match="names is 'flax': expected 'tunix'"):
        load(weights=weights, names="flax")
