"""Rows that are divided among copies of a model, each of which is divided among devices.

It needs a process of its own with several devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.rows_on_devices`
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.kernels import quantize
from mpjax.models import Packed
from mpjax.models.sharded import ShardedDecoder
from tests.models.sharded_decoders import divide
from tests.models.small import small_config, small_model

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)

EXPLICIT = (jax.sharding.AxisType.Explicit,) * 2
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 10,
    "kv_format": "KV8",
    "sampling": {"temperature": 0.9, "top_p": 0.9, "stop_ids": (3, 4, 5, 6, 7)},
}


def reward(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """How many tokens of a row are even, float32 [rows]."""
    is_new = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return (is_new & (tokens % 2 == 0)).sum(-1, dtype=jnp.float32)


def rollout(model: Any, tokens: Any, lengths: Any, seeds: Any) -> tuple[jax.Array, ...]:
    """New tokens with their log-probabilities, and each row's reward less the mean of all rows."""
    made = mpjax.generate_tokens(model, tokens, lengths, seeds=seeds, **OPTIONS)
    found = reward(made.tokens, made.lengths)
    return made.tokens, made.lengths, made.logprobs, found


def advantages(rollout: Any, *arguments: Any) -> tuple[Any, jax.Array]:
    """What a rollout returns, and the rewards less their mean over all rows, in one program."""
    found = rollout(*arguments)
    return found, found[-1] - found[-1].mean()


if __name__ == "__main__":
    whole = small_model(small_config((None,)))
    for place in whole.linear_places(whole.config):
        for linear in place.parts(whole):
            linear.kernel = Packed(quantize(linear.kernel.get_value(), "uint4:g32"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(8, whole.config.vocab_size, (8, 6)).astype(np.int32)
    arguments = tokens, rng.integers(2, 7, 8).astype(np.int32), np.arange(8, dtype=np.uint32)
    (expected, gains) = jax.jit(functools.partial(advantages, rollout))(whole, *arguments)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    model = divide(whole, 2).replicated(mesh)
    assert isinstance(model, ShardedDecoder)
    assert model.shards == 2
    rows = P("data")
    each = jax.shard_map(
        rollout,
        mesh=mesh,
        in_specs=(P(), rows, rows, rows),
        out_specs=rows,
        axis_names={"data"},
        check_vma=False,
    )
    run = jax.jit(functools.partial(advantages, each))
    found, own_gains = run(model, *arguments)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[2], expected[2], atol=1e-4)
    np.testing.assert_array_equal(own_gains, gains)
    assert found[0].sharding.spec == rows
    assert len(set(np.asarray(expected[1]).tolist())) > 2  # rows end at different steps
    for other, message in (
        (jax.sharding.Mesh(mesh.devices.T, mesh.axis_names[::-1]), None),
        (jax.sharding.Mesh(mesh.devices[:1].reshape(2), ("data",)), "'model' of 2 devices"),
        (jax.sharding.Mesh(mesh.devices.reshape(1, 4), mesh.axis_names), "'model' of 2 devices"),
        (jax.make_mesh((2, 2), mesh.axis_names, EXPLICIT, devices=jax.devices()[:4]), "axis_types"),
    ):
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            model.replicated(other)
    text = run.lower(model, *arguments).compile().as_text()
    assert "replica_groups={{0,1},{2,3}}" in text or "replica_groups=[2,2]<=[4]" in text
    assert "replica_groups={{0,1,2,3}}" not in text.replace("f32[] all-reduce", "")
    print("rows")
