from __future__ import annotations

import dataclasses

import jax

from mpjax.engine.state import cache_bytes, create_state
from mpjax.kernels import KVFormat


def test_a_state_is_a_pytree_without_shared_buffers(tiny):
    lm = dataclasses.replace(tiny, kv_format=KVFormat("4cg32"), page_size=32)
    state = create_state(lm, slots=3, pages=(5,), max_tokens=100)
    assert state.cache.tables[0].shape == (3, 4)
    assert state.cache.layers[0].keys.shape[0] == 5
    assert state.cache.layers[0].residual is not None
    assert state.cache.layers[0].residual.keys.shape[0] == 3
    double = jax.jit(lambda state: jax.tree.map(lambda x: x, state), donate_argnums=0)
    assert not double(state).running.any()


def test_the_bytes_are_those_of_the_arrays(tiny):
    lm = dataclasses.replace(tiny, kv_format=KVFormat("4cg32"), page_size=32)
    state = create_state(lm, slots=3, pages=(5,), max_tokens=100)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache.layers))
    [each], fixed = cache_bytes(lm, 3)
    assert total == 5 * each + fixed
    assert fixed
    plain = dataclasses.replace(lm, kv_format=KVFormat(16))
    assert cache_bytes(plain, 3)[1] == 0
