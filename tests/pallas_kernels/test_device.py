from __future__ import annotations

import jax
import pytest

from mpjax.kernels import device


def test_without_a_gpu():
    with device.described_as("cpu", compute_capability=None):
        assert not device.on_gpu()
        assert (device.platform(), device.kind(), device.compute_capability()) == (
            *("cpu", "cpu"),
            None,
        )
        assert device.why_triton_cannot_run() == (
            "the default device is 'cpu', and kernels need a CUDA GPU"
        )


def test_with_an_old_gpu():
    with device.described_as("NVIDIA T4", compute_capability=7.5):
        assert device.on_gpu()
        assert device.why_triton_cannot_run() == "compute capability 7.5 is below 8.0"


@pytest.mark.parametrize("capability", [8.0, 8.6, 9.0, 12.0])
def test_with_a_gpu_since_ampere(capability):
    with device.described_as("some GPU", compute_capability=capability, multiprocessors=78):
        assert device.why_triton_cannot_run() is None
        assert (device.compute_capability(), device.multiprocessors()) == (capability, 78)
        assert device.limits() == device.Limits(78, capability, "some GPU")


@pytest.mark.parametrize(("capability", "kibibytes"), [(8.0, 163), (8.6, 99), (9.0, 227), (12, 99)])
def test_shared_memory_is_that_of_the_compute_capability(capability, kibibytes):
    assert device.Limits(1, capability).shared_memory == 1024 * kibibytes


@pytest.mark.parametrize(("capability", "has_float8"), [(8.6, False), (8.9, True), (9.0, True)])
def test_float8_came_with_ada(capability, has_float8):
    with device.described_as(compute_capability=capability):
        assert (device.why_not_float8() is None) == has_float8
    assert (device.why_not_float8(capability) is None) == has_float8


def test_eight_bit_arrays_that_offsets_cannot_count():
    assert device.why_too_large(2**31 - 1) is None
    assert "2147483648 elements" in str(device.why_too_large(2**31))


def test_a_description_ends_with_its_block():
    def fail():
        with device.described_as("inner"):
            assert device.kind() == "inner"
            raise RuntimeError

    before = device.kind()
    with device.described_as("outer"):
        with pytest.raises(RuntimeError):
            fail()
        assert device.kind() == "outer"
    assert device.kind() == before


def test_what_a_tool_pretends_stays():
    with device.described_as():
        device.pretend("NVIDIA A100", compute_capability=8.0, multiprocessors=108)
        assert device.kind() == "NVIDIA A100"
        assert device.limits() == device.Limits(108, 8.0, "NVIDIA A100")


def test_default_device():
    """The device is asked for at every call: a program may put a model on the CPU beside a GPU."""
    cpu = jax.devices("cpu")[0]
    for chosen in (cpu, "cpu"):
        with jax.default_device(chosen):
            assert device.default_device() == cpu
            assert (device.kind(), device.platform()) == (cpu.device_kind, "cpu")
            assert not device.on_gpu()
            assert device.compute_capability() is None
            assert device.limits() == device.Limits(132, 9.0, cpu.device_kind)


@pytest.mark.gpu
def test_this_gpu():
    assert device.on_gpu()
    assert device.multiprocessors() > 0
    assert (device.compute_capability() or 0) > 5


def test_unsupported_is_a_value_error():
    assert issubclass(device.UnsupportedError, ValueError)
