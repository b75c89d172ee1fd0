from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from typer.testing import CliRunner

import mpjax
from mpjax.cli.application import app


def convert(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_the_target_is_the_source_in_another_precision(tiny_folder, tmp_path):
    target = tmp_path / "converted"
    options = ("--precision", "W4A16KV8", "--dtype", "bfloat16", "--max-positions", "300")
    result = convert(tiny_folder, target, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    before, after = result.stdout.splitlines()
    assert re.fullmatch(rf"{tiny_folder}: 2\.49 MB of weights", before)
    assert re.fullmatch(
        rf"{target}: [\d.]+ MB of weights, W4A16KV8, [\d.]+ MB in device memory", after
    )
    saved = mpjax.load(target)
    assert saved.precision == "W4A16KV8"
    assert saved.config.max_position_embeddings == 300
    expected = mpjax.load(tiny_folder, precision="W4A16KV8", dtype="bfloat16")
    words = [
        leaf
        for lm in (saved, expected)
        for leaf in jax.tree.leaves(nnx.state(lm.model))
        if leaf.dtype == jnp.uint16
    ]
    assert len(words) == 2 * 4
    for ours, theirs in zip(words[:4], words[4:], strict=True):
        np.testing.assert_array_equal(ours, theirs)

    again = convert(tiny_folder, target, *options)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "is not empty" in again.stderr
    assert "--overwrite" in again.stderr
    assert convert(tiny_folder, target, "--dtype", "bfloat16", "--overwrite").exit_code == 0
    description = json.loads((target / "mpjax.json").read_text())
    assert description["kv_format"] == "KV16"


def test_scales_are_measured_and_saved(tiny_folder, tmp_path):
    text, target = tmp_path / "text.txt", tmp_path / "converted"
    text.write_text("import os\nimport sys\n")
    precision = ("--precision", "W16A16KV8s")
    result = convert(tiny_folder, target, *precision, "--calibrate", text)
    assert (result.exit_code, result.stderr) == (0, "")
    lm = mpjax.load(tiny_folder, precision="W16A16KV8s")
    expected = mpjax.calibrate_cache(lm, [text.read_text()]).model.cache_scales
    found = mpjax.load(target).model.cache_scales
    assert found is not None
    assert expected is not None
    np.testing.assert_array_equal(found.get_value(), expected.get_value())
    lines = text.with_suffix(".jsonl")
    lines.write_text(json.dumps({"text": text.read_text()}))
    convert(tiny_folder, target, *precision, "--calibrate", lines, "--overwrite")
    found = mpjax.load(target).model.cache_scales
    assert found is not None
    np.testing.assert_array_equal(found.get_value(), expected.get_value())
