from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.cli import main
from mpjax.cli.application import app
from mpjax.memory import DeviceMemoryError

COMMANDS = ("generate", "chat", "convert", "info", "evaluate", "tune", "bench", "env")


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


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"mpjax {mpjax.__version__}\n")


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


def test_running_out_of_memory_is_an_expected_failure(failing):
    result = failing(RuntimeError("RESOURCE_EXHAUSTED: 3 GB wanted\nmany lines\n"))
    assert result.exit_code == 1
    assert result.stderr == "mpjax: the device ran out of memory: RESOURCE_EXHAUSTED: 3 GB wanted\n"


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


def test_an_unexpected_failure_keeps_its_traceback(failing):
    result = failing(ZeroDivisionError("a bug"))
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("options", "settings"), [(["--traceback"], {}), ([], {"env": {"MPJAX_DEBUG": "1"}})]
)
def test_tracebacks_can_be_asked_for(failing, options, settings):
    result = failing(ValueError("the folder is odd"), *options, **settings)
    assert isinstance(result.exception, ValueError)


def test_an_interrupt_is_quiet(failing):
    result = failing(KeyboardInterrupt())
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "mpjax: interrupted\n")


@pytest.mark.parametrize(
    "arguments", [["unknown"], ["generate", "--unknown"], ["convert", "only-one"], ["--unknown"]]
)
def test_wrong_usage(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    assert "--help" in result.stderr


def test_main_is_the_application_under_its_own_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/somewhere/__main__.py", "generate"])
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert "Usage: mpjax generate" in capsys.readouterr().err
