from __future__ import annotations

import importlib.util

import pytest
from typer.testing import CliRunner

from mpjax.cli.application import app

runner = CliRunner()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "needs starlette, which is missing" in " ".join(result.stderr.split())


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_it_serves_a_model_on_this_machine_unless_asked_otherwise(
    host, warned, monkeypatch, tiny_folder
):
    pytest.importorskip("starlette")
    uvicorn = pytest.importorskip("uvicorn")
    served = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.update(options, app=app))
    options = ["--model", str(tiny_folder), "--slots", "2", "--port", "5", "--max-tokens", "64"]
    result = runner.invoke(app, ["serve", *options, *(["--host", host] if warned else [])])
    assert result.exit_code == 0, result.output
    assert (served["host"], served["port"]) == (host, 5)
    assert "tiny: 2 requests at a time, a cache of 256 tokens" in result.stderr
    assert ("no API key is set" in result.stderr) == warned


def test_an_empty_key_is_refused_before_the_model_is_loaded():
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    result = runner.invoke(app, ["serve", "--model", "missing", "--api-key", ""])
    assert result.exit_code == 2
    assert "--api-key is empty: give a key" in " ".join(result.stderr.split())
