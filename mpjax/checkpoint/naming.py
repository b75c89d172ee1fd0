"""Trees of other JAX libraries, with the names and shapes of Hugging Face's files.

A rule is the path of an array in such a tree, the name of the tensor that it is in files, and the
meaning of its axes: `i` input channels, `o` output channels (or any axis of what is no linear map),
`l` the layers of a stack, and a digit an axis of which only that index is used. The tensor of a
file is [out, in], with several axes of a kind joined in their order.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from mpjax.kernels.checks import did_you_mean, nearest, shown

Make = Callable[[Any], Any]  # a tensor of an array of the tree


class Rule(NamedTuple):
    """A rule for an array of a tree, or for the arrays of all layers.

    path, name: the array's path and the tensor's name, with `{}` for the number of a layer. axes:
    the meaning of each axis, as the module says. change: a function of the values before axes are
    joined; it takes and returns an array of all axes but `l` and digits.
    """

    path: str
    name: str
    axes: str
    change: Callable[[Any], Any] | None = None


LAYER = "model.layers.{}."

# Llama 3, Qwen2 and Qwen3 of `tunix.models`.
TUNIX = (
    Rule("embedder.input_embedding", "model.embed_tokens.weight", "oi"),
    Rule("lm_head.w", "lm_head.weight", "io"),
    Rule("final_norm.w", "model.norm.weight", "o"),
    Rule("layers.{}.input_layernorm.w", LAYER + "input_layernorm.weight", "o"),
    Rule("layers.{}.post_attention_layernorm.w", LAYER + "post_attention_layernorm.weight", "o"),
    *(
        Rule(f"layers.{{}}.attn.{one}_proj.w", f"{LAYER}self_attn.{one}_proj.weight", axes)
        for one, axes in (("q", "ioo"), ("k", "ioo"), ("v", "ioo"), ("o", "iio"))
    ),
    *(
        Rule(f"layers.{{}}.attn.{one}_bias", f"{LAYER}self_attn.{one}_proj.bias", "o")
        for one in "qkv"
    ),
    *(
        Rule(f"layers.{{}}.attn.{one}_norm.w", f"{LAYER}self_attn.{one}_norm.weight", "o")
        for one in "qk"
    ),
    *(
        Rule(f"layers.{{}}.mlp.{one}_proj.kernel", f"{LAYER}mlp.{one}_proj.weight", "io")
        for one in ("gate", "up", "down")
    ),
)
# Gemma 2 and Gemma 3 of `tunix.models`, without images.
TUNIX_GEMMA = (
    Rule("embedder.input_embedding", "model.embed_tokens.weight", "oi"),
    Rule("final_norm.scale", "model.norm.weight", "o"),
    *(
        Rule(f"layers.{{}}.{path}.scale", f"{LAYER}{name}.weight", "o")
        for path, name in (
            ("pre_attention_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),  # of Gemma 3
            ("post_attn_norm", "post_attention_layernorm"),  # of Gemma 2
            ("pre_ffw_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
            ("attn._query_norm", "self_attn.q_norm"),
            ("attn._key_norm", "self_attn.k_norm"),
        )
    ),
    Rule("layers.{}.attn.q_einsum.w", LAYER + "self_attn.q_proj.weight", "oio"),
    Rule("layers.{}.attn.kv_einsum.w", LAYER + "self_attn.k_proj.weight", "0oio"),
    Rule("layers.{}.attn.kv_einsum.w", LAYER + "self_attn.v_proj.weight", "1oio"),
    *(
        Rule("layers.{}.attn.qkv_einsum.w", f"{LAYER}self_attn.{one}_proj.weight", f"{index}oio")
        for index, one in enumerate("qkv")
    ),
    Rule("layers.{}.attn.attn_vec_einsum.w", LAYER + "self_attn.o_proj.weight", "iio"),
    *(
        Rule(f"layers.{{}}.mlp.{one}_proj.kernel", f"{LAYER}mlp.{one}_proj.weight", "io")
        for one in ("gate", "up", "down")
    ),
)


def _halves(array: Any) -> Any:
    """Channels [..., C] that rotate in neighbouring pairs, as two halves [..., C]."""
    pairs = array.reshape(*array.shape[:-1], -1, 2)
    return pairs.swapaxes(-1, -2).reshape(array.shape)


def _query_halves(array: Any) -> Any:
    """As `_halves`, times √C, by which MaxText divides the query's weights and no scores."""
    scaled = _halves(array).astype(np.float32) * math.sqrt(array.shape[-1])
    return scaled.astype(array.dtype)


