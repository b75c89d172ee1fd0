from __future__ import annotations

import importlib.util
import json
import logging
import socket

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli.application import app

runner = CliRunner()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 1  # which is no wrong usage
    said = "the server needs starlette, which is missing: pip install starlette uvicorn"
    assert result.stderr == f"mpjax: {said}\n"


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_it_serves_a_model_on_this_machine_unless_asked_otherwise(
    host, warned, monkeypatch, tiny_folder
):
    pytest.importorskip("starlette")
    uvicorn = pytest.importorskip("uvicorn")
    served = {}

    def run(server, sockets):
        served.update(app=server.config.app, address=sockets[0].getsockname())
        server.started = True

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda config: None)
    compiled = []
    monkeypatch.setattr(mpjax.Engine, "compile", lambda engine: compiled.append(engine))
    options = ["--model", str(tiny_folder), "--slots", "2", "--port", "0", "--max-tokens", "64"]
    options += ["--compile-first", "--max-gap", "inf"] if warned else []
    options += ["--speculate", "ngram:3:2"] if warned else []
    result = runner.invoke(app, ["serve", *options, *(["--host", host] if warned else [])])
    assert result.exit_code == 0, result.output
    assert served["address"][0] == host
    assert f"listening on http://{host}:{served['address'][1]}" in result.stderr
    assert "tiny: 2 requests at a time, a cache of 256 tokens" in result.stderr
    assert ("no API key is set" in result.stderr) == warned
    assert len(compiled) == warned


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ([], ["info", "warning", "error"]),
        (["--log-level", "warning"], ["warning", "error"]),
        (["--log-level", "error"], ["error"]),
    ],
)
def test_the_log_has_lines_of_a_level(options, levels, monkeypatch, tiny_folder):
    pytest.importorskip("starlette")
    uvicorn = pytest.importorskip("uvicorn")
    logger, other = logging.getLogger("mpjax.serve"), logging.getLogger("uvicorn.error")

    def run(server, sockets):
        server.started = True
        logger.info("read")
        logger.warning("refused")
        other.error("failed")

    monkeypatch.setattr(uvicorn.Server, "run", run)
    command = ["serve", "--model", str(tiny_folder), "--slots", "2", "--port", "0"]
    command += ["--max-tokens", "64", "--ignore-unknown", *options]
    lines = runner.invoke(app, command).stderr.splitlines()
    begin = ["info"] if "info" in levels else []
    assert [line.split()[1] for line in lines] == [*begin, *levels]
    lines = runner.invoke(app, [*command, "--log-json"]).stderr.splitlines()
    assert [json.loads(line)["level"] for line in lines] == [*begin, *levels]
    assert json.loads(lines[-1])["message"] == "failed"
    assert not logging.getLogger("mpjax.serve").handlers


def test_a_port_in_use_is_refused_before_the_model_is_loaded():
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = runner.invoke(app, ["serve", "--model", "missing", "--port", str(port)])
    assert result.exit_code == 1
    assert result.stderr == f"mpjax: port {port} is in use: choose another with --port\n"
