from __future__ import annotations

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli.application import app


def test_a_trained_head_proposes(tiny_folder, tiny, tmp_path):
    pytest.importorskip("optax")
    text, head = tmp_path / "text.txt", str(tmp_path / "head")
    text.write_text("def f(x):\n    return x\n" * 20)
    command = ["train-drafter", str(tiny_folder), head, "--text", str(text)]
    sizes = ["--steps", "2", "--batch", "2", "--length", "16", "--vocabulary", "64"]
    result = CliRunner().invoke(app, [*command, *sizes])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{head}: 2 steps, loss ")
    command = ["generate", "--model", str(tiny_folder), "--max-new-tokens", "12", "def f"]
    result = CliRunner().invoke(app, [*command, "--speculate", f"eagle:2:{head}"])
    assert result.exit_code == 0, result.output
    assert result.stdout == mpjax.generate(tiny, "def f", max_new_tokens=12).text[0]
    assert "proposed tokens accepted" in result.stderr
