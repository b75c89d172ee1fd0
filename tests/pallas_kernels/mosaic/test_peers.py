from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from mpjax.kernels.mosaic import peers


def lowered_on_all(count: int, x: jax.ShapeDtypeStruct, function) -> str:
    """The text of a function of the rows of x, each on one of `count` H200s of a host."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((count,), ("model",), abstract_device=device)
    rows = PartitionSpec("model")
    run = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    sharding = jax.sharding.NamedSharding(mesh, rows)
    x = jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_that_writes_to_its_neighbour_lowers_without_multicast():
    def kernel(x_ref, out_ref, arrived):
        program = jax.lax.axis_index("program")
        here = pl.ds(program * 128, 128)
        neighbour = jax.lax.rem(jax.lax.axis_index("model") + 1, 2)
        peers.remote(out_ref, neighbour)[here] = x_ref[here]
        peers.signal(arrived.at[program], neighbour)
        peers.wait(arrived.at[program], 1)

    def send(x):
        shape = jax.ShapeDtypeStruct((256,), jnp.float32)
        [sent] = peers.launch_on_all(
            kernel, x.reshape(-1), out_shapes=(shape,), programs=2, name="send"
        )
        return sent[None]

    text = lowered_on_all(2, jax.ShapeDtypeStruct((256,), jnp.float32), send)
    assert "uses_xla_collective_metadata = true" in text
    assert "multimem" not in text
