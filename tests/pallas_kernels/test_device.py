"""The device, and the choice of an implementation."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from mpjax.kernels import UnsupportedError, add_rms_norm, device
from mpjax.kernels.implementation import choose, warn, warn_of_reference


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


@pytest.mark.parametrize("capability", [8.0, 8.6, 9.0, 12.0])
def test_with_a_gpu_since_ampere(capability):
    with device.described_as("some GPU", compute_capability=capability, multiprocessors=78):
        assert device.why_triton_cannot_run() is None
        assert (device.compute_capability(), device.multiprocessors()) == (capability, 78)
        assert device.limits() == device.Limits(78, capability, "some GPU")


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


CHOICES = ("triton", "xla", "reference")


def no_reason(name: str) -> str | None:
    assert name != "reference", "it always can run"
    return None


def not_triton(name: str) -> str | None:
    return "there is no GPU" if name == "triton" else None


@pytest.mark.parametrize(
    ("wanted", "default", "why_not", "expected"),
    [
        (None, "triton", no_reason, "triton"),
        (None, "reference", no_reason, "reference"),
        ("xla", "triton", not_triton, "xla"),
        ("reference", "triton", no_reason, "reference"),
        (None, "triton", not_triton, "reference"),
        (None, "xla", not_triton, "xla"),
    ],
)
def test_what_is_wanted_runs_or_else_the_default_or_the_reference(
    wanted, default, why_not, expected
):
    assert choose("sum", wanted, default, CHOICES, why_not) == expected


def test_what_cannot_run_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match=r"^sum: 'triton' can't run: there is no GPU$"):
        choose("sum", "triton", "xla", CHOICES, not_triton)
    message = "^sum: unknown implementation 'cuda': expected triton, xla or reference$"
    with pytest.raises(ValueError, match=message):
        choose("sum", "cuda", "xla", CHOICES, not_triton)


def test_a_slow_reference_is_said_on_a_gpu_alone(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose("sum", None, "triton", CHOICES, not_triton)
        warn_of_reference("sum", "a CPU has no other way")
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    message = "^sum runs as plain JAX on this GPU, which is slow: there is no GPU$"
    with pytest.warns(UserWarning, match=message):
        choose("sum", None, "triton", CHOICES, not_triton)


def test_warnings_are_about_the_callers_line(pretend_gpu):
    """Also where JAX's own functions stand between it and what warns."""
    terms, weight = jnp.ones((1, 3, 64)), jnp.ones(64)
    norm = jax.jit(lambda terms: add_rms_norm(terms, None, weight, 1e-6)[1])
    for call in (
        lambda: warn("plain JAX"),
        lambda: add_rms_norm(terms, None, weight, 1e-6),
        lambda: norm(terms),
    ):
        with pytest.warns(UserWarning, match="plain JAX") as seen:
            call()
        line = (norm.__wrapped__ if "norm" in call.__code__.co_freevars else call).__code__  # type: ignore[attr-defined]
        assert [(seen[0].filename, seen[0].lineno)] == [(__file__, line.co_firstlineno)]
