"""The one module that knows Pallas-Triton.

Kernels reach the backend through the names below, so that replacing it is a change to this
file and to the launchers, not to the kernel mathematics. JAX deprecated the backend in 0.11 and
still ships it in 0.12; its warning is silenced here, where it is caused, and nowhere else.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

MINIMUM_COMPUTE_CAPABILITY = 8.0  # cp.async, bf16 tensor cores and lop3 arrived with Ampere

dot = plgpu.dot
load = plgpu.load
store = plgpu.store


class UnsupportedError(ValueError):
    """An implementation was asked for something that it cannot do; the message says what."""


def warn_of_reference(operation: str, reason: str) -> None:
    """Says, on a GPU, that an operation runs as plain JAX there, and why."""
    if on_gpu():
        warnings.warn(
            f"{operation} runs as plain JAX on this GPU, which is slow: {reason}", stacklevel=3
        )


def on_gpu() -> bool:
    """Whether arrays live on a CUDA GPU by default."""
    return jax.default_backend() in ("gpu", "cuda")


@functools.cache
def compute_capability() -> float | None:
    """Compute capability of the first CUDA device, or None where there is no GPU."""
    if not on_gpu():
        return None
    return float(jax.devices()[0].compute_capability)


@functools.cache
def multiprocessors() -> int:
    """Streaming multiprocessors of the first GPU (132, an H200's, where there is no GPU)."""
    return int(jax.devices()[0].core_count) if on_gpu() else 132


def why_triton_cannot_run() -> str | None:
    """The reason why Triton kernels can't run on the default device, or None if they can."""
    capability = compute_capability()
    if capability is None:
        return f"the default device is {jax.default_backend()!r}, and Triton needs a CUDA GPU"
    if capability < MINIMUM_COMPUTE_CAPABILITY:
        return f"compute capability {capability} is below {MINIMUM_COMPUTE_CAPABILITY}"
    return None


def load_masked(ref: Any, mask: jax.Array | None) -> jax.Array:
    """Loads a tile whose leading rows are limited by `mask`; what is masked out reads as zero.

    Without a mask the load has none at all, which lets the compiler use its widest copies.
    """
    if mask is None:
        return load(ref)
    mask = mask.reshape(-1, *[1] * (len(ref.shape) - 1))
    return load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=0)


def pallas_call(
    kernel: Callable[..., None],
    *arguments: jax.Array,
    out_shape: Any,
    grid: tuple[int, ...],
    name: str,
    warps: int,
    stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Launches a kernel over whole arrays in global memory.

    The kernel gets one reference per argument and per output and does its own indexing.
    `aliases` maps an argument to the output that takes over its buffer. With `interpret`, the
    kernel runs as plain JAX on any device.
    """
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arguments)


def inline_ptx(assembly: str, *arguments: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Applies PTX to pairs of neighbouring 16-bit elements, a pair in each 32-bit register."""
    constraints = ",".join(["=r"] + ["r"] * len(arguments))
    [result] = plgpu.elementwise_inline_asm(
        assembly,
        args=arguments,
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, dtype)],
    )
    return result


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """float32 division, correctly rounded inside a kernel, where Triton's own is approximate."""
    [result] = plgpu.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[numerator, denominator],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(numerator.shape, jnp.float32)],
    )
    return result