def _maxtext(
    query: Callable[[Any], Any] | None = None, key: Callable[[Any], Any] | None = None
) -> tuple[Rule, ...]:
    """The rules of a MaxText model, with its layers in one stack along axis 1, or apart.

    query, key: changes of the maps of queries and keys.
    """
    of_layer = (
        Rule("pre_self_attention_layer_norm.scale", "input_layernorm.weight", "o"),
        Rule("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "o"),
        Rule("self_attention.query.kernel", "self_attn.q_proj.weight", "ioo", query),
        Rule("self_attention.key.kernel", "self_attn.k_proj.weight", "ioo", key),
        Rule("self_attention.value.kernel", "self_attn.v_proj.weight", "ioo"),
        Rule("self_attention.out.kernel", "self_attn.o_proj.weight", "iio"),
        Rule("self_attention.query.bias", "self_attn.q_proj.bias", "oo"),
        Rule("self_attention.key.bias", "self_attn.k_proj.bias", "oo"),
        Rule("self_attention.value.bias", "self_attn.v_proj.bias", "oo"),
        Rule("self_attention.query_norm.scale", "self_attn.q_norm.weight", "o"),
        Rule("self_attention.key_norm.scale", "self_attn.k_norm.weight", "o"),
        Rule("mlp.wi_0.kernel", "mlp.gate_proj.weight", "io"),
        Rule("mlp.wi_1.kernel", "mlp.up_proj.weight", "io"),
        Rule("mlp.wo.kernel", "mlp.down_proj.weight", "io"),
    )
    stacked = [f"{rule.axes[0]}l{rule.axes[1:]}" for rule in of_layer]
    return (
        Rule("token_embedder.embedding", "model.embed_tokens.weight", "oi"),
        Rule("decoder.decoder_norm.scale", "model.norm.weight", "o"),
        Rule("decoder.logits_dense.kernel", "lm_head.weight", "io"),
        *(
            Rule(f"decoder.{layers}.{rule.path}", LAYER + rule.name, axes, rule.change)
            for layers, each in (
                ("layers", stacked),
                ("layers_{}", [rule.axes for rule in of_layer]),
            )
            for rule, axes in zip(of_layer, each, strict=True)
        ),
    )


# Source: `checkpoint_conversion/utils/param_mapping.py` of maxtext 0.2.5, and `models/*/params.py`
# of google-tunix 0.1.7.
NAMINGS: Mapping[str, Sequence[Rule]] = {
    "tunix": TUNIX,
    "tunix-gemma": TUNIX_GEMMA,
    "maxtext-qwen": _maxtext(),
    "maxtext-llama": _maxtext(_query_halves, _halves),
}


def by_file_names(tree: Any, names: str | Sequence[Rule]) -> dict[str, Any]:
    """The arrays of a tree by the names of tensors in Hugging Face's files, with their shapes.

        mpjax.update(lm, mpjax.by_file_names(trainer, "tunix"))

    tree: a module, an nnx.State, or nested mappings and lists, such as an Orbax checkpoint that was
        restored. The index of an entry of a list is a part of its path.
    names: `tunix`, for Llama 3, Qwen2 and Qwen3 of `tunix.models`, and `tunix-gemma` for its Gemma
        2 and 3, without images; `maxtext-qwen` for Qwen2 and Qwen3 of MaxText, and `maxtext-llama`
        for its Llama 3, without experts; or rules of your own.

    Arrays that have to be transposed are copied. The prefix `params` of paths is left out.

    Raises ValueError for an array that no rule names, that has other axes than its rule, or whose
    tensor another array gives, too.
    """
    rules = read_rules(names)
    found: dict[str, Any] = {}
    for path, array in flat(tree):
        for name, make in tensors_of(path, array, rules):
            if name in found:
                raise ValueError(given_twice(path, name))
            found[name] = make(array)
    if not found:
        raise ValueError(f"the tree of weights is {shown(tree)}: expected arrays by their paths")
    return found


def given_twice(path: str, name: str) -> str:
    """The message of the error for a second array that gives a tensor."""
    return (
        f"the tree of weights gives the tensor {name} twice, the second time as {path}: expected "
        "names of rules that differ, with {} for the number of a layer"
    )


def tensors_of(path: str, array: Any, rules: Sequence[Rule]) -> Iterator[tuple[str, Make]]:
    """The names of the tensors that are made of an array, each with a function that makes it.

    array: only its shape counts. Raises the errors of `by_file_names`.
    """
    path = re.sub(r"^(params\.)+", "", path.removesuffix(".value"))
    is_named = False
    for rule in rules:
        pattern = re.escape(rule.path).replace(r"\{\}", r"(\d+)")
        if match := re.fullmatch(pattern, path):
            is_named = True
            yield from _tensors(path, array, rule, match.groups())
    if not is_named:
        hint = did_you_mean(nearest(path, [rule.path for rule in rules]))
        raise ValueError(f"the tree of weights has {path!r}, which no rule names{hint}")


def flat(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree by their paths, with dots between the parts."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from flat(value, (*path, number))
    elif isinstance(tree, nnx.Variable):
        yield ".".join(map(str, path)), tree.get_value()
    elif path:
        yield ".".join(map(str, path)), tree


def read_rules(names: Any) -> Sequence[Rule]:
    """The rules that `names` are or mean. Raises ValueError for anything else."""
    if isinstance(names, str) and names in NAMINGS:
        return NAMINGS[names]
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not names or not all(isinstance(rule, Rule) for rule in names):
        known = ", ".join(map(repr, NAMINGS))
        raise ValueError(f"names is {shown(names)}: expected {known}, or a list of rules")
    for rule in names:
        _require_sound(rule)
    return names


def _require_sound(rule: Rule) -> None:
    """Raises ValueError unless the fields of a rule agree with each other."""
    path, name, axes, change = rule
    if not all(isinstance(text, str) for text in (path, name, axes)):
        raise ValueError(f"{rule}: expected texts as path, name and axes")
    if change is not None and not callable(change):
        raise ValueError(f"{rule}: expected a function, or None, as change")
    if not re.fullmatch("[io0-9]*l?[io0-9]*", axes) or not set(axes) & {"i", "o"}:
        raise ValueError(f"{rule}: expected axes of i, o, digits and at most one l")
    given = [text.count("{}") for text in (path, name)]
    if set(name.replace("{}", "")) & {"{", "}"}:
        raise ValueError(f"{rule}: expected no braces in the name but those of {{}}")
    if "l" in axes and given != [0, 1]:
        raise ValueError(
            f"{rule}: expected one {{}} in the name, for the layers of the stack l, and none in "
            "the path"
        )
    if "l" not in axes and given[0] != given[1]:
        raise ValueError(f"{rule}: expected as many {{}} in the name as in the path")


def _tensors(path: str, array: Any, rule: Rule, layer: Sequence[str]) -> Iterator[tuple[str, Make]]:
    """The tensors that a rule makes of an array: the name of each, and a function for it."""
    if getattr(array, "ndim", None) != len(rule.axes):
        raise ValueError(
            f"the tree of weights has {path} = {shown(array)}: expected {len(rule.axes)} axes, "
            f"which are {rule.axes}"
        )
    for number, (axis, size) in enumerate(zip(rule.axes, array.shape, strict=True)):
        if axis.isdigit() and int(axis) >= size:
            raise ValueError(
                f"the tree of weights has {path} with {size} entries along axis {number}: expected "
                f"more than {axis}, by the axes {rule.axes} of its rule"
            )
    if "l" not in rule.axes:
        yield rule.name.format(*layer), functools.partial(_tensor, rule=rule, layer=0)
        return
    for number in range(array.shape[rule.axes.index("l")]):
        yield rule.name.format(number), functools.partial(_tensor, rule=rule, layer=number)


def _tensor(array: Any, rule: Rule, layer: int) -> Any:
    """The tensor [out, in] or [...] of an array, or of one layer of it if it is a stack."""
    index = {"l": layer, "i": slice(None), "o": slice(None)}
    array = array[tuple(int(axis) if axis.isdigit() else index[axis] for axis in rule.axes)]
    array = array if rule.change is None else rule.change(array)
    axes = "".join(axis for axis in rule.axes if axis in "io")
    order = [number for kind in "oi" for number, axis in enumerate(axes) if axis == kind]
    sizes = [
        math.prod(array.shape[number] for number, axis in enumerate(axes) if axis == kind)
        for kind in "oi"
        if kind in axes
    ]
    return array.transpose(order).reshape(sizes)
