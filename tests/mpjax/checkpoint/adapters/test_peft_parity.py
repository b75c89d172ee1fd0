"""Adapters against PEFT over transformers, on randomly initialised models in float32."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from mpjax.checkpoint.adapters.folder import read_adapter
from mpjax.checkpoint.adapters.merging import merge
from mpjax.checkpoint.saving import save
from mpjax.errors import CheckpointError
from mpjax.loading import load
from mpjax.models.low_rank import attach
from tests.mpjax.checkpoint.test_huggingface_parity import VOCABULARY, build

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

# PEFT's own, of which transformers takes one for out of date.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning"),
]

LLAMA, BIASES = ("Llama", {}), ("Llama", {"attention_bias": True, "mlp_bias": True})
MIXTRAL = ("Mixtral", {"num_local_experts": 3})
PHI, TIED = ("Phi3", {}), ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True})
GPT_OSS = ("GptOss", {"head_dim": 32, "num_local_experts": 3, "num_experts_per_tok": 2})
LFM2 = (
    "Lfm2Moe",
    {
        **{"layer_types": ["full_attention"], "num_dense_layers": 0, "num_experts": 3},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 64},
    },
)
GRANITE = ("GraniteMoe", {"num_local_experts": 3, "num_experts_per_tok": 2})
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "patterns": (
        LLAMA,
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 2, r"layers\.0\.mlp\.up_proj": 9},
            "alpha_pattern": {"self_attn.k_proj": 5},
        },
    ),
    "rslora": (PHI, {"target_modules": ["qkv_proj", "gate_up_proj"], "use_rslora": True}),
    "dora": (BIASES, {"target_modules": "all-linear", "use_dora": True}),
    "tables": (LLAMA, {"target_modules": ["o_proj", "embed_tokens", "lm_head"]}),
    "saved-tables": (LLAMA, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved-tied": (TIED, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved-head": (LLAMA, {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": (
        LLAMA,
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 70, 5], "lm_head": [9]},
        },
    ),
    "tokens-tied": (TIED, {"target_modules": ["v_proj"], "trainable_token_indices": [*range(40)]}),
    "experts": (
        MIXTRAL,
        {
            "target_modules": ["q_proj"],
            "target_parameters": EXPERTS,
            "rank_pattern": {"mlp.experts.down_proj": 3},
        },
    ),
    "experts-down": (MIXTRAL, {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "experts-of-a-feed-forward": (
        LFM2,
        {
            "target_modules": ["q_proj"],
            "target_parameters": [name.replace("mlp", "feed_forward") for name in EXPERTS],
        },
    ),
    "stacked-experts": (
        GRANITE,
        {
            "target_modules": [],
            "target_parameters": [name.replace("mlp", "block_sparse_moe") for name in EXPERTS],
        },
    ),
    "alternating-experts": (GPT_OSS, {"target_modules": [], "target_parameters": EXPERTS}),
}


def write_both(folder, family, changes, ids=VOCABULARY, **keys):
    """Writes a base and an adapter; returns tokens, and the logits of both by transformers.

    ids: of the base of the adapter, whose tables are the base's with more or fewer rows.
    """
    model = build(family, changes)
    model.save_pretrained(folder / "base")
    tokens = np.random.default_rng(0).integers(0, ids, (2, 10))
    if ids != VOCABULARY:
        model.resize_token_embeddings(ids, mean_resizing=False)
    with torch.no_grad():
        base = model(torch.from_numpy(tokens)).logits.numpy()
        config = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **keys)
        adapted = peft.get_peft_model(model, config).eval()
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name or "tokens_delta" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
        saves_tables = "auto" if ids == VOCABULARY else True
        adapted.save_pretrained(folder / "adapter", save_embedding_layers=saves_tables)
        return tokens, base, adapted(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("name", CASES)
def test_logits(name, tmp_path):
    (family, changes), keys = CASES[name]
    tokens, base, expected = write_both(tmp_path, family, changes, **keys)
    lm = load(tmp_path / "base", dtype="float32", adapters={"x": tmp_path / "adapter"})
    places = jnp.array([lm.adapters["x"].place, 0])
    found = np.asarray(lm.adapted(tokens.astype(np.int32), places))
    assert abs(expected - base).max() > 0.5
    np.testing.assert_allclose(found[0], expected[0], atol=5e-5)
    np.testing.assert_allclose(found[1], base[1], atol=5e-5)


TABLES = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}


@pytest.mark.parametrize(
    ("base", "keys"),
    [(LLAMA, TABLES), (TIED, {"target_modules": ["v_proj"]})],
    ids=["LoRA", "tied"],
)
def test_more_tokens_than_the_base_s(base, keys, tmp_path):
    """They are folded in: rows of other adapters have no such tokens."""
    tokens, _, expected = write_both(tmp_path, *base, ids=VOCABULARY + 5, **keys)
    lm = load(tmp_path / "base", dtype="float32")
    adapter = read_adapter(tmp_path / "adapter", lm.model)
    merged = merge(lm, adapter)
    assert merged.config.vocab_size == VOCABULARY + 5
    found = merged.model(tokens.astype(np.int32))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    save(merged, tmp_path / "saved")
    assert load(tmp_path / "saved").config == merged.config
    with pytest.raises(ValueError, match=r"whole parameters \(\w+\), which rows can't"):
        lm.add_adapter("x", adapter)


def test_fewer_tokens_than_the_base_s(tmp_path):
    """As where the base's tables have rows that no token of the tokenizer has."""
    tokens, _, expected = write_both(tmp_path, *LLAMA, ids=VOCABULARY - 6, **TABLES)
    lm = load(tmp_path / "base", dtype="float32", adapters={"x": tmp_path / "adapter"})
    found = lm.adapted(tokens.astype(np.int32), jnp.full(2, lm.adapters["x"].place))
    np.testing.assert_allclose(found[..., : VOCABULARY - 6], expected, atol=5e-5)


