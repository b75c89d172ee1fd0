"""The smallest kernel whose warpgroups give each other registers, for a report to JAX.

MOSAIC_GPU_DUMP_PTXAS=1 python -m benchmarks.setmaxnreg

With JAX 0.11 the assembler prints `Used 240 registers`. With JAX 0.12, which compiles by nvJitLink
where it finds that library, it prints `(C7504) Potential Performance Loss: 'setmaxnreg' ignored to
maintain compatibility across compilation units`, and `Used 10 registers`; without the library,
`ptxas` compiles it as before. It compiles for a GPU of compute capability 9.0 that need not be
there, and needs JAX's CUDA plugin (and without a driver JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.gpus import mesh_of


def kernel(x: Any, out: Any) -> None:
    """Adds one, in a warpgroup that takes over another's registers."""
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _give() -> None:
        plgpu.set_max_registers(40, action="decrease")

    @pl.when(warpgroup == 0)
    def _take() -> None:
        plgpu.set_max_registers(240, action="increase")
        out[...] = plgpu.load(x, layout=plgpu.Layout.WG_STRIDED((128,), vec_size=1)) + 1


def main() -> None:
    """Compiles the kernel."""
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    mesh = mesh_of("NVIDIA H200")
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    with jax.set_mesh(mesh):
        jax.jit(run).lower(jax.ShapeDtypeStruct((128,), jnp.float32, sharding=sharding)).compile()


if __name__ == "__main__":
    main()
