from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpjax.cli import compilation
from mpjax.cli.application import app

NAMES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """An environment without settings of a cache, whose changes end with the test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(compilation.VARIABLE, "1")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


def test_compiled_programs_are_kept_in_the_folder_of_caches(tmp_path, monkeypatch):
    compilation.keep_programs()
    folder = tmp_path / "mpjax" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [os.environ[name] for name in NAMES] == [str(folder), "0"]
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/her")
    assert compilation.cache_folder() == Path("/home/her/.cache/mpjax/compiled")


@pytest.mark.parametrize(
    ("arguments", "variable", "kept"),
    [
        (["env"], "1", True),
        (["env"], "", True),
        (["env"], "0", False),
        (["--no-compilation-cache", "env"], "1", False),
        (["--compilation-cache", "env"], "0", True),
        (["bench", "gemm", "--rows", "x"], "1", True),
        (["tune", "--rows", "x", "--shapes", "256x64"], "1", False),
        (["generate", "--help"], "1", False),
        (["--help"], "1", False),
    ],
)
def test_commands_have_a_switch(arguments, variable, kept, monkeypatch, tmp_path):
    monkeypatch.setenv(compilation.VARIABLE, variable)
    monkeypatch.setattr("mpjax.environment.report", lambda: "")
    CliRunner().invoke(app, arguments)
    assert (NAMES[0] in os.environ) == kept
    assert bool(list(tmp_path.iterdir())) == kept


def test_the_next_process_compiles_nothing_and_mends_what_is_damaged(tmp_path):
    """JAX reads what was kept, and warns of damage in the words that `CacheWarnings` waits for."""
    program = """
from mpjax.cli import compilation, output
output.prepare_streams()
compilation.keep_programs()
import jax
seen = []
jax.monitoring.register_event_listener(lambda event, **rest: seen.append(event))
jax.jit(lambda x: x * 3 + 1)(2.0)
print(sum(event == "/jax/compilation_cache/cache_hits" for event in seen))
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}

    def process():
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    assert process() == ("0\n", "")
    assert process() == ("1\n", "")
    kept = list((tmp_path / "mpjax" / "compiled").glob("*-cache"))
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:50])
    hits, told = process()
    assert hits == "0\n"
    assert "were damaged and are compiled again" in told
    assert process() == ("1\n", "")


def test_a_folder_that_can_not_be_written_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    compilation.keep_programs()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    compilation.keep_programs()
    assert NAMES[0] not in os.environ
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("mpjax: compiled programs are not kept (")
    assert "allows no changes by this user" in second
    assert second.endswith("JAX_COMPILATION_CACHE_DIR, or set MPJAX_COMPILATION_CACHE=0")


def test_what_was_not_used_for_longest_goes(tmp_path):
    folder = tmp_path / "deeper"
    folder.mkdir()
    paths = [tmp_path / "a", folder / "b", tmp_path / "c", folder / "d"]
    for path in paths:
        path.write_bytes(bytes(100))
    for path, read, written in zip(paths, (9, 2, 4, 1), (1, 3, 4, 1), strict=True):
        os.utime(path, (read, written))
    compilation.prune(tmp_path, 400)
    assert all(path.exists() for path in paths)
    compilation.prune(tmp_path, 399)
    assert [path.exists() for path in paths] == [True, True, True, False]
    compilation.prune(tmp_path, 200)
    assert [path.exists() for path in paths] == [True, False, True, False]


def test_damaged_programs_are_deleted_and_told_once(tmp_path, capsys):
    names = ["jit_f-1-cache", "jit_f-2-cache", "jit_fg-1-cache", "jit_g-1-cache"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    others: list[str] = []
    troubles = compilation.CacheWarnings(
        tmp_path, lambda message, *rest: others.append(str(message))
    )
    entry = "persistent compilation cache entry for"
    troubles.show(UserWarning(f"Error reading {entry} 'jit_f': error: truncated"), UserWarning)
    troubles.show(UserWarning(f"Error reading {entry} 'jit_g': error: truncated"), UserWarning)
    troubles.show(UserWarning(f"Error writing {entry} 'jit_h': OSError: full"), UserWarning)
    troubles.show(UserWarning("runs as plain JAX"), UserWarning)
    assert [path.name for path in tmp_path.iterdir()] == ["jit_fg-1-cache"]
    assert capsys.readouterr().err == (
        f"mpjax: compiled programs in {tmp_path} were damaged and are compiled again "
        "(error: truncated)\n"
        f"mpjax: compiled programs in {tmp_path} can't be kept (OSError: full)\n"
    )
    assert others == ["runs as plain JAX"]