JOINT = ("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))


def rename(folder, make):
    """Writes an adapter's tensors again as `make` gives them."""
    file = folder / "adapter_model.safetensors"
    safetensors.numpy.save_file(make(safetensors.numpy.load_file(file)), file)


def split_joint(tensors, sizes):
    """A joint module's factors as those of its parts."""
    found = {}
    for name, array in tensors.items():
        joint, parts = next(pair for pair in JOINT if pair[0] in name)
        ends = np.cumsum(sizes[joint])[:-1]
        all_rows = np.split(array, ends) if "lora_B" in name else [array] * len(parts)
        for part, rows in zip(parts, all_rows, strict=True):
            found[name.replace(joint, part)] = np.ascontiguousarray(rows)
    return found


def test_parts_of_a_joint_map(tmp_path):
    """A base whose files hold query, key and value as one map, and an adapter of each."""
    keys = {"target_modules": ["qkv_proj", "gate_up_proj"]}
    tokens, _, expected = write_both(tmp_path, *PHI, **keys)
    sizes = {"qkv_proj": (64, 32, 32), "gate_up_proj": (128, 128)}
    rename(tmp_path / "adapter", lambda tensors: split_joint(tensors, sizes))
    require_logits(tmp_path, tokens, expected)


def test_experts_with_names_of_their_own(tmp_path):
    """Older trainers write a module for each map of each expert."""
    keys = {"target_modules": [], "target_parameters": EXPERTS}
    tokens, _, expected = write_both(tmp_path, *MIXTRAL, **keys)

    def make(tensors):
        found = {}
        for name, array in tensors.items():
            module, factor = re.fullmatch(r"(.*)\.lora_([AB])\.weight", name).groups()
            is_first = module.endswith(".base_layer")
            module = module.removesuffix(".base_layer").replace("mlp", "block_sparse_moe")
            per_expert = array.reshape(3, 4, -1) if factor == "A" else array.reshape(-1, 4, 3).T
            for expert, own in enumerate(per_expert):
                own = own if factor == "A" else own.T
                parts = np.split(own, 2) if is_first and factor == "B" else [own] * 2
                for part, rows in zip(("w1", "w3") if is_first else ("w2",), parts, strict=False):
                    key = f"{module}.{expert}.{part}.lora_{factor}.weight"
                    found[key] = np.ascontiguousarray(rows)
        return found

    stack = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    rename(tmp_path / "adapter", make)
    lm = require_logits(tmp_path, tokens, expected)
    rename(tmp_path / "adapter", lambda tensors: tensors | stack)
    with pytest.raises(CheckpointError, match="is changed twice, by a module of several maps"):
        read_adapter(tmp_path / "adapter", lm.model)


def test_mlx(tmp_path):
    """MLX's names, its transposed factors, and a scale that no rank divides."""
    tokens, _, expected = write_both(tmp_path, *LLAMA, target_modules=["q_proj", "up_proj"])
    folder = tmp_path / "adapter"
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    renamed = {
        name.removeprefix("base_model.model.")
        .replace("lora_A.weight", "lora_a")
        .replace("lora_B.weight", "lora_b"): np.ascontiguousarray(array.T)
        for name, array in tensors.items()
    }
    safetensors.numpy.save_file(renamed, folder / "adapters.safetensors")
    keys = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 1.5}, "iters": 9}
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    require_logits(tmp_path, tokens, expected)


def require_logits(folder, tokens, expected):
    lm = load(folder / "base", dtype="float32", adapters={"x": folder / "adapter"})
    changes = {
        path: change.map(jnp.asarray) for path, change in lm.adapters["x"].adapter.changes.items()
    }
    found = jax.jit(lambda model, tokens: model(tokens))(
        attach(lm.model, changes), tokens.astype(np.int32)
    )
    np.testing.assert_allclose(found, expected, atol=5e-5)
    return lm
