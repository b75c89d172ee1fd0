from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks import serving
from mpjax.bench import measure, serve
from mpjax.cli.application import app

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize("name", serving.CASES)
def test_each_case_is_a_command(name, tmp_path, monkeypatch):
    sweeps = []
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(serve, "run", lambda sweep: sweeps.append(sweep) or iter(()))
    arguments = serving.command(name, tmp_path)[3:]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    [sweep] = sweeps
    assert sweep.load.most <= 40_960


def test_cases_are_chosen_by_name(tmp_path, monkeypatch, capsys):
    ran = []

    def run(arguments, check):
        ran.append(arguments[-1])
        return SimpleNamespace(returncode=len(ran) - 1)

    monkeypatch.setattr(serving.subprocess, "run", run)
    assert serving.main([str(tmp_path), "alone", "shared"]) == 1
    assert ran == [str(tmp_path / "alone.json"), str(tmp_path / "shared.json")]
    assert serving.main([str(tmp_path), "other"]) == 2
    assert "there is no case 'other'" in capsys.readouterr().err
    assert serving.main([]) == 2
    assert "python -m benchmarks.serving FOLDER" in capsys.readouterr().err
