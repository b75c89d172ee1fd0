from __future__ import annotations

import jax
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.safetensors import Checkpoint

HEADS = {"q": 4, "k": 2, "v": 2}
GATED = ("gate", "up", "down")


@pytest.fixture(scope="module")
def tensors():
    """The tensors of the bundled model's file, in float32."""
    checkpoint = Checkpoint.open(mpjax.bundled_model())
    return {name: checkpoint.read(name).astype(np.float32) for name in checkpoint.tensors}


def tree_of_tunix(tensors):
    """The tensors as `tunix.models.llama3` has them."""
    layers = {}
    for number in range(5):
        own = {name: tensors[f"model.layers.{number}.{name}.weight"] for name in LAYER}
        heads = {
            f"{one}_proj": {"w": own[f"self_attn.{one}_proj"].T.reshape(256, count, 64)}
            for one, count in HEADS.items()
        }
        output = own["self_attn.o_proj"].T.reshape(4, 64, 256)
        layers[number] = {
            "input_layernorm": {"w": own["input_layernorm"]},
            "post_attention_layernorm": {"w": own["post_attention_layernorm"]},
            "attn": heads | {"o_proj": {"w": output}},
            "mlp": {
                f"{one}_proj": {"kernel": own[f"mlp.{one}_proj"].T}
                for one in ("gate", "up", "down")
            },
        }
    return {
        "embedder": {"input_embedding": tensors["model.embed_tokens.weight"]},
        "final_norm": {"w": tensors["model.norm.weight"]},
        "layers": layers,
    }


LAYER = (
    *(f"self_attn.{one}_proj" for one in "qkvo"),
    *(f"mlp.{one}_proj" for one in GATED),
    *("input_layernorm", "post_attention_layernorm"),
)


def test_tunix(tensors):
    found = mpjax.by_file_names(tree_of_tunix(tensors), "tunix")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def interleaved(array):
    """Two halves [..., C] as neighbouring pairs, in which MaxText's Llama rotates channels."""
    return np.stack(np.split(array, 2, -1), -1).reshape(array.shape)


def maxtext_tree(tensors, family, is_stacked):
    """The tensors as MaxText's Llama or Qwen has them."""
    layers = []
    for layer in tree_of_tunix(tensors)["layers"].values():
        own = {name.removesuffix("_proj"): one["w"] for name, one in layer["attn"].items()}
        if family == "llama":
            own |= {"q": interleaved(own["q"]) / np.float32(8), "k": interleaved(own["k"])}
        gate, up, down = (layer["mlp"][f"{one}_proj"]["kernel"] for one in GATED)
        attention = zip(("query", "key", "value", "out"), "qkvo", strict=True)
        before, behind = (layer[f"{one}_layernorm"]["w"] for one in ("input", "post_attention"))
        layers.append(
            {
                "self_attention": {name: {"kernel": own[one]} for name, one in attention},
                "mlp": {"wi_0": {"kernel": gate}, "wi_1": {"kernel": up}, "wo": {"kernel": down}},
                "pre_self_attention_layer_norm": {"scale": before},
                "post_self_attention_layer_norm": {"scale": behind},
            }
        )
    stack = {"layers": jax.tree.map(lambda *arrays: np.stack(arrays, 1), *layers)}
    apart = {f"layers_{number}": layer for number, layer in enumerate(layers)}
    norm = {"decoder_norm": {"scale": tensors["model.norm.weight"]}}
    return {
        "decoder": norm | (stack if is_stacked else apart),
        "token_embedder": {"embedding": tensors["model.embed_tokens.weight"]},
    }


@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_maxtext(family, is_stacked, tensors):
    """A tree as MaxText restores it becomes the tensors of the file."""
    tree = {"params": {"params": maxtext_tree(tensors, family, is_stacked)}}
    found = mpjax.by_file_names(tree, f"maxtext-{family}")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_gemma_of_tunix(rng):
    """Heads come before inputs there, and keys and values are one array."""
    query = rng.normal(size=(4, 8, 2))  # heads, inputs, channels
    both = rng.normal(size=(2, 3, 8, 2))
    attention = {"q_einsum": {"w": query}, "kv_einsum": {"w": both}}
    tree = {"layers": {1: {"attn": attention, "pre_ffw_norm": {"scale": np.ones(8)}}}}
    found = mpjax.by_file_names(tree, "tunix-gemma")
    prefix = "model.layers.1."
    assert len(found) == 4
    assert found[f"{prefix}pre_feedforward_layernorm.weight"].shape == (8,)
    for name, heads in (("q", query), ("k", both[0]), ("v", both[1])):
        expected = np.concatenate([head.T for head in heads])
        np.testing.assert_array_equal(found[f"{prefix}self_attn.{name}_proj.weight"], expected)


