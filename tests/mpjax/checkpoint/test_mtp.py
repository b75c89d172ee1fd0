"""The multi-token-prediction head of a checkpoint is read if it is asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import mpjax
from mpjax.checkpoint.description import WEIGHTS_NAME
from mpjax.checkpoint.safetensors import read_header
from mpjax.errors import CheckpointError
from mpjax.kernels import QuantizedTensor
from tests.mpjax.checkpoint.test_huggingface_parity import SIZES, edit_config
from tests.mpjax.checkpoint.test_hybrid_families import DELTA, FAMILIES, build
from tests.mpjax.checkpoint.write_checkpoint import FP8, pack_module_fp8

PROMPT, OPTIONS = [5, 3, 9, 2, 7], {"max_new_tokens": 12, "sampling": {"temperature": 0}}


def head_tensors(changes: dict) -> dict[str, np.ndarray]:
    """The head's tensors as Qwen's files name them, small; those of experts are fused."""
    sizes = SIZES | changes
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    shapes = {
        "fc": (hidden, 2 * hidden),
        **dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (hidden,)),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (2 * heads * dim, hidden),
        "layers.0.self_attn.k_proj": (kv_heads * dim, hidden),
        "layers.0.self_attn.v_proj": (kv_heads * dim, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * dim),
        "layers.0.self_attn.q_norm": (dim,),
        "layers.0.self_attn.k_norm": (dim,),
    }
    if experts := changes.get("num_experts"):
        small, shared = changes["moe_intermediate_size"], changes["shared_expert_intermediate_size"]
        shapes |= {
            "layers.0.mlp.gate": (experts, hidden),
            "layers.0.mlp.shared_expert_gate": (1, hidden),
            "layers.0.mlp.shared_expert.gate_proj": (shared, hidden),
            "layers.0.mlp.shared_expert.up_proj": (shared, hidden),
            "layers.0.mlp.shared_expert.down_proj": (hidden, shared),
        }
    else:
        shapes |= {
            "layers.0.mlp.gate_proj": (inner, hidden),
            "layers.0.mlp.up_proj": (inner, hidden),
            "layers.0.mlp.down_proj": (hidden, inner),
        }
    named = {f"mtp.{module}.weight": shape for module, shape in shapes.items()}
    if experts:
        named["mtp.layers.0.mlp.experts.gate_up_proj"] = (experts, 2 * small, hidden)
        named["mtp.layers.0.mlp.experts.down_proj"] = (experts, hidden, small)
    assert len(named) == (19 if experts else 15)
    rng = np.random.default_rng(0)
    return {
        key: (0.2 * rng.standard_normal(shape)).astype(np.float32) for key, shape in named.items()
    }


@pytest.fixture(scope="module", params=["qwen3.5-tied", "qwen3.5-moe"])
def checkpoint(request, tmp_path_factory):
    """A folder with a head, and the head's tensors."""
    pytest.importorskip("torch")
    family, changes = FAMILIES[request.param]
    folder, tensors = tmp_path_factory.mktemp(request.param), head_tensors(changes)
    build(family, changes).save_pretrained(folder)
    whole = load_file(folder / "model.safetensors") | tensors
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder, tensors


def damage(folder, name: str) -> None:
    """Changes a byte of one array of a saved model."""
    info = read_header(folder / WEIGHTS_NAME)[name]
    with (folder / WEIGHTS_NAME).open("r+b") as file:
        file.seek(info.begin)
        byte = file.read(1)[0]
        file.seek(info.begin)
        file.write(bytes([byte ^ 1]))


def generate(lm, **how):
    return mpjax.generate(lm, [PROMPT], **OPTIONS, **how)


