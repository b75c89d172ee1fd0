from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import mpjax
from benchmarks import speculation
from mpjax import SpeculationReport

pytestmark = pytest.mark.any_version


def generation(tokens, seconds, report=None):
    return SimpleNamespace(tokens=[tokens], tokens_per_second=1 / seconds, speculation=report)


def test_rows_compare_each_proposer_with_plain_decoding(tmp_path, monkeypatch, capsys):
    asked = []

    def generate(lm, prompts, **options):
        asked.append(options)
        if "speculate" in options:
            return generation([1, 2], 0.1, SpeculationReport([4], [3], [2], [5]))
        return generation([1, 2], 0.4)

    monkeypatch.setattr(mpjax, "generate", generate)
    file = tmp_path / "rows.json"
    arguments = ["--speculate", "ngram:4:2", "--temperature", "0.5", "--new-tokens", "9"]
    assert speculation.main([str(file), *arguments, "--rounds", "1"]) == 0
    assert asked[0] == {"max_new_tokens": 9, "sampling": {"temperature": 0.5}}
    assert asked[2] == asked[0] | {"speculate": mpjax.Ngram(4, 2)}
    result = json.loads(file.read_text())
    assert "device" in result
    rows = result["results"]
    assert [row["case"] for row in rows] == ["repeat", "rename", "prose", "code"]
    assert [row["repeats"] for row in rows] == [True, True, False, False]
    assert len(asked) == 4 * (2 + 2)
    assert rows[0]["speed_up"] == pytest.approx(4)
    assert (rows[0]["acceptance"], rows[0]["tokens_per_step"]) == (0.75, 2.5)
    assert rows[0]["proposed_per_step"] == 2
    assert rows[0]["same_tokens"]
    assert len(capsys.readouterr().out.splitlines()) == 4
    bundled = "bundled | W16A16KV16 | repeat | 0.5 | ngram:4:2 | 2 | 10 | 4.00 | 2.50 | 75% | 2.00"
    assert " | ".join(speculation.cells(rows[0])) == bundled
    assert len(speculation.cells(rows[0])) == len(speculation.HEADERS)
    expected = "python -m benchmarks.speculation OUT.json --speculate ngram:4:2"
    assert speculation.command(rows) == expected
    assert speculation.command([rows[0] | {"model": "small"}]).endswith(
        "--model small --speculate ngram:4:2"
    )


def test_an_engine_is_measured_too(tmp_path, monkeypatch):
    asked, made = [], []

    class Engine:
        def __init__(self, lm, **options):
            made.append(options)
            self.speculate = options["speculate"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def generate(self, prompts, **options):
            asked.append(options)
            report = SpeculationReport([4], [3], [2], [5]) if self.speculate else None
            return generation([1, 2], 0.1 if self.speculate else 0.2, report)

    monkeypatch.setattr(mpjax, "Engine", Engine)
    file = tmp_path / "rows.json"
    options = ["--engine", "16", "--speculate", "ngram:4:2", "--temperature", "0", "--rounds", "1"]
    assert speculation.main([str(file), *options]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["engine_steps"] for row in rows] == [16] * 4
    assert rows[0]["speed_up"] == pytest.approx(2)
    assert asked[0] == {"max_new_tokens": 200}
    assert made[0] == {"slots": 1, "max_tokens": 1024, "steps": 16, "speculate": None}
    assert made[1] == made[0] | {"speculate": mpjax.Ngram(4, 2)}
    assert speculation.command(rows).endswith("--speculate ngram:4:2 --engine 16")
