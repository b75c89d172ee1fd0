from __future__ import annotations

import importlib.util
import json
import math

import pytest
from typer.testing import CliRunner

from mpjax.bench import (
    attention,
    experts,
    gemm,
    generate,
    measure,
    mixers,
    roofline,
    serve,
    sums,
    tables,
)
from mpjax.bench.lengths import Lengths
from mpjax.cli.application import app
from mpjax.generation.speculation.ngram import Ngram
from mpjax.kernels.attention.shapes import DECODE, PREFILL
from mpjax.kernels.experts.shapes import named
from mpjax.kernels.gemm import shapes
from mpjax.kernels.recurrent import shapes as recurrent_shapes
from mpjax.models import Qwen3, Qwen3MoE
from mpjax.models.presets import LLAMA3_1_8B, LLAMA3_70B
from tests.mpjax.bench.rows import attention_row, experts_row, gemm_row, generate_row, serve_row

MODULES = {
    **{"gemm": gemm, "attention": attention, "generate": generate},
    **{"serve": serve, "sums": sums, "mixers": mixers},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder, on a machine that has a GPU by its own word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(measure, "stamp", lambda: {"device": "Test"})
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """`measured("gemm", rows)`: what is measured, whatever is asked; returns the sweeps seen."""

    def install(command, rows):
        sweeps = []

        def run(sweep):
            sweeps.append(sweep)
            yield from rows

        monkeypatch.setattr(MODULES[command], "run", run)
        return sweeps

    return install


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def figures():
    return [
        gemm.figures(gemm_row(shape="qwen3-8b.qkv", M=m, packed_bytes=10**7, implementation="xla"))
        for m in (1, 16)
    ]


def test_products_are_printed_saved_and_drawn(measured, folder):
    sweeps = measured("gemm", figures())
    options = ("--formats", "uint4:g128, uint8:gK", "--rows", "1,16,1", "--shapes", "qwen3-8b.qkv")
    result = run("gemm", *options)
    assert result.exit_code == 0
    [sweep] = sweeps
    expected = gemm.Sweep(shapes.QWEN3_8B[:1], (1, 16), ("uint4:g128", "uint8:gK"))
    assert sweep == expected
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["qwen3-8b.qkv:", "K", "4000,", "N", "5000"]
    assert lines[1][:3] == ["format", "M", "µs"]
    assert lines[2:4] == tables.table(gemm.COLUMNS, figures())[1]
    assert json.loads((folder / "gemm.json").read_text()) == {
        "device": "Test",
        "results": figures(),
    }
    assert "uint4:g128" in (folder / "gemm.svg").read_text()
    assert result.stderr == "saved gemm.json\nsaved gemm.svg\n"


def test_output_is_a_folder_or_a_file(measured, folder):
    measured("gemm", figures())
    small = ("gemm", "--formats", "uint4", "--no-plot", "--output")
    run(*small, folder / "a")
    run(*small, folder / "b" / "other.json")
    assert (folder / "a" / "gemm.json").is_file()
    assert (folder / "b" / "other.json").is_file()
    assert not list(folder.rglob("*.svg"))


def test_what_was_measured_before_an_interruption_is_saved(monkeypatch, folder):
    def interrupted(sweep):
        yield figures()[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm, "run", interrupted)
    assert run("gemm", "--formats", "uint4").exit_code == 130
    assert json.loads((folder / "gemm.json").read_text())["results"] == figures()[:1]


def test_rows_that_miss_the_gate_are_named(measured, folder):
    measured("gemm", [*figures(), gemm_row(shape="qwen3-8b.qkv", relative_error=math.nan)])
    result = run("gemm", "--formats", "uint4", "--no-plot")
    assert result.exit_code == 1
    assert "mpjax: qwen3-8b.qkv, uint4:g128, M = 1: the error is nan" in result.stderr
    assert result.stderr.count("mpjax:") == 1
    assert len(json.loads((folder / "gemm.json").read_text())["results"]) == 3
    assert "nan" in result.stdout


def test_without_matplotlib_there_is_a_word_about_it(measured, monkeypatch, folder):
    measured("gemm", figures())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(roofline, "draw_gemm", lambda *arguments: pytest.fail("drawn"))
    result = run("gemm", "--formats", "uint4")
    assert result.exit_code == 0
    assert "no plot: matplotlib is missing (pip install matplotlib)" in result.stderr


def test_attention(measured, folder):
    sizes = {"batch": 1, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "context": 1000}
    rows = [attention.figures(attention_row(**sizes, queries=queries)) for queries in (1, 9)]
    sweeps = measured("attention", rows)
    result = run("attention", "--formats", "KV8,KV4", "--shapes", DECODE[1].name)
    assert result.exit_code == 0
    assert sweeps == [attention.Sweep(DECODE[1:2], ("KV8", "KV4"))]
    assert rows[0]["shape"] in result.stdout
    assert json.loads((folder / "attention.json").read_text())["results"] == rows
    assert "KV8" in (folder / "attention.svg").read_text()
    run("attention")
    assert sweeps[1] == attention.Sweep(DECODE + PREFILL, ("KV16", "KV8", "KV4"))
    measured("attention", [rows[0] | {"relative_error": 1.0}])
    assert run("attention").exit_code == 1


def test_generation(measured, folder):
    rows = [generate.figures(generate_row(batch=batch)) for batch in (2, 16)]
    sweeps = measured("generate", rows)
    options = ("--precision", "W4A16KV8,W8A16KV8", "--batch", "2,16", "--prompt-tokens", "100,7")
    result = run("generate", *options, "--new-tokens", "7", "--filled", "--output", folder / "new")
    assert result.exit_code == 0
    expected = generate.Sweep(("W4A16KV8", "W8A16KV8"), (2, 16), (100, 7), 7, filled=True)
    assert sweeps == [expected]
    saved = json.loads((folder / "new" / "generate.json").read_text())
    assert saved == {"device": "Test", "results": rows}
    assert "batch 16" in (folder / "new" / "generate.svg").read_text()
    assert "random weights, 7 new tokens" in result.stdout
    assert "50%" in result.stdout
    run("generate", "--from-disk", "--no-plot")
    assert sweeps[1] == generate.Sweep(("W4A16KV8",), (1,), (2048,), 256, from_disk=True)
    run("generate", "--shapes", "llama3-70b", "--no-plot")
    assert sweeps[2].config == LLAMA3_70B
    few = ("--layers", "2", "--piece-tokens", "512")
    assert "tokens, 2 layers" in run("generate", "--shapes", "llama3-70b", "--no-plot", *few).stdout
    assert (sweeps[3].config.num_layers, sweeps[3].piece_tokens) == (2, 512)
    assert [*folder.rglob("generate-llama3-70b-2-layers.json")]
    measured("generate", [rows[0] | {"logprob_difference": 7.0}])
    assert run("generate", "--no-plot").exit_code == 1


def test_sums(measured, monkeypatch):
    row = {"devices": 2, "dtype": "bfloat16", "bytes": 8192, "pair_microseconds": 12.0}
    sweeps = measured("sums", [row | {"addition_microseconds": 2.0, "sum_microseconds": 10.0}])
    monkeypatch.setattr(sums, "read_devices", lambda devices: devices)
    result = run("sums", "--sizes", "8", "--dtypes", "bfloat16")
    assert result.exit_code == 0
    assert sweeps == [sums.Sweep(2, (8,), ("bfloat16",))]
    assert "10.0 µs" in result.stdout


def test_mixers(measured, folder):
    row = {"shape": "nemotron-h-8b", "rows": 2, "tokens": 1, "state_bytes": 10**6}
    row |= {"microseconds": 3.0, "floor_microseconds": 2.0, "cudnn_microseconds": None}
    rows = [mixers.figures(row | {"relative_error": 1e-7})]
    sweeps = measured("mixers", rows)
    result = run("mixers", "--shapes", "nemotron-h-8b", "--rows", "2", "--prompt-tokens", "0")
    assert result.exit_code == 0
    assert sweeps == [mixers.Sweep(recurrent_shapes.named(["nemotron-h-8b"]), (2,), ())]
    assert "1.50" in result.stdout
    assert json.loads((folder / "mixers.json").read_text())["results"] == rows
    run("mixers", "--rows", "0")
    assert sweeps[1] == mixers.Sweep(recurrent_shapes.PUBLISHED, (), (4096, 32768))


def test_serving(measured, folder):
    rows = [serve_row(), serve_row(through="batches of 64")]
    sweeps = measured("serve", rows)
    lengths = folder / "lengths.jsonl"
    lengths.write_text('{"prompt_tokens": 3, "new_tokens": 4}')
    options = ("--requests", "9", "--prompt-tokens", "5-7", "--new-tokens", "lognormal:9:0.5:20")
    more = (
        "--devices",
        "1",
        "--rate",
        "2.5",
        "--shared-tokens",
        "3",
        "--late-prompt",
        "77",
        "--no-share",
        "--speculate",
        "ngram:3:2",
    )
    result = run("serve", *options, *more, "--lengths", lengths, "--shapes", "llama3.1-8b")
    assert result.exit_code == 0
    [sweep] = sweeps
    assert sweep.load == serve.Load(
        9, Lengths(5, 7), Lengths(1, 20, 9, 0.5), ((3, 4),), rate=2.5, shared=3, late=77
    )
    assert sweep.share_prefixes is False
    assert sweep.speculate == Ngram(3, 2)
    assert sweep.config == LLAMA3_1_8B
    assert "batches of 64" in result.stdout
    measured("serve", [serve_row(programs=20)])
    assert run("serve").exit_code == 1


def test_a_trace_that_cannot_be_written_is_told_before_anything_is_measured(monkeypatch, folder):
    (folder / "file").touch()
    monkeypatch.setattr(serve, "run", lambda sweep: pytest.fail("measured"))
    result = run("serve", "--trace", folder / "file" / "trace.json")
    assert result.exit_code == 1
    assert result.stderr.startswith("mpjax: ")
    assert "file" in result.stderr


def test_without_a_gpu_nothing_is_done(monkeypatch, folder):
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("mpjax.kernels.device.why_triton_cannot_run", lambda: "there is none")
    monkeypatch.setattr(attention, "run", lambda sweep: pytest.fail("measured"))
    result = run("attention")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("mpjax: a benchmark measures a CUDA GPU")
    assert result.stderr.endswith(": there is none\n")
    assert not list(folder.iterdir())


def test_products_of_experts(measured, folder, monkeypatch):
    monkeypatch.setitem(MODULES, "experts", experts)
    rows = [experts.figures(experts_row(shape="qwen3-30b-a3b.down"))]
    sweeps = measured("experts", rows)
    result = run("gemm", "--experts")
    assert result.exit_code == 0
    [sweep] = sweeps
    assert sweep.shapes == named(["qwen3-30b-a3b", "mixtral-8x7b"])
    assert (sweep.tokens, sweep.formats) == ((1, 16, 64, 256, 4096), ("uint4:g128",))
    assert "qwen3-30b-a3b.down: 5 of 8 experts, K 1000, N 2000" in result.stdout
    assert json.loads((folder / "experts.json").read_text())["results"] == rows


def test_generation_of_several_models(measured, folder):
    sweeps = measured("generate", [generate.figures(generate_row())])
    result = run("generate", "--shapes", "qwen3-8b,qwen3-30b-a3b", "--no-plot")
    assert result.exit_code == 0
    assert [sweep.decoder for sweep in sweeps] == [Qwen3, Qwen3MoE]
    assert (folder / "generate-qwen3-30b-a3b.json").is_file()
