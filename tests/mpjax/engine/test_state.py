from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mpjax.engine.state import EngineState, RowSettings, page_bytes, residual_bytes
from mpjax.kernels import KVFormat


def test_a_state_is_a_pytree_without_shared_buffers(tiny):
    lm = dataclasses.replace(tiny, kv_format=KVFormat("4cg32"), page_size=32)
    state = EngineState.create(lm, slots=3, pages=5, max_tokens=100)
    assert state.tables.shape == (3, 4)
    assert state.layers[0].keys.shape[0] == 5
    assert state.layers[0].residual is not None
    assert state.layers[0].residual.keys.shape[0] == 3
    double = jax.jit(lambda state: jax.tree.map(lambda x: x, state), donate_argnums=0)
    assert not double(state).running.any()


def test_the_bytes_are_those_of_the_arrays(tiny):
    lm = dataclasses.replace(tiny, kv_format=KVFormat("4cg32"), page_size=32)
    state = EngineState.create(lm, slots=3, pages=5, max_tokens=100)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
    assert total == 5 * page_bytes(lm) + residual_bytes(lm, 3)
    plain = dataclasses.replace(lm, kv_format=KVFormat(16))
    assert residual_bytes(plain, 3) == 0


def test_usual_rows_are_greedy():
    usual = RowSettings.usual(2)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(usual)} == {2}
    assert jnp.asarray(usual.temperature).tolist() == [0, 0]
