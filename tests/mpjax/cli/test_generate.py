from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli import generate
from mpjax.cli.application import app
from mpjax.kernels import KVFormat

SUMMARY = (
    r"\d+ prompt tokens, (\d+) new; first token after [\d.]+ s(?:, then [\d.,]+ tokens/s)? "
    r"\(compiling and a first try took [\d.]+ s before that\)\n"
)
HOT = mpjax.Sampling(temperature=1.2, top_k=40)
HOT_OPTIONS = ["--temperature", "1.2", "--top-k", "40", "--seed", "3"]


@pytest.fixture
def run(tiny_folder):
    def call(*arguments, **settings):
        command = ["generate", "--model", str(tiny_folder), "--max-new-tokens", "20", *arguments]
        return CliRunner().invoke(app, command, **settings)

    return call


@pytest.fixture(scope="module")
def expected(tiny):
    return mpjax.generate(tiny, "def f", max_new_tokens=20, sampling=HOT, seeds=[3]).text[0]


def test_stdout_is_the_text_and_stderr_the_speed(run, expected):
    result = run("def f", *HOT_OPTIONS)
    assert result.exit_code == 0
    assert result.stdout == expected
    match = re.fullmatch(SUMMARY, result.stderr)
    assert match
    assert match[1] == "20"
    assert "tokens/s" in result.stderr


def test_prompts_from_stdin_and_files(run, expected, tmp_path):
    assert run("-", *HOT_OPTIONS, input="def f\n").stdout == expected
    file = tmp_path / "prompt"
    file.write_text("def f\n")
    assert run("--prompt-file", str(file), *HOT_OPTIONS).stdout == expected
    assert run("def f", "--prompt-file", str(file)).exit_code == 2
    assert run("--prompt-file", str(tmp_path / "missing")).exit_code == 2
    assert run().exit_code == 2


def test_precision_minimum_and_stop_are_passed_on(run, tiny, expected):
    stop = expected[20:24]
    result = run("def f", *HOT_OPTIONS, "--stop", "zzz", "--stop", stop)
    assert result.stdout == expected[: expected.index(stop)]
    more = ["--precision", "A16KV4", "--dtype", "float32", "--min-new-tokens", "2"]
    result = run("def f", *HOT_OPTIONS, *more)
    cached = dataclasses.replace(tiny, kv_format=KVFormat(4))
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "min_new_tokens": 2,
        "sampling": HOT,
        "seeds": [3],
    }
    assert result.stdout == mpjax.generate(cached, "def f", **options).text[0] != expected


def test_a_single_token_has_no_speed(run):
    result = run("def f", "--max-new-tokens", "1")
    assert result.exit_code == 0
    assert "tokens/s" not in result.stderr
    assert re.fullmatch(SUMMARY, result.stderr)


def test_pieces_are_written_as_they_come(monkeypatch, capsys):
    shown = []

    def pieces() -> Any:
        yield "\x1b[1m"
        shown.append(capsys.readouterr().out)
        yield "b"
        shown.append(capsys.readouterr().out)
        return "done"

    returned: Any = generate._write(pieces())
    assert returned == "done"
    assert shown == ["\x1b[1m", "b"]  # and nothing is taken out of the text


def test_compiling_is_not_in_the_figures(run, tiny, monkeypatch):
    """The stream is begun once before, far enough that the decoding loop has run."""
    streams = []
    original = mpjax.stream

    def stream(*args, **keywords):
        seen: list[str] = []
        streams.append(seen)
        result = original(*args, **keywords)
        while True:
            try:
                seen.append(next(result))
            except StopIteration as end:
                return end.value
            yield seen[-1]

    monkeypatch.setattr(mpjax, "stream", stream)
    assert run("def f", *HOT_OPTIONS).exit_code == 0
    first, second = streams
    assert len(first) == 2 < len(second)
    assert second[:2] == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--temperature", "1"], "prompt 0 is empty"),
        (["x", "--max-new-tokens", "300"], "256 positions"),
        (["x", "--precision", "W16A16KV8", "--dtype", "float64"], None),
        (["x", "--precision", "W4"], None),
        (["x", "--top-p", "7", "--temperature", "1"], None),
        (["x", "--max-new-tokens", "0"], None),
    ],
)
def test_failures(run, arguments, message):
    result = run(*arguments)
    assert result.stdout == ""
    if message is None:
        assert (result.exit_code, "Usage: " in result.stderr) == (2, True)
    else:
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert message in result.stderr


def test_a_folder_that_is_none():
    result = CliRunner().invoke(app, ["generate", "x", "--model", "/nowhere/at all"])
    assert result.exit_code == 1
    assert result.stderr.startswith("mpjax: /nowhere/at all does not exist")


def test_echo_writes_the_prompt_first(run, expected):
    assert run("def f", *HOT_OPTIONS, "--echo").stdout == "def f" + expected
