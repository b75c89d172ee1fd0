from __future__ import annotations

import dataclasses

import pytest

import mpjax
from benchmarks import memory
from mpjax.bench import checkpoint
from mpjax.models import llama_layers
from tests.mpjax.bench.rows import SMALL_MODEL

pytestmark = pytest.mark.any_version


@pytest.mark.sweep
def test_a_checkpoint_is_written_and_quantised(tmp_path):
    small = dataclasses.replace(
        SMALL_MODEL, vocab_size=2048, layers=llama_layers((None,) * 3, 128, qk_norm=True)
    )
    config = checkpoint.qwen3_config(small)
    folder = checkpoint.write(tmp_path / "tiny", config, "W16A16KV16", "plain")
    calibration = mpjax.Calibration(window=64, tokens=256, batch=2)
    recipe = mpjax.Recipe.of("W4g32A16KV16", "gptq")
    found = memory.run(folder, recipe, calibration, 36)
    assert (found["layers"], found["all_layers"]) == (3, 36)
    assert found["hidden_states_bytes"] == 256 * 128 * 2
    assert found["host_peak_bytes"] >= found["host_bytes_before"] > 0
    peaks, started = found["host_peak_bytes_by_kind"], found["host_bytes_of_started_device"]
    assert all(peaks[kind] >= size for kind, size in started.items())
    assert sum(started[kind] for kind in ("anonymous", "files", "shared")) == started["all"]
    assert 0 < found["seconds_of_layer"] < found["seconds"] < found["seconds_of_all_layers"]
    assert found["packed_layer_bytes"] > 0
    of_layers = found["host_anonymous_peak_bytes_of_layers"]
    assert len(of_layers) == 3
    assert max(of_layers) <= peaks["anonymous"]
