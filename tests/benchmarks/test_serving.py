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


def test_each_case_is_a_command(tmp_path, measured):
    for name in serving.CASES:
        result = CliRunner().invoke(app, serving.arguments(name, tmp_path))
        assert result.exit_code == 0, result.output


def test_all_cases_run_in_this_process_and_give_ratios(tmp_path, measured, capsys):
    assert serving.main([str(tmp_path)]) == 0
    assert len(measured) == len(serving.CASES)
    found = json.loads((tmp_path / "ratios.json").read_text(encoding="utf-8"))["results"]
    assert {*found} == {*serving.NUMBERS}
    assert found["at_once / static batch of 256"] == 2
    assert found["shared / not_shared, until all first tokens"] == 0.5
    assert found["alone: decoding, engine / generate_tokens"] == 2


def test_a_case_that_fails_does_not_end_the_others(tmp_path, measured, monkeypatch, capsys):
    monkeypatch.setattr(serve, "failures", lambda rows: ["too slow"])
    assert serving.main([str(tmp_path), "alone", "shared"]) == 2
    assert len(measured) == 2
    assert serving.main([str(tmp_path), "other"]) == 2
    assert "there is no case 'other'" in capsys.readouterr().err
