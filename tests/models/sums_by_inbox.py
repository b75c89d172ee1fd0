"""The sums of a divided decoder's step on two H200s: lowered, in a process with several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.kernels import device
from mpjax.kernels.plans import Plan
from mpjax.kernels.sums.plans import forced
from mpjax.models import Decoder
from mpjax.models.sharded import ShardedDecoder
from tests.models.sharded_decoders import divide
from tests.models.small import small_config, small_model

H200 = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")
MESH = jax.sharding.AbstractMesh((2,), ("model",), abstract_device=H200)


def described(tree: Any) -> Any:
    """Shapes of arrays that the H200s divide as the devices here do."""

    def shape(array: jax.Array) -> jax.ShapeDtypeStruct:
        found = array.sharding
        spec = found.spec if isinstance(found, NamedSharding) else PartitionSpec()
        sharding = NamedSharding(MESH, spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)


def lowered(decoder: Decoder, function: Any, *arguments: Any) -> str:
    graph, state = nnx.split(decoder)
    model = nnx.merge(graph, described(state))
    model.mesh = MESH
    with device.described_as("NVIDIA H200"), jax.sharding.use_abstract_mesh(MESH):
        traced = jax.jit(lambda *each: function(*each)).trace(model, *map(described, arguments))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def require_sums(decoder: ShardedDecoder) -> None:
    cache = decoder.create_cache(1, 32, "KV16", 16)
    given = jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), cache

    def step(model, *given):
        return model.step(*given)

    assert "all_reduce" in lowered(decoder, step, *given), "the plan by default"
    with forced(Plan("mosaic")):
        found = lowered(decoder, step, *given)
        alone = lowered(decoder, lambda model, tokens: model.embed(tokens), given[0])
    assert found.count("stablehlo.all_gather") == 1, "of the addresses: one inbox for the step"
    assert "sum_over_devices" in found
    assert "all_reduce" not in found
    assert "all_reduce" in alone, "without a cache, a gradient may be needed"
    assert "mosaic_gpu" not in alone


if __name__ == "__main__":
    sizes = {"hidden_size": 128, "head_dim": 64}
    model = small_model(small_config((None, None), dtype=jnp.bfloat16, **sizes))
    require_sums(divide(model, 2))
    print("sums by inbox")
