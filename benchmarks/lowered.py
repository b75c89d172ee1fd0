"""Writes what representative calls are lowered to for a GPU, as text; there need be no GPU.

python -m benchmarks.lowered OUT

Two checkouts whose folders OUT are the same for `diff -r` have the same kernels, and the same
programs around them. Each call has a file: its StableHLO, then the module of each kernel, which is
Triton's IR or Mosaic GPU's, without source locations.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from benchmarks.gpus import GPUS, described
from benchmarks.representative_calls import Call, calls
from mpjax.kernels import UnsupportedError
from mpjax.kernels.plans.tables import VARIABLE


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and writes the files."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lowered",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder, made where it is missing")
    parser.add_argument(
        "--gpu", choices=GPUS, default="NVIDIA H200", help="its name; by default %(default)s"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the calls alone whose names have TEXT in them"
    )
    options = parser.parse_args(arguments)
    chosen = [(name, make) for name, make in calls() if options.only in name]
    if not chosen:
        parser.error(f"no call's name has {options.only!r} in it")
    write(options.out, options.gpu, chosen)
    print(f"{len(chosen)} files in {options.out}")


def write(out: Path, gpu: str, chosen: Sequence[tuple[str, Callable[[], Call]]]) -> None:
    """Writes a file for each call, with the kernels that the shipped plans choose for a GPU.

    The file of a call that the GPU doesn't support has the reason.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict("os.environ", {VARIABLE: empty}):
        for name, make in chosen:
            file = out / (re.sub(r"[^\w.-]+", "_", name) + ".txt")
            try:
                file.write_text(printed(lower(gpu, *make())))
            except UnsupportedError as error:
                file.write_text(f"{error}\n")


def lower(gpu: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """StableHLO of a call for one of GPUS; it contains the kernels' modules as byte strings."""
    with described(gpu):
        # The wrapper gives all calls the same name in their StableHLO.
        traced = jax.jit(lambda *arguments: function(*arguments)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def printed(text: str) -> str:
    """StableHLO with numbered kernels, followed by the module of each kernel."""
    modules: list[str] = []

    def take(match: re.Match[str]) -> str:
        modules.append(_disassembled(_unescaped(match[2])))
        return f"{match[1]} = KERNEL{len(modules)}"

    text = re.sub(r'\b(ir|module) = "((?:[^"\\]|\\.)*)"', take, text)
    # Mosaic's hash of a module depends on source locations.
    text = re.sub(r'kernel_hash = "(?:[^"\\]|\\.)*"', "kernel_hash = _", text)
    return "\n=====\n".join([text, *modules])


def _unescaped(text: str) -> bytes:
    r"""The bytes of an MLIR string literal with the escapes \\, \" and \XX (hexadecimal)."""

    def byte(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return code if code in (b"\\", b'"') else bytes.fromhex(code.decode())

    return re.sub(rb'\\(\\|"|[0-9A-Fa-f]{2})', byte, text.encode())


def _disassembled(module: bytes) -> str:
    """The text, without locations, of a module given as bytecode or text."""
    context = make_ir_context()
    context.allow_unregistered_dialects = True
    dialect.register_dialect(context)
    with context:
        return str(ir.Module.parse(module).operation.get_asm(enable_debug_info=False))


if __name__ == "__main__":
    main()
