from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.quantization.learning.teacher import Teacher, ends_of, token_losses
from mpjax.quantization.text import Windows

pytestmark = pytest.mark.any_version


@pytest.fixture
def batches(rng):
    tokens = rng.integers(0, 2048, (2, 2, 16)).astype(np.int32)
    return [Windows(part, np.ones(part.shape, bool)) for part in tokens]


def test_a_model_and_its_folder_teach_the_same(tiny, tiny_folder, batches):
    found = Teacher.of(tiny, batches, "float32")
    streamed = Teacher.of(tiny_folder, batches, "float32")
    assert len(found.ends.layers) == 0
    assert len(tiny.model.layers) == tiny.config.num_layers  # as it was
    for batch, *states in zip(batches, found.states, streamed.states, strict=True):
        np.testing.assert_array_equal(*states)
        logits = found.ends.logits(jnp.asarray(states[0]))
        np.testing.assert_allclose(logits, tiny.model(batch.tokens), rtol=1e-3, atol=1e-3)


def test_losses_are_those_of_the_definitions(tiny, rng, batches):
    ends = ends_of(tiny.model)
    states, goal = jnp.asarray(rng.standard_normal((2, 2, 16, 128)), jnp.float32)
    logs = [np.asarray(jax.nn.log_softmax(ends.logits(x)), np.float64) for x in (states, goal)]
    divergences = (np.exp(logs[1]) * (logs[1] - logs[0])).sum(-1)
    np.testing.assert_allclose(
        token_losses(ends, states, ends, goal), divergences, rtol=1e-3, atol=1e-5
    )
    tokens = batches[0].tokens
    expected = -np.take_along_axis(logs[0], tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        token_losses(ends, states, None, jnp.asarray(tokens)), expected, 1e-4
    )


def test_a_divided_model_is_refused(tiny, batches, monkeypatch):
    monkeypatch.setattr(type(tiny.model), "shards", 2)
    with pytest.raises(
        ValueError, match=r"learning from a model .* among 2 devices is not possible"
    ):
        Teacher.of(tiny, batches, "float32")
