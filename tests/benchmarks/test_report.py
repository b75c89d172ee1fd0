from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import quantization, report
from mpjax.bench import attention, gemm, generate
from mpjax.kernels import ProductFormat
from mpjax.kernels.gemm.plans import OPERATION, Problem, plan_by_rule
from mpjax.kernels.plans import tables
from mpjax.kernels.plans.tables import SHIPPED, file_name
from tests.mpjax.bench.rows import attention_row, gemm_row, generate_row

STAMP = {"device": "GPU", "commit": "abc1234", "versions": {"jax": "0.99"}}


@pytest.fixture
def page(tmp_path):
    """`page(name=result, ...)`: the texts of all pages of tables that are written from these."""

    def write(**results):
        folder = tmp_path / "results"
        folder.mkdir()
        for name, result in results.items():
            (folder / f"{name}.json").write_text(json.dumps(STAMP | result))
        report.write(folder, tmp_path / "docs")
        pages = sorted((tmp_path / "docs" / "benchmarks").glob("*.md"))
        return "\n".join(path.read_text() for path in pages)

    return write


def test_every_benchmark_has_its_table_source_and_plot(page, tmp_path):
    sizes = {"batch": 1, "query_heads": 32, "kv_heads": 8, "head_dim": 128, "context": 1000}
    evaluated = {"precision": "W16A16KV8s", "perplexity": 8.0, "bits_per_byte": 1.0}
    evaluated["weights_bytes"] = 1e6
    memory_row = {"precision": "W4A16KV8", "method": "gptq", "layers": 4, "all_layers": 36}
    memory_row |= {"tokens": 262144, "seconds_of_layer": 10.0, "seconds_of_all_layers": 420.0}
    memory_row |= {"device_peak_bytes_of_all_layers": 10e9, "host_peak_bytes": 5e9}
    memory_row |= {"hidden_states_bytes": 2e9}
    fields = ("kl_mean", "kl_error", "kl_median", "kl_p99", "same_top")
    compared = evaluated | dict.fromkeys(fields, 0.25) | {"reference_perplexity": 8.0}
    compared |= {"bits_per_weight": 4.25, "window": 512, "tokens": 5110}
    head = compared | {"precision": "W16A16KV16H8", "bits_per_weight": 16.0}
    compares = {"reference": "bundled", "text": "held_out.jsonl"}
    text = page(
        **{
            "gemm": {"results": [gemm_row(), gemm_row(M=16)]},
            "gemm-more": {"results": [gemm_row(format="uint8:g128", packed_bytes=10**7)]},
            "attention": {"results": [attention_row(), attention_row(copies=5)]},
            "attention-one": {"results": [attention_row(**sizes, queries=1)]},
            "perplexity": {"rows": [evaluated]},
            "perplexity-other": {
                "rows": [evaluated],
                "model": "Other-1.5B.Q4_1.gguf",
                "text": "book.txt",
            },
            "perplexity-calibrated": {"rows": [evaluated], "calibration": "a.txt"},
            "agreement": compares | {"rows": [compared, head], "model": "bundled"},
            "agreement-other": compares | {"rows": [head], "model": "Other-1.5B.Q4_1.gguf"},
            "memory-x": memory_row,
            "quantization": {
                "tokens": 512,
                "results": [{"format": "KV8", "errors": dict.fromkeys(quantization.KINDS, 0.0125)}],
            },
            "generate-x": generate_row(batch=16),
            "generate-y": generate_row(load_seconds=3.0),
        }
    )
    assert "| 4000 × 5000 | uint4:g128 | 16 | 20.0 | 32.0 | 2.00 | 60.0 | 3.00 | 1.0e-03 |" in text
    assert "| 4000 × 5000 | uint8:g128 | 1 | 20.0 | 501 |" in text
    source = "· GPU, jax 0.99"
    command = "mpjax bench gemm --formats uint4:g128 --rows 1,16 --shapes model.map"
    assert f"`{command}` {source}" in text
    assert "--formats uint8:g128 --rows 1 --shapes model.map" in text
    assert f"`mpjax bench generate --precision W4A16KV8 --batch 16` {source}" in text
    assert "--batch 2 --from-disk`" in text
    assert text.index("| W4A16KV8 | 2 |") < text.index("| W4A16KV8 | 16 |")
    assert "| matmul | 1500 µs | 79% |\n| other | 400 µs | 21% |" in text
    assert "`mpjax bench attention --shapes " in text
    assert "read the same copy" in text
    assert "| KV8 | 1.25% | 1.25% | 1.25% |" in text
    output = "--output benchmarks/results/perplexity"
    assert f"`mpjax evaluate {output}.json` ·" in text
    command = "mpjax evaluate --precision W16A16KV8s --calibrate a.txt"
    assert f"`{command} {output}-calibrated.json` ·" in text
    command = "mpjax evaluate Other-1.5B.Q4_1.gguf --precisions W16A16KV8s --text book.txt"
    assert f"`{command} {output}-other-1.5b.q4_1.json` ·" in text
    assert text.index(command) > text.index("## Perplexity of Other-1.5B.Q4_1.gguf")
    assert "| W4A16KV8 | gptq | 262,144 | 10.0 | 7.0 | 10.0 GB | 5.0 GB | 2.0 GB |" in text
    assert "`python -m benchmarks.memory --precision W4A16KV8 --method gptq --layers 4`" in text
    command = "mpjax evaluate --against itself --window 512 --precisions W16A16KV8s,W16A16KV16H8"
    output = "--output benchmarks/results/agreement"
    assert f"`{command} {output}.json` {source}" in text
    options = "--against itself --window 512 --precisions W16A16KV16H8"
    assert f"`mpjax evaluate Other-1.5B.Q4_1.gguf {options} {output}-other-1.5b.q4_1.json`" in text
    assert "](agreement-other" not in text  # a plot over bits needs two numbers of them
    assert "5,110 positions" in text
    assert text.count("| W16A16KV8s | 4.25 | 8.0000 | +0.00 % | 0.25000 ± 0.25000 |") == 1
    for name in ("gemm-model.svg", "generate.svg", "attention.svg", "agreement-bundled.svg"):
        assert f"]({name})" in text
        assert (tmp_path / "docs" / "benchmarks" / name).is_file()
    svg = (tmp_path / "docs" / "benchmarks" / "gemm-model.svg").read_text()
    assert "uint4:g128" in svg
    assert "uint8:g128" in svg


