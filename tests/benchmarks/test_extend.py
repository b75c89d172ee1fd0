from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import extend
from mpjax.bench import measure
from mpjax.models import llama_layers
from mpjax.models.presets import QWEN3_8B

pytestmark = pytest.mark.any_version

KERNELS = {
    "attention_kv8": 100.0,
    "rotate_and_append_kv8__1": 30.0,
    "matmul_warpgroups_uint4_mosaic_gpu_kernel": 500.0,
    "gemm_fusion_dot_2": 40.0,
    "add_rms_norm": 10.0,
    "loop_select_fusion": 5.0,
}


def test_kernels_are_grouped():
    assert extend.grouped(KERNELS) == {
        "attention": 100,
        "append": 30,
        "norms and gates": 10,
        "products": 540,
        "other": 5,
    }


def test_every_program_runs_and_is_printed(tmp_path, monkeypatch, capsys):
    """The programs read and draw, from the positions that their names say."""
    small = dataclasses.replace(
        QWEN3_8B,
        vocab_size=64,
        stop_ids=(),
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        layers=llama_layers((None,), 128, qk_norm=True),
    )
    sizes = {"CHUNK": 64, "PROMPT": 32, "NEW": 16, "LATE": 192, "AT": (0, 128), "STATIC": 4}
    for name, value in (sizes | {"PIECES": (16,), "QWEN3_8B": small}).items():
        monkeypatch.setattr(extend, name, value)
    starts = []

    def profiled(call, iterations):
        assert call().shape[0]
        return KERNELS

    def read(bench, case):
        found = reads(bench, case)
        starts.append((case.tokens, bench.state.lengths.max().item()))
        return found

    reads = extend.Bench.read
    monkeypatch.setattr(extend.Bench, "read", read)
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(measure, "kernel_microseconds", profiled)
    assert extend.main([str(tmp_path)]) == 0
    assert {(32, 32), (64, 64), (16, 16), (64, 128), (64, 192), (16, 144)} == {*starts}
    rows = json.loads((tmp_path / "extend.json").read_text(encoding="utf-8"))["results"]
    names = ["static, 4 x 32", "2 x 32", "1 x 64", "1 x 16", "1 x 64 at 128", "1 x 16 at 128"]
    assert [row["program"] for row in rows] == names
    assert rows[0]["groups"]["products"] == 270  # half of the static batch is a chunk
    printed = capsys.readouterr().out
    assert "500.0  matmul_warpgroups" in printed
    assert "0.54" in printed


def test_a_folder_is_needed(capsys):
    assert extend.main([]) == 2
    assert "benchmarks.extend OUT" in capsys.readouterr().err
