from __future__ import annotations

import mpjax
from mpjax.bench import checkpoint
from tests.mpjax.bench.rows import SMALL_MODEL


def test_it_loads_as_an_awq_model_of_the_configuration(tmp_path):
    config = checkpoint.qwen3_config(SMALL_MODEL) | {"vocab_size": 2048}
    folder = checkpoint.write(tmp_path / "model", config, "W4A16KV16", "awq")
    lm = mpjax.load(folder, precision="A16KV8", progress=False)
    assert (lm.precision, lm.config.layers) == ("W4A16KV8", SMALL_MODEL.layers)
