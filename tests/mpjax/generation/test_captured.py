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
