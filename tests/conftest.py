"""Settings and fixtures that all tests share."""

from __future__ import annotations

import functools
import gc
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

# Threads that Mosaic's interpreter blocks, at most; by default there are as many as cores.
os.environ.setdefault("NPROC", "16")
# Several test processes share one GPU: none may take most of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The command line would keep compiled programs in the folder of whoever runs the tests.
os.environ["MPJAX_COMPILATION_CACHE"] = "0"

import hypothesis
import jax
import numpy as np
import pytest

from tests import run_folder, selection, sweeps, versions

if jax.__version_info__ < (0, 11) and "XLA_FLAGS" not in os.environ:
    # The older of its two ways to emit a program compiles in half the time; 0.11 has one way.
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Hardly a program runs twice, and on a CPU most of a test's time would be LLVM's.
# JAX_DISABLE_MOST_OPTIMIZATIONS=0 tests the programs that people run.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")

# Files and processes share the programs that one of them compiled, small ones too, until the end of
# the run: the first process makes a folder, and those that it starts inherit its name.
if jax.default_backend() == "cpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _folder = str(run_folder.make())
    for _name, _value in {
        "jax_compilation_cache_dir": _folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        os.environ[_name.upper()] = str(_value)
        jax.config.update(_name, _value)

# The same examples in every run, and no deadline: the first example of a test pays for compilation.
hypothesis.settings.register_profile("mpjax", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("mpjax")


@functools.cache
def _why_no_gpu_tests() -> str | None:
    """The reason why this machine can't run GPU tests, or None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"needs a CUDA GPU, and JAX's default device is {device.platform!r}"
    if float(device.compute_capability) < 8.0:
        return f"needs compute capability 8.0, and this GPU's is {device.compute_capability}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu`, with the reason, where they can't run."""
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu_tests()):
        pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--shard 1/4`, which runs a quarter of the files."""
    parser.addoption("--shard", metavar="NUMBER/COUNT", help="run one of COUNT parts of the files")


def _is_sampled(item: pytest.Item) -> bool:
    """Whether the mark `one_of` counts this case: not in the sweep already, and not for a GPU."""
    others = any(map(item.get_closest_marker, ("sweep", "gpu")))
    return not others and item.get_closest_marker("one_of") is not None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Forgets a module that skips itself, so that a module that imports from it is skipped, too."""
    report = yield
    if report.skipped and isinstance(collector, pytest.Module):
        place = collector.path.relative_to(collector.config.rootpath).with_suffix("")
        sys.modules.pop(".".join(place.parts), None)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests of any version and the rest of samples, and leaves out what isn't asked for."""
    for item in items:
        if versions.is_any_version(item.location[0]):
            item.add_marker(pytest.mark.any_version)
    samples = [item for item in items if _is_sampled(item)]
    counts = [item.get_closest_marker("one_of").args[0] for item in samples]
    for index in sweeps.sampled([item.nodeid for item in samples], counts):
        samples[index].add_marker(pytest.mark.sweep)
    for mark in sweeps.LEFT_OUT:
        if not sweeps.is_asked_for(config, mark):
            left_out = [item for item in items if item.get_closest_marker(mark)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    if shard := config.getoption("shard"):
        try:
            chosen = selection.in_shard([item.location[0] for item in items], shard)
        except ValueError as error:
            raise pytest.UsageError(f"--shard: {error}") from error
        pairs = list(zip(items, chosen, strict=True))
        config.hook.pytest_deselected(items=[item for item, is_in in pairs if not is_in])
        items[:] = [item for item, is_in in pairs if is_in]
    cases = [item for item in items if not item.get_closest_marker("gpu")]  # which may be skipped
    for index in versions.repeated([item.nodeid for item in cases]):
        cases[index].add_marker(pytest.mark.any_version)


def pytest_collection_finish() -> None:
    """Saves most of the garbage collector's work, a twentieth of the time of tests that trace.

    What is imported and collected stays until the end, and traces are many small live objects.
    """
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_file() -> Iterator[None]:
    """Frees the programs that a file compiled, after its last test.

    Each takes a few memory mappings, of which Linux gives a process 65,530 (`vm.max_map_count`);
    XLA's compiler crashes where there are no more. All files together make 86,000.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A random generator whose seed depends on the test's name alone."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


class TraceCounter:
    """Wraps a function and counts its calls: under `jax.jit` these are the times it is traced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


@pytest.fixture
def trace_counter() -> type[TraceCounter]:
    """`f = trace_counter(f)`, then `jax.jit(f)(...)`: `f.count` says how often f was traced."""
    return TraceCounter


@pytest.fixture
def lower_for_cuda() -> Callable[..., str]:
    """`lower_for_cuda(f, *arguments)` lowers a jitted f to StableHLO for an H200; needs no GPU.

    A Pallas-Triton kernel in it goes as far as Triton IR. JAX 0.12 refuses to lower such a kernel
    unless it knows the device, hence the abstract mesh. Arguments may be ShapeDtypeStructs.
    """

    def lower(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
        device = jax.sharding.AbstractDevice(
            device_kind="NVIDIA H200", num_cores=None, platform="gpu"
        )
        mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(function).trace(*arguments, **keywords)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower
