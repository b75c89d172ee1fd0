"""Values of config.json, one case a line."""

from __future__ import annotations

from tests.mpjax.bad_files.ways import Case, Way, config
from tests.mpjax.checkpoint.write_checkpoint import (
    GPTQ,
)

MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}


def quantized(written: object, **changes: object) -> Way:
    """config.json with a quantization_config."""
    return config(quantization_config=written, **changes)


def not_a(kind: str, key: str, *values: object, **others: object) -> list[tuple[Way, str]]:
    """A key of config.json with values that are not of a kind."""
    return [
        (config(**{key: value}, **others), f"{key} is {value!r:.80}: expected {kind}")
        for value in values
    ]


CONFIGS: list[Case] = [
    (f"{said}", way, f"config.json: {said}")
    for way, said in [
        *not_a("a list of names, such as", "architectures", [[1]], "LlamaForCausalLM", 5, {"a": 1}),
        (config(architectures=["Mamba"]), "unsupported architecture: 'Mamba'; supported are "),
        (config(architectures=None), "unsupported architecture: none (model_type 'llama')"),
        (config(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu' is supported"),
        *not_a("a positive integer", "vocab_size", 0, 1.0, "2", True, [2], {"a": 1}),
        *not_a("a positive integer", "head_dim", -16),
        *not_a("a positive, even number", "head_dim", 15),
        *not_a("at most 10000", "num_hidden_layers", 10**4000),
        (config(head_dim=None, hidden_size=60), "head_dim (hidden_size / num_attention_heads) is"),
        (
            config(head_dim=None, num_attention_heads=128),
            "head_dim (hidden_size / num_attention_hea",
        ),
        (config(num_key_value_heads=3), "num_attention_heads is 4 and num_key_value_heads 3:"),
        *not_a("a positive number", "rope_theta", -5, True, "1e-5", float("inf"), 10**400),
        *not_a("true or false", "mlp_bias", 1, "false", []),
        (config(torch_dtype="int8"), "dtype 'int8' is not supported: expected bfloat16, float16"),
        (config(torch_dtype=[1]), "dtype '[1]' is not supported: expected"),
        *not_a("token ids from 0 to 95", "eos_token_id", -1, 96, [2, "a"], True, "</s>", {"a": 1}),
        *not_a("an object", "rope_scaling", "linear", [1], 3),
        (config(rope_scaling={"rope_type": "ntk"}), "rotary scaling 'ntk' is not supported"),
        (config(rope_scaling={"rope_type": [1]}), "rotary scaling [1] is not supported"),
        *not_a("a positive integer, or null", "sliding_window", -1, **MISTRAL),
        *not_a("an integer from 0 on", "max_window_layers", "a", sliding_window=8, **QWEN),
        (config(layer_types=["chunked"] * 2, **MISTRAL), "layer_types must list 2 of ['full_"),
        (config(layer_types=[[1], [1]], **MISTRAL), "layer_types must list 2 of ['full_attention'"),
        *not_a("an object", "quantization_config", [], "awq", 4),
        (quantized({}), "quant_method None is not supported: load an AWQ"),
        (quantized({"quant_method": ["awq"]}), "quant_method ['awq'] is not supported"),
        # Others are in tests/mpjax/checkpoint/schemes/test_errors.py.
        (
            quantized(GPTQ | {"dynamic": {"(" * 9999 + ")" * 9999: {}}}),
            "quantization_config of a GPTQ checkpoint, dynamic",
        ),
    ]
]
# Sentences without the colon after the file's name.
CONFIGS += [
    (said, way, f"config.json{said}")
    for way, said in [
        *((config(**{key: None}), f" has no '{key}'") for key in ("hidden_size", "vocab_size")),
        (config(rope_scaling={"type": "linear"}), ", rotary scaling has no 'factor': expected a"),
        (config(rope_scaling=LLAMA3), ", rotary scaling has no 'high_freq_factor': expected a pos"),
        (config(rope_scaling={"type": "linear", "factor": 0}), ", rotary scaling: factor is 0:"),
    ]
]

# Things that config.json promises and the files don't hold.
LIES: list[Case] = [
    ("layers", config(num_hidden_layers=9_999), "config.json says that there are 9999 layers, and"),
    ("vocabulary", config(vocab_size=2**31 - 1), "embed_tokens.weight is float32 [96, 64]:"),
    ("hidden", config(hidden_size=2**30), "of shape [96, 1073741824]"),
    ("inner", config(intermediate_size=10**9), "of shape [1000000000, 64]"),
    ("heads", config(num_attention_heads=2**28), "of shape [4294967296, 64]"),
    ("head_dim", config(head_dim=10**9), "q_proj.weight is float32 [64, 64]: expected"),
]
