"""The default device: what it is, and what kernels can do there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

MINIMUM_COMPUTE_CAPABILITY = 8.0  # cp.async, bf16 tensor cores and lop3 arrived with Ampere
FLOAT8_COMPUTE_CAPABILITY = 8.9

# Of shared memory that one program can have, by compute capability (CUDA programming guide).
SHARED_KIBIBYTES = {8.0: 163, 8.6: 99, 8.7: 163, 8.9: 99, 9.0: 227, 10.0: 227, 10.3: 227}
LEAST_SHARED_KIBIBYTES = 99  # of every GPU since Ampere


class UnsupportedError(ValueError):
    """An implementation was asked for something that it cannot do; the message says what."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a GPU allows a kernel: how many programs run at once, and what each can have.

    kind: as JAX names it, for which plans may have been measured; None for any such GPU.
    """

    multiprocessors: int
    compute_capability: float
    kind: str | None = None

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program can have."""
        return shared_memory(self.compute_capability)


@dataclasses.dataclass(frozen=True)
class Description:
    """What choices between kernels depend on; `compute_capability` is None where it is no GPU."""

    kind: str
    compute_capability: float | None
    multiprocessors: int

    @property
    def platform(self) -> str:
        """The name that JAX has for the kind of platform."""
        return "cpu" if self.compute_capability is None else "gpu"


_description: Description | None = None  # of the device to choose for, in place of the default one


@contextlib.contextmanager
def described_as(
    kind: str = "NVIDIA H200",
    *,
    compute_capability: float | None = 9.0,
    multiprocessors: int = 132,
) -> Iterator[None]:
    """Inside, this process chooses kernels as on another device; nothing runs there.

    For tests and tools, which lower kernels for a GPU that is not there.
    kind: as JAX names it; tables of plans are looked up by it.
    compute_capability: None for a device that is no GPU.
    """
    global _description
    before = _description
    pretend(kind, compute_capability=compute_capability, multiprocessors=multiprocessors)
    try:
        yield
    finally:
        _description = before


def pretend(
    kind: str = "NVIDIA H200",
    *,
    compute_capability: float | None = 9.0,
    multiprocessors: int = 132,
) -> None:
    """`described_as` for the rest of the process."""
    global _description
    _description = Description(kind, compute_capability, multiprocessors)


def default_device() -> jax.Device:
    """The device on which arrays are put by default."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined, unused-ignore]
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def platform() -> str:
    """The platform of the default device, `gpu` or another, as JAX names it."""
    return _description.platform if _description else default_device().platform


def kind() -> str:
    """The kind of the default device, such as `NVIDIA H200`, as JAX names it."""
    return _description.kind if _description else default_device().device_kind


def on_gpu() -> bool:
    """Whether arrays are put on a GPU by default."""
    return platform() == "gpu"


def compute_capability() -> float | None:
    """Compute capability of the default device, or None where it is no GPU."""
    if _description:
        return _description.compute_capability
    return float(default_device().compute_capability) if on_gpu() else None


def multiprocessors() -> int:
    """Streaming multiprocessors of the default device (132, an H200's, where it is no GPU)."""
    if _description:
        return _description.multiprocessors
    return int(default_device().core_count) if on_gpu() else 132


def limits() -> Limits:
    """The limits of the default device; those of an H200 where it is no GPU."""
    return Limits(multiprocessors(), compute_capability() or 9.0, kind())


def shared_memory(capability: float) -> int:
    """Bytes of shared memory that one program can have on a GPU of a compute capability."""
    return 1024 * SHARED_KIBIBYTES.get(capability, LEAST_SHARED_KIBIBYTES)


def why_triton_cannot_run() -> str | None:
    """The reason why Triton kernels can't run on the default device, or None if they can."""
    capability = compute_capability()
    if capability is None:
        return f"the default device is {platform()!r}, and kernels need a CUDA GPU"
    if capability < MINIMUM_COMPUTE_CAPABILITY:
        return f"compute capability {capability} is below {MINIMUM_COMPUTE_CAPABILITY}"
    return None


def why_not_float8(capability: float | None = None) -> str | None:
    """The reason why kernels can't hold FP8 values, or None if they can.

    capability: a GPU's; that of the default device unless given.
    """
    capability = capability or compute_capability()
    if capability is None or capability >= FLOAT8_COMPUTE_CAPABILITY:
        return None
    return f"FP8 came with compute capability {FLOAT8_COMPUTE_CAPABILITY}; this is {capability}"


def why_too_large(elements: int) -> str | None:
    """The reason why a kernel can't index an 8-bit array of so many elements, or None if it can.

    Pallas counts 32-bit signed offsets up to 2**32 bytes, which is right for wider elements alone.
    """
    if elements < 2**31:
        return None
    return f"{elements} elements of 8 bits are more than 2**31, which is what offsets can count"
