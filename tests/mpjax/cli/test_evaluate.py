from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli import evaluate as command
from mpjax.cli import options
from mpjax.cli.application import app
from mpjax.evaluation.comparison import Comparison, compare
from mpjax.evaluation.perplexity import Evaluation, evaluate

DOCUMENTS = ["import os\nimport sys\n", "def f(x):\n    return x + 1\n"]
ROWS = [
    {"precision": "W16A16KV16", "perplexity": 10.0, "bits_per_byte": 1.0, "weights_bytes": 2e9},
    {"precision": "W4A16KV8", "perplexity": 10.5, "bits_per_byte": 1.25, "weights_bytes": 5e6},
]
MARKDOWN = """\
| precision | perplexity | Δ | bits per byte | weights |
| --- | ---: | ---: | ---: | ---: |
| W16A16KV16 | 10.0000 |  | 1.0000 | 2,000.00 MB |
| W4A16KV8 | 10.5000 | +5.00 % | 1.2500 | 5.00 MB |"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


@pytest.fixture
def run(tiny_folder, text):
    def call(*arguments):
        command = ["evaluate", str(tiny_folder), "--text", str(text), "--dtype", "bfloat16"]
        return CliRunner().invoke(app, [*command, "--batch", "2", *map(str, arguments)])

    return call


def test_each_precision_is_measured(run, tiny_folder, tmp_path, monkeypatch):
    loads = []
    load = options.load

    def counted(*arguments):
        loads.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(options, "load", counted)
    output = tmp_path / "new folder" / "results.json"
    names = ["W16A16KV16", "W16A16KV4", "W4A16KV16"]  # the same weights behind each other
    result = run("--output", output, "--precisions", "W16A16KV16,W4A16KV16,W16A16KV4")
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(loads) == 2  # once for each kind of weights
    written = json.loads(output.read_text())
    assert [row["precision"] for row in written["rows"]] == names
    assert (written["model"], written["text"]) == ("tiny", "texts.jsonl")
    assert (written["documents"], written["bytes"]) == (2, len("".join(DOCUMENTS)))
    assert written["calibration"] is None
    for row in written["rows"]:
        lm = mpjax.load(tiny_folder, precision=row["precision"], dtype="bfloat16")
        expected = evaluate(lm, DOCUMENTS, batch=2)
        assert Evaluation(*(row[name] for name in Evaluation.__dataclass_fields__)) == expected
        assert row["weights_bytes"] == lm.nbytes
        assert row["bits_per_weight"] == lm.bits_per_weight
        assert row["perplexity"] == pytest.approx(math.exp(row["nats_per_token"]))
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["precision", "perplexity", "Δ", "bits", "per", "byte", "weights"]
    assert [line.split()[0] for line in lines[1:]] == names
    assert f"{written['rows'][0]['perplexity']:.4f}" in lines[1]
    assert result.stdout.isprintable() or "\x1b" not in result.stdout
    assert "─" not in result.stdout  # plain where it is no terminal


def test_models_are_compared_with_their_16_bits(run, tiny_folder, tmp_path):
    output, plot = tmp_path / "results.json", tmp_path / "plot.svg"
    options = ("--window", "8", "--output", output, "--plot", plot)
    result = run("--against", "itself", "--precisions", "W16A16,WNF4A16KV8", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    written = json.loads(output.read_text())
    assert written["reference"] == "tiny"
    same, other = written["rows"]
    assert (same["precision"], other["precision"]) == ("W16A16KV16", "WNF4A16KV8")
    assert (same["kl_mean"], same["same_top"], same["bits_per_weight"]) == (0, 1, 16)
    reference, lm = (
        mpjax.load(tiny_folder, precision=name, dtype="bfloat16")
        for name in ("W16A16KV16", "WNF4A16KV8")
    )
    expected = compare(lm, reference, DOCUMENTS, window=8, batch=2)
    assert Comparison(*(other[name] for name in Comparison.__dataclass_fields__)) == expected
    assert other["bits_per_weight"] == 4.5
    assert "KL in nats" in result.stdout
    assert f"{expected.kl_mean:.5f} ±" in result.stdout
    assert "WNF4A16KV8" in plot.read_text()


def test_a_plot_needs_matplotlib(run, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    result = run("--plot", "plot.svg", "--against", "itself")
    assert result.exit_code == 1
    assert result.stderr == "mpjax: plots need matplotlib: pip install matplotlib\n"


def test_scales_are_measured_on_another_text(run, text, tiny_folder):
    arguments = ("--precision", "W16A16KV8s", "--format", "json")
    assert "KV8s needs scales of channels" in run(*arguments).stderr
    result = run(*arguments, "--calibrate", text)
    written = json.loads(result.stdout)
    assert written["calibration"] == str(text)
    [row] = written["rows"]
    lm = mpjax.load(tiny_folder, precision="W16A16KV8s", dtype="bfloat16")
    expected = evaluate(mpjax.calibrate_cache(lm, DOCUMENTS), DOCUMENTS, batch=2)
    assert row["perplexity"] == expected.perplexity


@pytest.mark.parametrize("options", [("--format", "markdown"), ("--format", "json"), ("--json",)])
def test_formats(run, monkeypatch, options):
    monkeypatch.setattr(command, "_measure", lambda *arguments: ROWS)
    result = run(*options)
    assert result.exit_code == 0
    if "markdown" in options:
        assert result.stdout == MARKDOWN + "\n"
    else:
        assert json.loads(result.stdout)["rows"] == ROWS


def test_help_names_the_keys(run, monkeypatch):
    monkeypatch.setattr(command, "_measure", lambda *arguments: ROWS)
    text = CliRunner().invoke(app, ["evaluate", "--help"]).stdout.split("--json and --output")[1]
    assert all(key in text for key in json.loads(run("--json").stdout))
    assert all(key in text for key in (*ROWS[0], *Comparison.__dataclass_fields__))


@pytest.mark.parametrize("measured", [0, 1])
@pytest.mark.parametrize("format", ["table", "json"])
def test_rows_are_kept_when_the_next_can_not_be_measured(
    run, monkeypatch, tmp_path, measured, format
):
    def interrupted(*arguments):
        yield from ROWS[:measured]
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_measure", interrupted)
    path = tmp_path / "results.json"
    path.write_text("old")
    result = run("--output", path, "--format", format)
    assert result.exit_code == 130
    if not measured:
        assert (path.read_text(), result.stdout) == ("old", "")
        return
    assert json.loads(path.read_text())["rows"] == ROWS[:1]
    if format == "json":
        assert json.loads(result.stdout)["rows"] == ROWS[:1]
    else:
        assert [line.split()[0] for line in result.stdout.splitlines()] == [
            "precision",
            "W16A16KV16",
        ]


def test_precisions_by_default(tiny_folder, tmp_path):
    names = command._defaults(tiny_folder)
    assert len(names) == len(set(names)) == 21
    assert str(names[0]) == "W16A16KV16"  # what the others are compared with
    for quantised in ("mpjax.json", "config.json"):
        folder = tmp_path / quantised
        folder.mkdir()
        (folder / quantised).write_text('{"quantization_config": {"quant_method": "awq"}}')
        assert list(map(str, command._defaults(folder))) == ["A16KV16", "A16KV8", "A16KV4"]