def test_stacks_and_joint_arrays(rng):
    """Layers as one axis, keys and values as two of another."""
    query = rng.normal(size=(8, 3, 2, 4))  # inputs, layers, heads, channels
    both = rng.normal(size=(3, 2, 2, 8, 4))  # layers, keys or values, heads, inputs, channels
    rules = [
        mpjax.Rule("stack.q", "layers.{}.q", "iloo"),
        mpjax.Rule("stack.kv", "layers.{}.k", "l0oio"),
        mpjax.Rule("stack.kv", "layers.{}.v", "l1oio"),
    ]
    found = mpjax.by_file_names({"stack": {"q": query, "kv": both}}, rules)
    assert len(found) == 9
    for layer in range(3):
        np.testing.assert_array_equal(found[f"layers.{layer}.q"], query[:, layer].reshape(8, 8).T)
        for which, name in enumerate("kv"):
            own = both[layer, which].transpose(0, 2, 1).reshape(8, 8)
            np.testing.assert_array_equal(found[f"layers.{layer}.{name}"], own)


def test_what_has_no_name():
    rules = [mpjax.Rule("norm.scale", "model.norm.weight", "o")]
    with pytest.raises(ValueError, match=r"has 'norm.scales', which no rule names.*norm.scale"):
        mpjax.by_file_names({"norm": {"scales": np.ones(2)}}, rules)
    with pytest.raises(ValueError, match="expected 1 axes, which are o"):
        mpjax.by_file_names({"norm": {"scale": np.ones((2, 2))}}, rules)
    with pytest.raises(ValueError, match=r"names is 'flax': expected 'tunix', .*, or a list"):
        mpjax.by_file_names({"norm": {"scale": np.ones(2)}}, "flax")
    with pytest.raises(ValueError, match="expected axes of i, o, digits and at most one l"):
        mpjax.by_file_names({"norm": {"scale": np.ones(2)}}, [mpjax.Rule("norm", "norm", "x")])
    with pytest.raises(ValueError, match="expected arrays by their paths"):
        mpjax.by_file_names({}, rules)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("stack", "norm.weight", "lo"), "expected one {} in the name"),
        (("{}.stack", "{}.weight", "lo"), "expected one {} in the name, .* and none in the path"),
        (("{}.norm", "norm.weight", "o"), "expected as many {} in the name as in the path"),
        (("norm", "{}.{}.weight", "o"), "expected as many {} in the name as in the path"),
        (("norm", "{layer}.weight", "o"), "expected no braces in the name"),
        (("norm", 5, "o"), "expected texts as path, name and axes"),
        (("norm", "norm.weight", "2o"), "has norm with 2 entries along axis 0: expected more than"),
    ],
)
def test_rules_that_would_lose_weights(fields, message):
    """Each is refused before it gives fewer tensors than the tree has."""
    with pytest.raises(ValueError, match=message):
        mpjax.by_file_names({"norm": np.ones((2, 4))}, [mpjax.Rule(*fields)])


def test_two_arrays_of_one_name():
    norms = {name: {"scale": np.ones(8)} for name in ("post_attn_norm", "post_attention_norm")}
    with pytest.raises(ValueError, match=r"gives the tensor model\.layers\.0\.post_.* twice"):
        mpjax.by_file_names({"layers": [norms]}, "tunix-gemma")


def test_a_scaled_map_keeps_its_dtype():
    query = np.ones((8, 3, 2, 4), jax.numpy.bfloat16)
    tree = {"decoder": {"layers": {"self_attention": {"query": {"kernel": query}}}}}
    found = mpjax.by_file_names(tree, "maxtext-llama")
    assert {str(tensor.dtype) for tensor in found.values()} == {"bfloat16"}
