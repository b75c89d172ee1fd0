"""Compiles representative calls to machine code for a GPU that need not be there.

JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m benchmarks.compiled --gpu "NVIDIA GeForce RTX 3090"

Needs JAX's CUDA plugin and `ptxas`, which the extras `cuda12` and `cuda13` install; without a
driver, the variable lets the plugin load. The result has a row for each kind of calls: the kernels
that they launch, the most shared memory, registers and spilled bytes of them, and what failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

from benchmarks.gpus import GPUS, described, mesh_of
from benchmarks.representative_calls import Call, calls
from mpjax.bench import measure
from mpjax.kernels import UnsupportedError
from mpjax.kernels.plans.tables import VARIABLE

# With these, XLA writes ptxas' report about its kernels to stderr; Mosaic GPU writes files.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "subprocess_compilation=3",
    "XLA_FLAGS": "--xla_gpu_enable_libnvjitlink=false",
}
LAUNCH = re.compile(r"(\w+) grid: \[.*?\] threads: \[(\d+).*?shared_memory: (\d+) bytes")
ASSEMBLED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL
)
SERIALIZED = re.compile(r"C751[12].*? function '(\w+)'")


class Kernel(NamedTuple):
    """A compiled kernel. shared, spilled: bytes. registers: per thread.

    is_serialized: whether ptxas serialised the wgmma instructions for lack of registers.
    """

    name: str
    threads: int
    shared: int
    registers: int
    spilled: int
    is_serialized: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and writes the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", choices=GPUS, required=True, help="its name in JAX")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the calls alone whose names have TEXT in them"
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="of these, the first of each N alone"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the result")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    chosen = [(name, make) for name, make in calls() if options.only in name][:: options.every]
    if not chosen:
        parser.error(f"no call's name has {options.only!r} in it")
    rows = rows_of(options.gpu, chosen)
    name = f"compiled-{re.sub('[^a-z0-9]+', '-', options.gpu.lower())}"
    result = {**measure.stamp(), "device": options.gpu, "results": rows}
    print(measure.save(name, result, options.output))


def rows_of(gpu: str, chosen: Sequence[tuple[str, Callable[[], Call]]]) -> list[dict[str, Any]]:
    """A row for each kind of calls: the first two words of a call's name."""
    rows: dict[str, dict[str, Any]] = collections.defaultdict(_empty_row)
    mesh = mesh_of(gpu)
    for name, make in chosen:
        kind = " ".join(name.split()[:2])
        row = rows[kind] | {"gpu": gpu, "calls": kind, "count": rows[kind]["count"] + 1}
        try:
            kernels = compiled(gpu, mesh, make)
        except UnsupportedError as error:
            row["refused"] = {**row["refused"], name: str(error)}
        except jax.errors.JaxRuntimeError as error:
            row["failed"] = {**row["failed"], name: str(error).splitlines()[0]}
        else:
            row["kernels"] = sorted({*row["kernels"], *(kernel.name for kernel in kernels)})
            for field in ("shared", "registers", "spilled"):
                row[field] = max([row[field], *(getattr(kernel, field) for kernel in kernels)])
            spilled = {kernel.name: kernel.spilled for kernel in kernels if kernel.spilled}
            if spilled:
                row["spilling"] = {**row["spilling"], name: spilled}
            if serialized := [kernel.name for kernel in kernels if kernel.is_serialized]:
                row["serialized"] = {**row["serialized"], name: serialized}
        rows[kind] = row
    return list(rows.values())


def _empty_row() -> dict[str, Any]:
    lists: dict[str, Any] = {"kernels": [], "refused": {}, "failed": {}}
    return {
        **lists,
        "spilling": {},
        "serialized": {},
        "count": 0,
        "shared": 0,
        "registers": 0,
        "spilled": 0,
    }


def compiled(gpu: str, mesh: jax.sharding.Mesh, make: Callable[[], Call]) -> list[Kernel]:
    """The kernels that a call launches, both mpjax's and XLA's.

    Raises UnsupportedError for a call that the GPU doesn't support, and JaxRuntimeError for a
    kernel that doesn't fit.
    """
    function, arguments = make()
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", {VARIABLE: folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}),
        described(gpu),
        jax.set_mesh(mesh),
        _output(Path(folder)) as log,
    ):
        program = jax.jit(lambda *arguments: function(*arguments), in_shardings=sharding)
        program.lower(*arguments).compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return list(kernels(Path(folder), log))


def kernels(folder: Path, log: Path) -> Iterator[Kernel]:
    """The kernels of one compilation, from XLA's list of launches and ptxas' output."""
    [listed] = folder.glob("*.thunk_sequence.txt")
    launches = {
        name: (int(threads), int(shared))
        for name, threads, shared in LAUNCH.findall(listed.read_text())
    }
    text = log.read_text(errors="replace")
    serialized = set(SERIALIZED.findall(text))
    for name, spilled, registers in ASSEMBLED.findall(text):
        threads, shared = launches.get(name, (0, 0))
        yield Kernel(name, threads, shared, int(registers), int(spilled), name in serialized)


@contextlib.contextmanager
def _output(folder: Path) -> Iterator[Path]:
    """Redirects stdout and stderr, also of C++ libraries, to a file during the context."""
    path = folder / "output"
    kept = [os.dup(number) for number in (1, 2)]
    with path.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield path
        finally:
            for number, copy in enumerate(kept, 1):
                os.dup2(copy, number)
                os.close(copy)


if __name__ == "__main__":
    main()
