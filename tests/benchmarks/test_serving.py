from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import serving
from mpjax.bench import measure, serve
from mpjax.cli.application import app
from tests.mpjax.bench.rows import serve_row

pytestmark = pytest.mark.any_version


@pytest.fixture
def measured(monkeypatch):
    """The sweeps that were run, of which each gives the rows of a load that its engine doubles."""
    sweeps = []

    def run(sweep):
        sweeps.append(sweep)
        if sweep.engine:
            yield serve_row(all_first_tokens_seconds=0.5 if sweep.share_prefixes else 1.0)
        if sweep.static:
            slow = {"token_seconds": {"mean": 0.02, "p50": 0.02, "p99": 0.02}}
            yield serve_row(through="batches", new_tokens_per_second=125.0, **slow)

    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(serve, "run", run)
    return sweeps


@pytest.mark.parametrize("name", serving.CASES)
def test_each_case_is_a_command(name, tmp_path, measured):
    result = CliRunner().invoke(app, serving.arguments(name, tmp_path))
    assert result.exit_code == 0, result.output
    [sweep] = measured
    assert sweep.load.most <= 40_960
    assert sweep.ride == name.endswith("_riding")


def test_all_cases_run_in_this_process_and_give_ratios(tmp_path, measured, capsys):
    assert serving.main([str(tmp_path)]) == 0
    assert len(measured) == len(serving.CASES)
    found = json.loads((tmp_path / "ratios.json").read_text(encoding="utf-8"))["results"]
    assert {*found} == {*serving.NUMBERS}
    assert found["at_once / static batch of 256"] == 2
    assert found["at_once: device idle, % at most"] == 2.5
    assert found["uneven / at_once, per token"] == 1
    assert found["shared / not_shared, until all first tokens"] == 0.5
    assert found["late_prompt: longest gap, ms"] == 100
    assert found["alone: decoding, engine / generate_tokens"] == 2
    assert "2.000  alone: decoding" in capsys.readouterr().out


def test_cases_are_chosen_by_name(tmp_path, measured, monkeypatch, capsys):
    assert serving.main([str(tmp_path), "alone", "shared"]) == 0
    assert len(measured) == 2
    assert list(serving.numbers(tmp_path)) == ["alone: decoding, engine / generate_tokens"]
    monkeypatch.setattr(serve, "failures", lambda rows: ["too slow"])
    assert serving.main([str(tmp_path), "not_shared"]) == 1
    assert "shared / not_shared, until all first tokens" in serving.numbers(tmp_path)
    assert serving.main([str(tmp_path), "other"]) == 2
    assert serving.main([str(tmp_path / "group"), "long"]) == 3
    names = {path.stem for path in (tmp_path / "group").iterdir()}
    assert names == {*(f"serve-{name}" for name in serving.GROUPS["long"]), "ratios"}
    assert "there is no case 'other'" in capsys.readouterr().err
    monkeypatch.setattr(serve, "run", lambda sweep: 1 / 0)
    assert serving.main([str(tmp_path), "alone", "shared"]) == 2
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "alone: 0 s" in said
    assert serving.main([]) == 2
    assert "python -m benchmarks.serving FOLDER" in capsys.readouterr().err
