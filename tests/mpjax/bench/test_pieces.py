from __future__ import annotations

import jax
import numpy as np
import pytest

from mpjax.bench.pieces import read_pieces, require_pieces
from tests.models.small import small_config, small_model


@pytest.mark.parametrize(("prompt", "piece"), [(6, 4), (6, 0), (6, 12)])
def test_pieces_divide_a_prompt(prompt, piece):
    require_pieces(6, 6)
    require_pieces(6, 2)
    with pytest.raises(ValueError, match=f"prompts have 6 tokens, which pieces of {piece}"):
        require_pieces(prompt, piece)


def test_pieces_give_the_next_token_of_the_whole_prompt():
    model = small_model(small_config((None,)))
    tokens = np.random.default_rng(0).integers(0, 50, (2, 6)).astype(np.int32)
    best, chances, cache = read_pieces(model, tokens, model.create_cache(2, 16, "KV16", 16), 2)
    logits = jax.nn.log_softmax(model(tokens)[:, -1])
    np.testing.assert_array_equal(best, logits.argmax(-1))
    np.testing.assert_allclose(chances, logits.max(-1), rtol=1e-3, atol=1e-3)
    assert cache.lengths.tolist() == [6, 6]
