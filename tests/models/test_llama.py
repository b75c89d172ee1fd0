from __future__ import annotations

from mpjax.models import Llama, llama_layers
from mpjax.models.presets import FILES

LLAMA3_1_8B = FILES["llama3.1-8b"]


def test_biases_are_read():
    config = Llama.config_from_hf(LLAMA3_1_8B)
    assert config.layers == llama_layers((None,) * 32, 14336)
    config = Llama.config_from_hf(LLAMA3_1_8B | {"attention_bias": True, "mlp_bias": True})
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
    assert config.layers == llama_layers((None,) * 32, 14336, **biases)