def test_it_is_read_quantised_saved_and_restored(checkpoint, tmp_path):
    folder, tensors = checkpoint
    plain = mpjax.load(folder, dtype="float32", precision="W32A32KV16")
    lm = mpjax.load(folder, dtype="float32", precision="W32A32KV16", mtp=True)
    assert lm.config.num_layers == plain.config.num_layers + 1 == lm.config.depth + 1
    layer, mixer = lm.model.layers[-1], lm.model.layers[-1].attention
    expected = {
        "fc": mixer.joint,
        "pre_fc_norm_embedding": mixer.embedding_norm.weight,
        "pre_fc_norm_hidden": mixer.hidden_norm.weight,
        "norm": mixer.norm.weight,
        "layers.0.input_layernorm": layer.attention_norm.weight,
        "layers.0.self_attn.k_norm": mixer.attention.key_norm.weight,
    }
    for name, found in expected.items():
        own = tensors[f"mtp.{name}.weight"]
        np.testing.assert_array_equal(found.get_value(), own + (own.ndim == 1))
    output = mixer.attention.output.kernel.get_value()
    np.testing.assert_array_equal(output.T, tensors["mtp.layers.0.self_attn.o_proj.weight"])
    told = generate(lm, speculate="mtp")
    assert told.tokens == generate(plain).tokens
    assert told.speculation.proposed[0] > 0
    lm = mpjax.load(folder, dtype="float32", precision="W8g32A16KV8", mtp=True)
    layer = lm.model.layers[-1]
    for linear in (layer.attention.attention.output, getattr(layer.mlp, "down", None)):
        assert linear is None or isinstance(linear.kernel.get_value(), QuantizedTensor)
    assert layer.attention.joint.get_value().dtype == jnp.float32
    mpjax.save(lm, tmp_path / "saved")
    mpjax.export(lm, tmp_path / "exported")
    for name in ("saved", "exported"):
        again = mpjax.load(tmp_path / name, mtp=True)
        assert again.config == lm.config
        both = (jax.tree.leaves(nnx.state(one.model)) for one in (lm, again))
        jax.tree.map(np.testing.assert_array_equal, *both)
    with pytest.raises(ValueError, match="head is not possible: load it without mtp=True"):
        mpjax.quantize(again, "W4A16KV16")
    damage(tmp_path / "saved", f"layers.{plain.config.num_layers}.mlp_norm.weight")
    with pytest.raises(CheckpointError, match="other bytes than were saved"):
        mpjax.load(tmp_path / "saved", mtp=True)
    bare = mpjax.load(tmp_path / "saved")  # which doesn't read the head
    assert bare.config == plain.config
    assert generate(bare).tokens == generate(lm).tokens
    assert mpjax.lora(bare, 2).config == plain.config


def test_a_head_in_fp8_beside_its_map_in_16_bits(tmp_path):
    """As in Qwen's own files."""
    pytest.importorskip("torch")
    changes = {**DELTA, "hidden_size": 128}
    build("Qwen3_5", changes).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | head_tensors(changes)
    kept, expected = ["lm_head", "mtp.fc"], tensors["mtp.fc.weight"]
    packed = ("_proj", "in_proj_qkv", "in_proj_z")
    modules = [name.removesuffix(".weight") for name in tensors]
    values = {
        name: pack_module_fp8(tensors, FP8, name) for name in modules if name.endswith(packed)
    }
    kept += [name for name in modules if name.endswith(("in_proj_a", "in_proj_b"))]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, quantization_config=FP8 | {"modules_to_not_convert": kept})
    lm = mpjax.load(tmp_path, dtype="float32", precision="WFP8A16KV16", mtp=True)
    layer = lm.model.layers[-1]
    np.testing.assert_array_equal(layer.attention.joint.get_value(), expected)
    found = layer.mlp.down.kernel.get_value().dequantize(jnp.float32)
    np.testing.assert_allclose(found, values["mtp.layers.0.mlp.down_proj"], rtol=1e-6)


def test_files_and_families_without_it_are_refused(checkpoint, tmp_path):
    folder, _ = checkpoint
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = load_file(folder / "model.safetensors")

    def put(tensors):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    put(whole | {"mtp.layers.1.input_layernorm.weight": np.zeros(64, np.float32)})
    with pytest.raises(CheckpointError, match="head of several layers: expected one"):
        mpjax.load(tmp_path, mtp=True)
    put({name: x for name, x in whole.items() if name != "mtp.norm.weight"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor \(mtp.norm.weight\)"):
        mpjax.load(tmp_path, mtp=True)
    put({name: x for name, x in whole.items() if not name.startswith("mtp.")})
    with pytest.raises(CheckpointError, match=r"no tensor mtp.fc.weight: it lacks the multi-token"):
        mpjax.load(tmp_path, mtp=True)
    mpjax.save(mpjax.load(tmp_path), tmp_path / "saved")
    with pytest.raises(CheckpointError, match="was saved without a multi-token-prediction head"):
        mpjax.load(tmp_path / "saved", mtp=True)
    with pytest.raises(CheckpointError, match="no MTP head of this family is implemented"):
        mpjax.load(mpjax.bundled_model(), mtp=True)
    with pytest.raises(ValueError, match="mtp is 'yes'"):
        mpjax.load(folder, mtp="yes")
