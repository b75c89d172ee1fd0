from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli.application import app


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_the_target_is_the_source_in_another_format(tiny_folder, tmp_path):
    target = tmp_path / "exported"
    options = ("--precision", "W4A16KV8", "--dtype", "bfloat16", "--format", "awq")
    result = export(tiny_folder, target, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    line = rf"{target}: [\d.]+ MB of weights from {tiny_folder} \(W4A16\)\n"
    assert re.fullmatch(line, result.stdout)
    lm = mpjax.load(target)
    assert lm.precision == "W4A16KV16"
    assert lm.tokenizer is not None

    again = export(tiny_folder, target, *options)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "holds an exported model: replace it with --overwrite\n" in again.stderr
    assert export(target, target, "--format", "plain", "--overwrite").exit_code == 0
    assert mpjax.load(target).precision == "W16A16KV16"


@pytest.mark.parametrize(
    "options", [("--precision", "W4A16KV8H8", "--format", "awq"), ("--precision", "W16A16KV8H8")]
)
def test_a_head_that_a_format_has_no_place_for_is_named(tiny_folder, tmp_path, options):
    result = export(tiny_folder, tmp_path / "exported", *options, "--dtype", "bfloat16")
    assert (result.exit_code, result.stderr) == (0, "")
    last = result.stdout.splitlines()[-1]
    assert last.endswith(" is dequantised to bfloat16, because the format has no place for it")


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("W8A8KV8", ["activations are no longer rounded, as W8A8 says: plain can't tell it"]),
        ("W8A16KV8", []),
    ],
)
def test_rounding_of_activations_that_is_lost_is_named(tiny_folder, tmp_path, precision, said):
    result = export(tiny_folder, tmp_path / "x", "--precision", precision, "--format", "plain")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[1:] == said


def test_refused_before_anything_is_loaded(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.delattr(mpjax, "load")
    result = export(tiny_folder, tmp_path / "x", "--format", "agq")
    assert result.exit_code == 2
    assert "did you mean 'awq'?" in " ".join(result.stderr.split())
    (tmp_path / "precious").write_text("x")
    result = export(tiny_folder, tmp_path, "--overwrite")
    assert result.exit_code == 1
    assert "exists and is nothing that mpjax has exported" in result.stderr
    assert export(tiny_folder).exit_code == 2


def test_what_a_format_cannot_hold_is_one_sentence(tiny_folder, tmp_path):
    refused = export(tiny_folder, tmp_path / "x", "--devices", "99")
    assert (refused.exit_code, refused.stderr[:25]) == (1, "mpjax: --devices is 99, a")
    result = export(tiny_folder, tmp_path / "x", "--precision", "WNF4A16KV8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(
        r"mpjax: the weights are WNF4, which .* export with --format plain, .*\n", result.stderr
    )
