"""Processes that get SIGINT, as Ctrl-C sends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mpjax

ROOT = Path(mpjax.__file__).resolve().parents[1]
AS_MODULE = ("-m", "mpjax")
AS_SCRIPT = ("-c", "from mpjax.cli import main; main()")  # as the installed `mpjax` does
INTERRUPT_MYSELF = """
import os, signal, time
def interrupt_myself():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""


def start(*arguments, folder=None):
    """Starts Python; modules in `folder` come before all others."""
    paths = [str(path) for path in (folder, ROOT) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def require_quiet(process):
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (130, "", "mpjax: interrupted\n")


@pytest.mark.parametrize(
    ("way", "module", "turned_into"),
    [
        (AS_MODULE, "jax", "    raise\n"),
        (AS_SCRIPT, "typer", "    raise ImportError('failed') from None\n"),  # as modules of C do
        (AS_SCRIPT, "jax", "    pass\n"),
    ],
    ids=["raised", "another error", "dropped"],
)
def test_while_a_module_is_imported(way, module, turned_into, tmp_path):
    code = f"{INTERRUPT_MYSELF}\ntry:\n    interrupt_myself()\nexcept BaseException:\n"
    (tmp_path / f"{module}.py").write_text(code + turned_into)
    require_quiet(start(*way, "info", folder=tmp_path))


def test_while_jax_is_imported():
    process = start(*AS_SCRIPT, "info")
    end = time.monotonic() + 60
    while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    require_quiet(process)


def working(body):
    """Starts `mpjax info x`, of which only `body` is left, so that JAX isn't imported."""
    lines = "\n    ".join(body.strip().splitlines())
    code = f"{INTERRUPT_MYSELF}\ndef find_folder(source):\n    {lines}\n"
    code += "import sys, types\nloading = types.SimpleNamespace(find_folder=find_folder)\n"
    code += "sys.modules['mpjax.loading'], sys.argv = loading, ['mpjax', 'info', 'x']\n"
    return start("-c", code + AS_SCRIPT[1])


def test_while_a_command_works():
    require_quiet(working("interrupt_myself()"))


def test_in_a_callback_that_drops_it():
    body = """
class Object:
    def __del__(self):
        interrupt_myself()
Object()
time.sleep(30)
"""
    require_quiet(working(body))


def test_what_else_a_callback_drops_is_shown():
    body = """
class Object:
    def __del__(self):
        raise RuntimeError("a bug")
Object()
interrupt_myself()
"""
    process = working(body)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "RuntimeError: a bug" in error
    assert error.endswith("mpjax: interrupted\n")


def test_after_the_command_has_ended():
    """Python then ends threads and calls what is registered with atexit."""
    code = f"import atexit\n{INTERRUPT_MYSELF}\natexit.register(interrupt_myself)\n"
    process = start("-c", f"{code}import sys\nsys.argv = ['mpjax', '--version']\n{AS_SCRIPT[1]}")
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "")


def test_a_terminal_gets_a_line_of_its_own_and_its_cursor_back():
    """After ^C, which it shows itself, and where a bar was shown."""
    ours, theirs = os.openpty()
    code = "from mpjax.cli import interrupts; interrupts.leave()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=theirs, env=environment, check=False, timeout=60
    )
    assert done.returncode == 130
    assert os.read(ours, 1000) == b"\x1b[?25h\r\nmpjax: interrupted\r\n"
    os.close(ours)
    os.close(theirs)