def test_products_with_another_plan_since_are_marked(page):
    entries = tables.read(OPERATION, SHIPPED / file_name("NVIDIA H200"), "NVIDIA H200").entries
    tuned = next(key for key, entry in entries.items() if entry.plan.config is not None)
    limits, found = report.GPUS["NVIDIA H200"], []
    by_rule = Problem(7, ProductFormat.of("uint4:g128"), 4224, 4224, limits)
    for key, plan in (
        (tuned, entries[tuned].plan),
        (OPERATION.key_of(by_rule), plan_by_rule(by_rule)),
    ):
        assert plan.config is not None
        place = {"format": key.format, "K": key.channels, "N": key.outputs, "M": key.rows}
        for stages in (plan.config.stages, plan.config.stages + 1):
            config = dataclasses.asdict(plan.config) | {"stages": stages}
            found.append(gemm_row(implementation="triton", configuration=config, **place))
    text = page(gemm={"results": found, "device": "NVIDIA H200"})
    marks = [line.endswith("| triton \\* |") for line in text.splitlines() if "| triton" in line]
    assert marks == [False, True, False, True]
    assert "\\* The plan of 2 of 4 rows has changed since." in text


def test_a_command_names_what_was_measured(page, tmp_path):
    names = ("qkv", "output", "gate_up", "down")
    rounded = gemm_row(shape="llama3-70b.down", rounded=True, format="liquid4:g64/int8")
    text = page(
        **{
            "gemm": {"results": [gemm_row(shape=f"qwen3-8b.{name}") for name in names]},
            "gemm-one": {"results": [gemm_row(shape="qwen3-8b.down")]},
            "gemm-forced": {
                "results": [gemm_row(shape="llama3-70b.qkv", forced="dequantize", format="table4")]
            },
            "gemm-in-model": {"results": [gemm_row(shape="llama3-70b.down", in_model=True)]},
            "gemm-rounded": {"results": [rounded, gemm_row(shape="qwen3-8b.down", rounded=True)]},
        }
    )
    command = "mpjax bench gemm --formats uint4:g128 --rows 1"
    assert f"`{command} --shapes qwen3-8b` ·" in text
    assert f"`{command} --shapes qwen3-8b.down` ·" in text
    assert "--shapes llama3-70b.qkv --implementation dequantize` ·" in text
    assert f"`{command} --shapes llama3-70b.down --in-model` ·" in text
    assert "--shapes llama3-70b.down,qwen3-8b.down --rounded` ·" in text
    names = {path.name for path in (tmp_path / "docs" / "benchmarks").glob("gemm-*.svg")}
    assert names == {"gemm-qwen3-8b.svg"}, "what was forced has no line, nor what is a part"


