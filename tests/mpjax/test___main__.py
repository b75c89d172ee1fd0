"""The command line as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpjax
from tests.sweeps import in_sweep

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def run(*arguments, text=None, **variables):
    """Runs Python; what it reads from stdin is empty unless given."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=text or "",
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT | variables,
    )


def test_a_completion_goes_to_stdout_alone(tiny_folder, tiny):
    arguments = ["generate", "-", "--model", str(tiny_folder), "--max-new-tokens", "10"]
    done = run("-m", "mpjax", *arguments, text="def f(x):\n")
    assert done.returncode == 0
    assert done.stdout == mpjax.generate(tiny, "def f(x):", max_new_tokens=10).text[0]
    assert "tokens/s" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_needs_no_jax_and_answers_at_once():
    code = """
import sys
sys.argv = ["mpjax", "generate", "--help"]
from mpjax.cli import main
try:
    main()
except SystemExit as exit:
    loaded = {"jax", "numpy", "flax", "tokenizers"} & set(sys.modules)
    sys.exit(f"imported {loaded}" if loaded else exit.code)
"""
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: mpjax generate" in done.stdout


def test_a_failure_has_a_code_and_no_traceback(tmp_path):
    done = run("-m", "mpjax", "generate", "x", "--model", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"mpjax: {tmp_path} has neither config.json nor mpjax.json")
    assert done.stderr.count("\n") == 1


def test_text_that_the_terminal_lacks_is_replaced_and_figures_have_a_line(tiny_folder, tiny):
    prompt = "größer # Δ 中"
    limits = ["--model", str(tiny_folder), "--max-new-tokens", "10"]
    done = subprocess.run(
        [sys.executable, "-m", "mpjax", "generate", prompt, "--echo", *limits],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
    )
    text = prompt + mpjax.generate(tiny, prompt, max_new_tokens=10).text[0]
    expected = text.encode("ascii", "replace").rstrip(b"\n")
    assert done.returncode == 0
    assert done.stdout.startswith(expected + b"\n")
    assert re.fullmatch(rb"\d+ prompt tokens, 10 new: .*\n", done.stdout[len(expected) + 1 :])


def test_help_is_for_any_terminal():
    done = run("-m", "mpjax", "bench", "gemm", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n    ?s  " in done.stdout
    assert "\n    ? floor    the time over the floor" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], in_sweep(["--version"]), in_sweep(["bench", "gemm", "--help"])]
)
def test_a_reader_that_leaves_help_is_no_failure(arguments):
    assert leave(arguments) == (141, "")


def test_a_reader_that_leaves_is_no_failure(tiny_folder):
    arguments = ["generate", "x", "--model", str(tiny_folder), "--max-new-tokens", "10"]
    assert leave(arguments) == (141, "")


def leave(arguments):
    """The exit code and stderr of `mpjax` whose stdout nobody reads."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mpjax", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        message = process.stderr.read()
    return process.wait(), message
