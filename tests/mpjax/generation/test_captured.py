"""What layers compute while `generate_tokens` runs: captured, and changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.models import Addition

TOKENS, LENGTHS = np.array([[3, 5, 9, 9], [8, 2, 0, 0]]), np.array([4, 2])
CAPTURE = {"residual": [0, 1], "mlp": [0]}


@jax.jit
def run(model, steer):
    how = {"max_new_tokens": 5, "sampling": {"stop_ids": ()}, "capture": CAPTURE, "steer": steer}
    return mpjax.generate_tokens(model, TOKENS, LENGTHS, **how)


def test_all_tokens_are_captured_and_steered_as_in_one_pass(tiny):
    model = tiny.model
    vector = 3 * jnp.cos(jnp.arange(float(tiny.config.hidden_size)))
    steer = Addition(vector.astype(tiny.config.dtype), layers=(0,), begin=jnp.int32(3))
    plain, found = run(model, Addition(jnp.zeros_like(vector), layers=(0,))), run(model, steer)
    assert plain.tokens.tolist() != found.tokens.tolist()
    for row, length in enumerate(LENGTHS):
        text = np.concatenate([TOKENS[row, :length], found.tokens[row]])[None]
        logits, expected = model.inspect(text, capture=CAPTURE, steer=steer)
        said = logits[0, length - 1 : -1].argmax(-1)
        assert said.tolist() == found.tokens[row].tolist()
        read = length + 4  # the last token is drawn, and not read
        for point, layers in expected.items():
            for layer, values in layers.items():
                mine = found.captured[point][layer][row]
                assert len(mine) == TOKENS.shape[1] + 4
                wide = [np.asarray(x, np.float32) for x in (mine[:read], values[0, :read])]
                np.testing.assert_allclose(*wide, rtol=0.05, atol=0.05)
                assert not mine[read:].any()


def test_tokens_that_are_refused_at_the_end_leave_zeros(tiny):
    """A draft model that is the model itself proposes tokens behind the stop id, too."""
    prompt, length = np.array([[3, 5, 9, 9]]), np.array([4])

    def run(stop_ids=(), speculate=None):
        how = {"sampling": {"stop_ids": stop_ids}, "speculate": speculate, "capture": {"mlp": [0]}}
        return mpjax.generate_tokens(tiny.model, prompt, length, max_new_tokens=8, **how)

    stop = int(run().tokens[0, 2])
    found = run((stop,), mpjax.Draft(tiny, k=4))
    assert found.tokens.tolist() == run((stop,)).tokens.tolist()
    read = np.abs(np.asarray(found.captured["mlp"][0][0], np.float32)).max(-1) > 0
    end = 4 + int(found.lengths[0]) - 1  # the stop id is drawn, and not read
    assert read.tolist() == [True] * end + [False] * (len(read) - end)
