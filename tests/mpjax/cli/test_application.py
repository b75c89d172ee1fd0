from __future__ import annotations

import io
import itertools
import shlex
import sys
from pathlib import Path

import pytest
import typer.core
from typer.testing import CliRunner

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.cli import application, bench, main
from mpjax.cli.application import app
from mpjax.memory import DeviceMemoryError

COMMANDS = (
    "generate",
    "chat",
    "serve",
    "convert",
    "quantize",
    "export",
    "train-drafter",
    "info",
    "evaluate",
    "tune",
    "bench",
    "env",
)


@pytest.fixture
def failing(monkeypatch):
    """Makes loading raise an error, then runs `mpjax [options] generate x`."""

    def run(error, *options, **settings):
        def load(*args, **keywords):
            raise error

        monkeypatch.setattr(mpjax, "load", load)
        return CliRunner().invoke(app, [*options, "generate", "x"], **settings)

    return run


def test_help_names_the_commands_and_explains_precisions():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f"\n  {command} " in result.stdout for command in COMMANDS)
    assert "W4A16KV8" in result.stdout
    assert "Exit codes" in result.stdout
    assert "\x1b" not in result.stdout
    assert CliRunner().invoke(app, ["-h"]).stdout == result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"mpjax {command}" in result.stdout or command == "env"
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert result.stderr == ""


def examples():
    """The commands in the examples of all help texts, without what pipes and files they go to."""
    commands = (*app.registered_commands, *bench.app.registered_commands)
    for epilog in (application.EPILOG, bench.EPILOG, *(command.epilog for command in commands)):
        listed = epilog.partition("Examples:\n")[2].partition("\n\n")[0].replace("\\\n", "")
        for line in listed.splitlines():
            words = shlex.split(line.partition(" > ")[0])
            parts = [list(part) for _, part in itertools.groupby(words, "|".__ne__)]
            yield from (part[1:] for part in parts if part[0] == "mpjax")


def test_all_commands_have_examples():
    assert {example[0] for example in examples()} == set(COMMANDS)


@pytest.mark.parametrize("example", list(examples()), ids=" ".join)
def test_examples_are_right_usage(example, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(typer.core.TyperCommand, "invoke", lambda self, ctx: ran.append(self.name))
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "wikitext.txt", "recipe.toml"):
        Path(name).write_text("text")
    result = CliRunner().invoke(app, example)
    assert (result.exit_code, result.stderr) == (0, "")
    assert ran == [example[1] if example[0] == "bench" else example[0]]


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["env"], ["info", "--help"]])
def test_a_full_disk_is_one_sentence(arguments, monkeypatch, capsys):
    monkeypatch.setattr("mpjax.environment.report", lambda: "text")
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(SystemExit) as exit:
        app(arguments)
    assert exit.value.code == 1
    assert capsys.readouterr().err == "mpjax: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the folder is odd"),
        FileNotFoundError("the folder is odd"),
        DeviceMemoryError("the folder is odd"),
        CheckpointError("the folder is odd"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_expected_failure_is_one_sentence(failing, error):
    result = failing(error)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "mpjax: the folder is odd\n"


def test_an_argument_of_loading_is_the_option_of_a_command(failing):
    result = failing(ValueError("9 tokens: ask for fewer, or load the model with max_positions"))
    assert result.stderr == "mpjax: 9 tokens: ask for fewer, or give more with --max-positions\n"
    draft = ValueError("9 tokens: ask for fewer tokens, or load the draft with max_positions")
    assert failing(draft).stderr == "mpjax: 9 tokens: ask for fewer tokens\n"
    options = {name: typer.main.get_command(app).commands[name].params for name in COMMANDS}  # type: ignore[attr-defined]
    having = {name for name, found in options.items() if "max_positions" in {o.name for o in found}}
    assert having == set(application.WITH_POSITIONS)


@pytest.mark.parametrize(
    ("command", "said", "shown"),
    [
        ("serve", "cache_memory is 2: a page", "--cache-memory is 2: a page"),
        ("serve", "max_tokens is 9, and the model", "--max-tokens is 9, and the model"),
        ("quantize", "choices has 'W9': expected", "--choices has 'W9': expected"),
        ("quantize", "bits is 9: expected", "--budget is 9: expected"),
        ("export", "bits is 9: expected", "bits is 9: expected"),
        ("export", "source is 9: expected", "source is 9: expected"),
        ("export", "the dtype is 9: expected", "the dtype is 9: expected"),
        ("export", "short", "short"),
    ],
)
def test_an_argument_that_a_message_begins_with_is_an_option(command, said, shown):
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    assert application._in_shell_words(said, found) == shown


@pytest.mark.parametrize(
    "error",
    [
        OSError("RESOURCE_EXHAUSTED: writing /tmp/x"),
        ValueError("RESOURCE_EXHAUSTED: writing /tmp/x [OS error 28: No space left on device]"),
        RuntimeError("RESOURCE_EXHAUSTED: /tmp/x; No space left on device"),
        RuntimeError("RESOURCE_EXHAUSTED: /tmp/x; Disk quota exceeded"),
    ],
)
def test_what_else_is_exhausted_is_not_the_device(failing, error):
    result = failing(error)
    assert result.exit_code == 1
    assert "the device ran out of memory" not in result.stderr
    assert "/tmp/x" in result.stderr
    assert result.stderr.startswith("mpjax: ")
    assert ("a disk is full: " in result.stderr) == (not isinstance(error, OSError))


@pytest.mark.parametrize(
    ("options", "settings"), [(["--traceback"], {}), ([], {"env": {"MPJAX_DEBUG": "1"}})]
)
def test_tracebacks_can_be_asked_for(failing, options, settings):
    result = failing(ValueError("the folder is odd"), *options, **settings)
    assert isinstance(result.exception, ValueError)


def test_an_interrupt_is_quiet(failing):
    result = failing(KeyboardInterrupt())
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "mpjax: interrupted\n")


def test_main_is_the_application_under_its_own_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/somewhere/__main__.py", "generate"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert "Usage: mpjax generate" in capsys.readouterr().err
