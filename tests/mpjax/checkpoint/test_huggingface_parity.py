"""Logits and greedy tokens against transformers, on randomly initialised models in float32."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from mpjax.checkpoint import huggingface
from mpjax.generation.decoding import generate_tokens
from mpjax.loading import load
from tests.mpjax.checkpoint.write_checkpoint import (
    FP8,
    LLAMA3_SCALING,
    pack_module_fp8,
)
from tests.sweeps import in_sweep, is_asked_for

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)  # for such small products, more threads only wait for each other

BATCH, PROMPT, NEW_TOKENS, VOCABULARY = 2, 12, 32, 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# The sizes of models with two kinds of layers, and of two with equal layers, the second of which
# says different tokens only then. Other models have one layer, which compiles faster.
TWO_LAYERS = {"num_hidden_layers": 2}
ORIGINAL = "original_max_position_embeddings"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
}
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", TWO_LAYERS),
    "llama-tied": ("Llama", {"tie_word_embeddings": True} | TWO_LAYERS),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-scaling": (
        "Llama",
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3_SCALING}, "head_dim": 32},
    ),
    "llama-linear-scaling": (
        "Llama",
        {  # of more tokens than there are positions before the scaling
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
            "max_position_embeddings": 20,
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} | TWO_LAYERS,
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            **{"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
            **{"layer_types": ["sliding_attention", "full_attention"], "head_dim": 32},
            **{"tie_word_embeddings": False},
        }
        | TWO_LAYERS,
    ),
    "granite": (
        "Granite",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.4, "logits_scaling": 0.5, "rms_norm_eps": 0.01},
        },
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1]} | TWO_LAYERS),
    "phi3-long": ("Phi3", {"rope_parameters": LONGROPE, ORIGINAL: 24}),
    "llama-dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 24,
        },
    ),
}


def build(family: str, changes: dict, configured: str | None = None):
    """A model with all of its parameters random: norms and biases too.

    configured: what the class of its configuration is named after, the family by default.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{configured or family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def edit_config(folder, **changes):
    hf = huggingface.read_config(folder) | changes
    (folder / "config.json").write_text(json.dumps(hf))


def as_transformers_reads(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def compare_logits(model, folder, request, precision=None):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, 40))
    loaded = load(folder, precision=precision, dtype="float32").model
    expected = reference_logits(model, tokens)
    logits = jax.jit(lambda model, tokens: model(tokens))(loaded, tokens.astype(np.int32))
    error = np.abs(np.asarray(logits) - expected).max()
    print(f"{request.node.name}: error {error:.2e} of logits up to {np.abs(expected).max():.1f}")
    assert np.abs(expected).max() > 1  # else the tolerance would say nothing
    assert error < 3e-5
    return loaded, tokens[:, :PROMPT]


def require_greedy_tokens(model, loaded, prompt, count=NEW_TOKENS):
    greedy = model.generate(
        torch.from_numpy(prompt),
        attention_mask=torch.ones(*prompt.shape, dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
    )
    lengths, options = np.full(BATCH, PROMPT), {"sampling": {"stop_ids": ()}}
    found = generate_tokens(loaded, prompt, lengths, max_new_tokens=count, **options).tokens
    np.testing.assert_array_equal(found, greedy.numpy()[:, PROMPT:])
    return found


def compare(model, folder, request, precision=None):
    found = require_greedy_tokens(model, *compare_logits(model, folder, request, precision))
    assert len(np.unique(found)) > 8  # else equal texts would say nothing


# What they have, others have too, or the tests of tied models below.
SWEPT = ("llama-tied", "llama-multi-head", "llama-linear-scaling", "qwen2", "qwen2-tied")
# Models whose greedy tokens are compared by default, beside their logits: windows, capped logits,
# layers without a rotation, and angles that depend on the length.
GREEDY = ("qwen3", "mistral-window", "gemma2", "smollm3", "phi3-long", "llama-dynamic")


@pytest.mark.parametrize("name", [in_sweep(n) if n in SWEPT else n for n in MODELS])
def test_plain_checkpoints(name, tmp_path, request):
    model = build(*MODELS[name])
    model.save_pretrained(tmp_path)
    is_generated = name in GREEDY or is_asked_for(request.config)
    (compare if is_generated else compare_logits)(model, tmp_path, request)


@pytest.mark.parametrize(
    "added", [{"type": "linear", "factor": 4.0}, LLAMA3_SCALING], ids=["linear", "llama3"]
)
def test_scaling_that_was_added_to_a_newer_file(added, tmp_path, request):
    model = build("Llama", {})
    model.save_pretrained(tmp_path)
    assert huggingface.read_config(tmp_path)["rope_parameters"]["rope_type"] == "default"
    edit_config(tmp_path, rope_scaling=added)
    scaled = as_transformers_reads(tmp_path)
    tokens = np.arange(40)[None]
    assert np.abs(reference_logits(scaled, tokens) - reference_logits(model, tokens)).max() > 0.1
    compare_logits(scaled, tmp_path, request)


def test_a_tied_model_with_another_head(tmp_path, request):
    model = build("Qwen2", {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    safetensors.numpy.save_file(tensors, file)
    with pytest.warns(UserWarning, match="but lm_head.weight is not model.embed_tokens.weight"):
        compare_logits(as_transformers_reads(tmp_path), tmp_path, request)


def test_a_tied_model_that_safetensors_saved(tmp_path, request):
    model = build("Qwen2", {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))  # type: ignore[attr-defined]
    names = safetensors.numpy.load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    compare_logits(model, tmp_path, request)


def test_shards_of_transformers(tmp_path, request):
    model = build("Qwen3", {"head_dim": 32})
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    compare_logits(model, tmp_path, request)


def test_fp8_as_transformers_reads_it(tmp_path):
    """Where there is no GPU, transformers dequantises the fine-grained format itself."""
    pytest.importorskip("accelerate")
    # A whole number of blocks: transformers divides the weight by the number of its scales.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    model = build("Qwen3", sizes | {"head_dim": 128})
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
            pack_module_fp8(tensors, FP8, module_name)
    safetensors.numpy.save_file(tensors, file)
    edit_config(tmp_path, quantization_config=FP8)
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=["lm_head"], dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=config
    )
    loaded = load(tmp_path, dtype="float32").model
    weights = dict(reference.named_parameters())
    for place in loaded.linear_places(loaded.config):
        [kernel] = place.kernels(loaded)
        expected = [weights[f"{name}.weight"].detach().numpy().T for name in place.names]
        np.testing.assert_array_equal(kernel.dequantize(), np.concatenate(expected, 1))