def test_a_plot_has_the_rows_of_one_gpu(page, tmp_path):
    other = {"results": [gemm_row(shape="llama3-70b.down")], "device": "another"}
    rows = [gemm_row(shape="qwen3-8b.down")]
    text = page(**{"gemm": {"results": rows}, "gemm-more": {"results": rows}, "gemm-other": other})
    assert "another" in text
    names = {path.name for path in (tmp_path / "docs" / "benchmarks").glob("gemm-*.svg")}
    assert names == {"gemm-qwen3-8b.svg"}


def test_sweeps_of_generation_have_a_table_and_a_plot_each(page, tmp_path):
    filled = {"filled": True, "time_to_first_token_seconds": None, "logprob_difference": None}
    text = page(
        **{
            "generate": {
                "results": [
                    generate_row(precision=precision, batch=batch, **({} if batch == 1 else filled))
                    for precision in ("W4A16KV8", "W16A16KV8")
                    for batch in (1, 16)
                ]
            },
            "generate-context": {
                "results": [
                    generate_row(prompt_tokens=1024, new_tokens=128),
                    generate_row(prompt_tokens=131072, new_tokens=128, **filled),
                ]
            },
        }
    )
    assert "`mpjax bench generate --precision W4A16KV8,W16A16KV8 --batch 1,16 --filled` ·" in text
    command = "--precision W4A16KV8 --batch 2 --prompt-tokens 1024,131072 --new-tokens 128 --filled"
    assert f"`mpjax bench generate {command}` ·" in text
    rows = [line.split(" | ")[:4] for line in text.splitlines() if "W" in line and "| " in line]
    assert [row[:3] for row in rows] == [
        ["| W4A16KV8", "1", "2048"],
        ["| W16A16KV8", "1", "2048"],
        ["| W4A16KV8", "16", "2048"],
        ["| W16A16KV8", "16", "2048"],
        ["| W4A16KV8", "2", "1024"],
        ["| W4A16KV8", "2", "131072"],
    ]
    assert rows[-2][3] == "50.0 ms"
    assert rows[-1][3] == ""
    assert text.count("Kernels of a decoding step") == 2
    assert "a cache of random keys and values" in text
    assert "128K" in (tmp_path / "docs" / "benchmarks" / "generate-context.svg").read_text()
    assert "batch 16" in (tmp_path / "docs" / "benchmarks" / "generate.svg").read_text()


def test_what_was_not_measured_is_left_out(page, tmp_path):
    text = page(attention={"results": [attention_row(copies=5)]})
    assert "# Paged attention" in text
    assert "# Products" not in text
    assert "# Whole models" not in text
    assert "read the same copy" not in text
    assert not list((tmp_path / "docs" / "benchmarks").glob("*.svg"))
    overview = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "## Attention over the cache" in overview
    assert "## Products" not in overview


def test_the_pages_in_the_docs_are_those_of_the_results(tmp_path):
    report.write(report.RESULTS, tmp_path)
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")}
    kept = {path.relative_to(report.DOCS) for path in (report.DOCS / "benchmarks").iterdir()}
    assert written == kept | {Path("benchmarks.md")}
    for path in written:
        if path.suffix == ".md":
            assert (tmp_path / path).read_text() == (report.DOCS / path).read_text(), path


def test_the_overview_is_short():
    assert len((report.DOCS / "benchmarks.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("pattern", "bench"),
    [("generate*.json", generate), ("gemm*.json", gemm), ("attention*.json", attention)],
)
def test_recorded_results_are_within_their_gates(pattern, bench):
    paths = sorted(report.RESULTS.glob(pattern))
    assert paths
    for path in paths:
        result = json.loads(path.read_text())
        rows = result.get("results", [result])
        assert bench.failures(rows) == []
