from __future__ import annotations

import time

import numpy as np
import pytest

import mpjax
from benchmarks import memory

pytestmark = pytest.mark.any_version

TINY = memory.QWEN3_8B | {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "eos_token_id": 0,
}


def test_a_checkpoint_is_written_and_quantised(tmp_path):
    memory.write_checkpoint(tmp_path / "tiny", TINY)
    calibration = mpjax.Calibration(window=64, tokens=256, batch=2)
    recipe = mpjax.Recipe.of("W4g32A16KV16", "gptq")
    found = memory.run(tmp_path / "tiny", recipe, calibration, 36)
    assert (found["layers"], found["all_layers"]) == (3, 36)
    assert found["hidden_states_bytes"] == 256 * 64 * 2
    assert found["host_peak_bytes"] >= found["host_bytes_before"] > 0
    peaks, started = found["host_peak_bytes_by_kind"], found["host_bytes_of_started_device"]
    assert all(peaks[kind] >= size for kind, size in started.items())
    assert sum(started[kind] for kind in ("anonymous", "files", "shared")) == started["all"]
    assert 0 < found["seconds_of_layer"] < found["seconds"] < found["seconds_of_all_layers"]
    assert found["packed_layer_bytes"] > 0
    of_layers = found["host_anonymous_peak_bytes_of_layers"]
    assert len(of_layers) == 3
    assert max(of_layers) <= peaks["anonymous"]


def test_peaks_are_seen_though_they_pass():
    before = memory.resident_bytes()
    with memory.Watch() as watch:
        np.ones(1 << 24).sum()
        time.sleep(2 * memory.INTERVAL)
        held = np.ones(1 << 24)
        time.sleep(5 * memory.INTERVAL)
        del held
    assert watch.peaks["anonymous"] >= before["anonymous"] + (100 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "1"), "--layers is less than 2"),
        (("--hidden", "640"), "--hidden is no multiple of 512"),
    ],
)
def test_sizes_that_can_not_be_measured(options, message, capsys):
    with pytest.raises(SystemExit):
        memory.main(options)
    assert message in capsys.readouterr().err
