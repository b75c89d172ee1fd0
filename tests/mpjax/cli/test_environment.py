from __future__ import annotations

from typer.testing import CliRunner

from mpjax import environment
from mpjax.cli.application import app


def test_it_prints_the_report(monkeypatch):
    monkeypatch.setattr(environment, "report", lambda: "system\n  python  3")
    result = CliRunner().invoke(app, ["env"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "system\n  python  3\n", "")
