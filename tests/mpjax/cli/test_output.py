from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from mpjax.cli import output

TEXT = "é × 中 ─ \udcff"
PROGRAM = f"""
import sys
from mpjax.cli import output
output.prepare_streams()
import rich.console, typer
assert len(sys.stdin.read()) == 1
output.write({TEXT!a} + "\\n")
typer.echo({TEXT!a})
rich.console.Console().print({TEXT!a})
typer.echo({TEXT!a}, err=True)
"""


def run(program, text=b"", **variables):
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, input=text, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("variables", "shown", "error"),
    [
        ({"PYTHONIOENCODING": "ascii"}, b"? ? ? ? ?", rb"\xe9 \xd7 \u4e2d \u2500 \udcff"),
        ({"PYTHONIOENCODING": "cp1252"}, b"\xe9 \xd7 ? ? ?", b"\xe9 \xd7 \\u4e2d \\u2500 \\udcff"),
        ({"PYTHONIOENCODING": "ascii:xmlcharrefreplace"}, b"&#233; &#215; ", b"\\xe9 \\xd7 "),
        (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            b"? ? ? ? ?",
            rb"\xe9 \xd7 \u4e2d \u2500 \udcff",
        ),
        ({"LC_ALL": "C", "PYTHONUTF8": "1"}, "é × 中 ─ ?".encode(), "é × 中 ─ \\udcff".encode()),
    ],
    ids=str,
)
def test_any_text_is_written_in_any_encoding(variables, shown, error):
    stdout, stderr = run(PROGRAM, b"\xff", **variables)
    lines = stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(shown) for line in lines)
    assert stderr.startswith(error)


def test_closed_streams_take_everything():
    program = """
import os, sys
sys.stdin = sys.stdout = sys.stderr = None
from mpjax.cli import output
output.prepare_streams()
output.write("x" + sys.stdin.read())
output.note("y")
sys.stdout.flush()
"""
    assert run(program) == (b"", b"")


def test_a_warning_is_a_line():
    program = """
from mpjax.cli import output
output.prepare_streams()
import warnings
warnings.warn("the kernel runs as plain JAX")
"""
    assert run(program) == (b"", b"mpjax: the kernel runs as plain JAX\n")


JOINED = """
import sys
from mpjax.cli import output
for text in sys.argv[1:]:
    output.write(text)
output.note("figures")
output.note("more")
"""


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "b\n"], "ab\nfigures\nmore\n"),
        (["a", ""], "a\nfigures\nmore\n"),
    ],
)
def test_lines_of_stderr_begin_at_a_line_in_a_shared_pipe(texts, expected):
    command = [sys.executable, "-c", JOINED, *texts]
    joined = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    assert joined.stdout == expected
    apart = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (apart.stdout, apart.stderr) == ("".join(texts), "figures\nmore\n")


def test_a_note_survives_a_stderr_that_nobody_reads():
    program = """
import os, sys
from mpjax.cli import output
reading, writing = os.pipe()
os.dup2(writing, 2)
os.close(writing)
os.close(reading)
output.note("x")
output.note("y")
print("done")
"""
    assert run(program) == (b"done\n", b"")


def test_a_status_is_for_terminals(monkeypatch, capsys):
    with output.status("[bold]Compiling"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with output.status("[bold]Compiling"):
        pass
    assert "[bold]Compiling" in capsys.readouterr().err
    monkeypatch.setenv("TERM", "dumb")
    with output.status("[bold]Compiling"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize("value", ["é", "\udcff", ["é", "\udcff"], {"中": [1.5, None, True]}])
def test_json_can_be_written_and_read_in_any_encoding(encoding, value):
    written = output.to_json(value, encoding=encoding).encode(encoding)
    assert json.loads(written.decode(encoding)) == value


def test_numbers_that_are_none_become_null():
    value = {"a": [float("nan"), -float("inf"), 1.0], "b": (2,)}
    assert output.to_json(value) == '{"a": [null, null, 1.0], "b": [2]}'
    assert output.to_json([1], indent=1) == "[\n 1\n]"


def test_json_is_printed_in_the_encoding_of_stdout(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.print_json({"text": "é"}, indent=None)
    assert raw.getvalue() == b'{"text": "\\u00e9"}\n'
