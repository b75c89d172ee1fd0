from __future__ import annotations

import json

from typer.testing import CliRunner

from mpjax import environment
from mpjax.cli.application import app


def test_it_prints_the_report(monkeypatch):
    monkeypatch.setattr(environment, "report", lambda: "system\n  python  3")
    result = CliRunner().invoke(app, ["env"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "system\n  python  3\n", "")


def test_json_is_what_was_collected(monkeypatch):
    found = {"system": {"python": "3"}, "devices": [{"device": "é", "memory_bytes": None}]}
    monkeypatch.setattr(environment, "collect", lambda: found)
    result = CliRunner().invoke(app, ["env", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == found
