"""Packed folders of families whose mixers keep a state, written and read."""

from __future__ import annotations

import numpy as np
import pytest

import mpjax
from tests.models.small import logits_of
from tests.mpjax.checkpoint.test_huggingface_parity import (
    as_transformers_reads,
    reference_logits,
)
from tests.mpjax.checkpoint.test_hybrid_families import FAMILIES, VOCABULARY, build
from tests.sweeps import in_sweep

pytest.importorskip("torch")

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 20))
LAYOUTS = ("awq", "gptq", "pack-quantized")
# Each layout once, and the others in the sweep.
CASES = [("qwen3.5", "awq"), ("nemotron-h", "gptq"), ("qwen3-next", "pack-quantized")]
OTHERS = [
    (name, layout)
    for name in ("qwen3.5", "qwen3-next", "nemotron-h", "lfm2")
    for layout in LAYOUTS
    if (name, layout) not in CASES
]
# Whose maps have outputs that AWQ's and GPTQ's words of eight don't divide.
OTHERS += [(name, "pack-quantized") for name in ("granite-hybrid-dense", "falcon-h1")]


@pytest.mark.parametrize(("name", "layout"), [*CASES, *(in_sweep(*case) for case in OTHERS)])
def test_packed_folders_hold_what_was_exported(name, layout, tmp_path):
    """And the weights that they stand for are transformers' own model, in a plain folder."""
    build(*FAMILIES[name]).save_pretrained(tmp_path / "source")
    lm = mpjax.load(tmp_path / "source", precision="W4g32A32KV16", dtype="float32")
    mpjax.export(lm, tmp_path / "packed", format=layout)
    mpjax.export(lm, tmp_path / "plain", format="plain")
    again = mpjax.load(tmp_path / "packed", dtype="float32")
    assert again.precision == lm.precision
    tokens = TOKENS.astype(np.int32)
    found = np.asarray(logits_of(again.model, tokens))
    expected = reference_logits(as_transformers_reads(tmp_path / "plain"), TOKENS)
    assert abs(expected).max() > 0.1
    assert abs(found - expected).max() < 3e-5 * max(1, abs(expected).max())
