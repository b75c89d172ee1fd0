"""The default device: its kind, its limits, and reasons why kernels can't run on it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax

MINIMUM_COMPUTE_CAPABILITY = 8.0  # cp.async, bf16 tensor cores and lop3 arrived with Ampere
FLOAT8_COMPUTE_CAPABILITY = 8.9

# Most shared memory of a program, by compute capability (CUDA programming guide).
SHARED_KIBIBYTES = {8.0: 163, 8.6: 99, 8.7: 163, 8.9: 99, 9.0: 227, 10.0: 227, 10.3: 227}
LEAST_SHARED_KIBIBYTES = 99  # every GPU since Ampere has at least this


class UnsupportedError(ValueError):
    """A forced implementation can't run; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The properties of a GPU that plans depend on.

    kind: the GPU's name in JAX, by which measured plans are looked up; None to use only the rule.
    """

    multiprocessors: int
    compute_capability: float
    kind: str | None = None

    @property
    def shared_memory(self) -> int:
        """The most bytes of shared memory of a program."""
        return shared_memory(self.compute_capability)


@dataclasses.dataclass(frozen=True)
class Description:
    """The device for which kernels are chosen; compute_capability None means that it is no GPU."""

    kind: str
    compute_capability: float | None
    multiprocessors: int

    @property
    def platform(self) -> str:
        """The platform's name in JAX, `cpu` or `gpu`."""
        return "cpu" if self.compute_capability is None else "gpu"


_description: Description | None = None  # set by `pretend`: replaces the default device


@contextlib.contextmanager
def described_as(
    kind: str = "NVIDIA H200",
    *,
    compute_capability: float | None = 9.0,
    multiprocessors: int = 132,
) -> Iterator[None]:
    """Chooses kernels as on the described device while the context is open, in this process.

    For tests and tools that lower kernels for a GPU that is not present. Arrays stay on the default
    device.

    kind: the device's name in JAX, by which tables of plans are looked up.
    compute_capability: None for a device that is not a GPU.
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
    """Chooses kernels as on the described device for the rest of the process: `described_as`."""
    global _description
    _description = Description(kind, compute_capability, multiprocessors)


def default_device() -> jax.Device:
    """The device of new arrays."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined, unused-ignore]
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def platform() -> str:
    """The platform of the default device as JAX names it, such as `gpu` or `cpu`."""
    return _description.platform if _description else default_device().platform


def kind() -> str:
    """The kind of the default device as JAX names it, such as `NVIDIA H200`."""
    return _description.kind if _description else default_device().device_kind


def on_gpu() -> bool:
    """Whether the default device is a GPU."""
    return platform() == "gpu"


def compute_capability() -> float | None:
    """The compute capability of the default device, or None if it is not a GPU."""
    if _description:
        return _description.compute_capability
    return float(default_device().compute_capability) if on_gpu() else None


def multiprocessors() -> int:
    """The number of streaming multiprocessors of the default device; 132, an H200's, on others."""
    if _description:
        return _description.multiprocessors
    return int(default_device().core_count) if on_gpu() else 132


def limits() -> Limits:
    """The limits of the default device; if it is not a GPU, an H200's except for the kind."""
    return Limits(multiprocessors(), compute_capability() or 9.0, kind())


def shared_memory(capability: float) -> int:
    """The most bytes of shared memory of a program on a GPU of compute capability `capability`."""
    return 1024 * SHARED_KIBIBYTES.get(capability, LEAST_SHARED_KIBIBYTES)


def why_triton_cannot_run() -> str | None:
    """The reason why Triton kernels can't run on the default device, or None if they can."""
    capability = compute_capability()
    if capability is None:
        return f"the default device is {platform()!r}, and kernels need a CUDA GPU"
    if capability < MINIMUM_COMPUTE_CAPABILITY:
        return f"compute capability {capability} is below {MINIMUM_COMPUTE_CAPABILITY}"
    return None


def why_no_peers() -> str | None:
    """The reason why a GPU of this process can't write to the memory of every other, or None."""
    if _description or not on_gpu() or _are_peers():
        return None
    return "not all GPUs can write to one another's memory"


@functools.cache
def _are_peers() -> bool:
    """Whether each of this process's GPUs can write to every other's memory, by CUDA's driver."""
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    handles = [ctypes.c_int() for _ in jax.local_devices()]
    for handle, gpu in zip(handles, jax.local_devices(), strict=True):
        if driver.cuDeviceGet(ctypes.byref(handle), gpu.local_hardware_id):
            return False
    return all(
        driver.cuDeviceCanAccessPeer(ctypes.byref(found), *pair) == 0 and found.value == 1
        for pair in itertools.permutations(handles, 2)
    )


def why_not_float8(capability: float | None = None) -> str | None:
    """The reason why kernels can't use FP8 values, or None if they can.

    capability: the compute capability of a GPU; the default device's unless given.
    """
    capability = capability or compute_capability()
    if capability is None or capability >= FLOAT8_COMPUTE_CAPABILITY:
        return None
    return f"FP8 came with compute capability {FLOAT8_COMPUTE_CAPABILITY}; this is {capability}"


def why_too_large(elements: int) -> str | None:
    """The reason why a kernel can't index an 8-bit array of `elements`, or None if it can.

    Offsets are signed 32-bit element indices. Pallas allows them for arrays of up to 2**32 bytes,
    which is correct only for elements of 16 bits or more.
    """
    if elements < 2**31:
        return None
    return f"{elements} elements of 8 bits are more than 2**31, which is what offsets can count"
