"""Reads an EAGLE-3 head, which has a folder of its own, and adds it to a loaded model.

Two layouts are read. SafeAILab's, which SpecForge and ModelOpt write too: a flat config.json, and
tensors `midlayer.*`. That of speculators: the keys of the layer are in `transformer_layer_config`,
and its tensors are `layers.0.*`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.checkpoint import array_file, shards
from mpjax.checkpoint.folder import CONFIG_NAME
from mpjax.checkpoint.huggingface import fill
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.plan import Plan, plan_places
from mpjax.checkpoint.progress import bytes_bar
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.checkpoint.schemes.checks import describe
from mpjax.checkpoint.staging import staged
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.memory import require_free_on
from mpjax.models import Decoder, DecoderConfig, Llama
from mpjax.models.cache_scales import CacheScales
from mpjax.models.config import ConfigError
from mpjax.models.config_json import flag, integer
from mpjax.models.eagle import TOKENS, EagleSpec, tokens_place, usual_taps, with_eagle
from mpjax.models.layer import DecoderLayer
from mpjax.models.sharded import ShardedDecoder

IS_TOKEN = "t2d"  # the tensor that marks the token ids of the head's vocabulary
IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "norm_output")
FIXED = {  # the only supported values of keys that change what a head computes
    "fc_norm": False,
    "use_sliding_window": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
PICKLE = "pytorch_model.bin"


def add_drafter(model: Decoder, folder: Path, progress: bool | None = None) -> Decoder:
    """The model with the EAGLE-3 head of a folder; the model's arrays are shared.

    The head's linear maps are rounded to the format of the output map of the model's last layer
    with attention, if that is packed.

    Raises CheckpointError, which names the key or the tensor, for a head that is unreadable or
    doesn't fit the model, and mpjax.memory.DeviceMemoryError.
    """
    checkpoint = _open(folder)
    try:
        hf = locate(folder).read_config()
        config = _read_config(hf, model.config, checkpoint)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    plan = _plan(type(model), checkpoint, config, _format_of(model))
    working = plan.working_bytes + (0 if model.mesh is None else plan.undivided_bytes)
    require_free_on(model.mesh, plan.device_bytes, f"loading {folder}", working)
    ids = _token_ids(checkpoint, tokens_place(config).shape[0], config.vocab_size)
    headed = _with_layer(model, plan)
    with bytes_bar("Loading", folder, progress, plan.file_bytes) as advance:
        fill(headed, checkpoint, plan, advance)
    headed.put_array(tokens_place(config), jnp.asarray(ids))
    return headed


def _open(folder: Path) -> Checkpoint:
    if (folder / PICKLE).exists() and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has the head in {PICKLE}, a pickle, which mpjax doesn't read: write "
            "model.safetensors beside it with safetensors.torch.save_file(torch.load(...), ...)"
        )
    return Checkpoint.open(folder).renamed({"layers.0.": "midlayer."})


def _read_config(
    hf: Mapping[str, Any], base: DecoderConfig, checkpoint: Checkpoint
) -> DecoderConfig:
    """The configuration of the model with the head of a config.json. Raises ConfigError."""
    inner, own = hf.get("transformer_layer_config", hf), hf.get("eagle_config") or {}
    if not isinstance(inner, Mapping) or not isinstance(own, Mapping):
        raise ConfigError("config.json: transformer_layer_config or eagle_config is no object")
    if hf.get("draft_vocab_size") is None:
        raise ConfigError(
            "config.json has no 'draft_vocab_size', as EAGLE-3 heads have: expected such a head; "
            "a smaller model proposes as mpjax.Draft(lm)"
        )
    vocabulary = integer(hf, "draft_vocab_size")
    usual = {"max_position_embeddings": base.max_position_embeddings, "torch_dtype": base.dtype}
    fixed = {"tie_word_embeddings": False, "eos_token_id": None, "dtype": None}
    head = Llama.config_from_hf({**usual, **inner, **fixed})
    if len(head.layers) != 1:
        raise ConfigError(f"config.json: num_hidden_layers is {len(head.layers)}: expected 1")
    for key, expected in {"target_hidden_size": base.hidden_size, **FIXED}.items():
        for given in (keys.get(key) for keys in (hf, inner, own)):
            if given is not None and given != expected:
                raise ConfigError(f"config.json: {key} is {given!r:.80}: expected {expected}")
    if vocabulary > base.vocab_size:
        raise ConfigError(
            f"config.json: draft_vocab_size is {vocabulary}: expected at most {base.vocab_size}, "
            "the model's vocab_size"
        )
    return with_eagle(
        base,
        head,
        _taps(hf, own, base.depth),
        vocabulary=vocabulary,
        own_embedding="embed_tokens.weight" in checkpoint.tensors,
        **{key: flag(hf, key) or flag(own, key) for key in SWITCHES},
    )


def _taps(hf: Mapping[str, Any], own: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """The layers whose input streams the head reads.

    In `eagle_config`, as SGLang reads it, layer i means the stream after layer i; else, as vLLM
    reads it, the stream that enters layer i.
    """
    place, moved = (own, 1) if own.get(IDS) else (hf, 0)
    if not place.get(IDS):
        return usual_taps(depth)
    if not isinstance(place[IDS], list) or not all(type(i) is int for i in place[IDS]):
        raise ConfigError(f"config.json: {IDS} is {place[IDS]!r:.80}: expected numbers of layers")
    return tuple(number + moved for number in place[IDS])


def _format_of(model: Decoder) -> WeightFormat | None:
    """The format of the output map of the last layer with attention; None for 16 bits."""
    places = [it for it in model.linear_places(model.config) if it.path.endswith("n.output")]
    return places[-1].parts(model)[0].format if places else None


def _plan(
    decoder: type[Decoder],
    checkpoint: Checkpoint,
    config: DecoderConfig,
    format: WeightFormat | None,
) -> Plan:
    """Which tensors fill the head's layer."""
    of_layer = f"layers.{config.depth}."
    arrays = [it for it in decoder.array_places(config) if it.path.startswith(of_layer)]
    linears = [it for it in decoder.linear_places(config) if it.path.startswith(of_layer)]
    is_mapped = tokens_place(config).shape[0] < config.vocab_size
    others = {TOKENS} if is_mapped else {TOKENS} & checkpoint.tensors.keys()
    return plan_places(
        checkpoint, config, arrays, linears, format, others | {IS_TOKEN} & checkpoint.tensors.keys()
    )


def _token_ids(checkpoint: Checkpoint, count: int, vocabulary: int) -> np.ndarray:
    """The token ids of the head's vocabulary, int32 [count]. Raises CheckpointError."""
    ids = np.arange(count)
    if TOKENS in checkpoint.tensors:
        info = checkpoint.tensors[TOKENS]
        if info.shape != (count,) or info.dtype.kind != "i":
            raise CheckpointError(
                f"{info.file}: {TOKENS} is {describe(info)}: expected integers of shape [{count}], "
                "by draft_vocab_size"
            )
        ids = ids + checkpoint.read(TOKENS)
    if len(np.unique(ids)) < count or ids.min() < 0 or ids.max() >= vocabulary:
        raise CheckpointError(
            f"{checkpoint.folder}: {TOKENS} gives the token ids {ids.min()} to {ids.max()}: "
            f"expected different ones from 0 to {vocabulary - 1}, the model's"
        )
    if IS_TOKEN in checkpoint.tensors:
        marked = np.flatnonzero(checkpoint.read(IS_TOKEN))
        if not np.array_equal(marked, np.sort(ids)):
            raise CheckpointError(
                f"{checkpoint.folder}: {IS_TOKEN} marks {len(marked)} token ids, which are not the "
                f"{count} of {TOKENS}: the tensors are not of one head"
            )
    return ids.astype(np.int32)


def _with_layer(model: Decoder, plan: Plan) -> Decoder:
    """The model with the abstract layer of the head, for `fill`."""
    config = plan.config
    headed = jax.tree.map(lambda array: array, model)
    headed.config = config
    if isinstance(model, ShardedDecoder):
        assert isinstance(headed, ShardedDecoder)
        assert model.mesh is not None
        formats = {it.path: [source.format for source in of] for it, of in plan.linears}
        headed.division = model.division.with_drafts(config, formats)
        headed.share.config = headed.division.local
        layer = ShardedDecoder.of(headed.division, model.mesh).share.layers[-1]
        share: Decoder = headed.share
    else:
        layer = nnx.eval_shape(lambda: DecoderLayer(config, config.layers[-1], nnx.Rngs(0)))
        share = headed
    share.layers = nnx.List([*share.layers, layer])
    if share.cache_scales is not None:
        spec: Any = config.layers[-1].attention
        sizes = spec.attention.sizes(config)[1:]
        if sizes != (config.num_kv_heads, config.head_dim):
            raise CheckpointError(
                f"the head has {sizes[0]} heads of {sizes[1]} channels for keys, and the model, "
                "which has cache scales, others: load the model with another KV format"
            )
        scales = share.cache_scales.get_value()

        def longer(scales: jax.Array) -> jax.Array:
            pieces = jnp.split(scales, model.shards)
            one = jnp.ones_like(pieces[0][:1])
            return jnp.concatenate([jnp.concatenate([piece, one]) for piece in pieces])

        share.cache_scales = CacheScales(jax.jit(longer, out_shardings=scales.sharding)(scales))
    return headed


def require_empty(folder: Path) -> None:
    """Raises ValueError for a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: choose another folder")


def write_drafter(model: Decoder, folder: Path) -> None:
    """Writes the EAGLE-3 head of a model, with plain arrays, in SafeAILab's layout.

    Raises ValueError for a folder that is not empty.
    """
    require_empty(folder)
    config, of_layer = model.config, f"layers.{model.config.depth}."
    tensors: dict[str, Any] = {
        place.name: place.read(model)
        for place in model.array_places(config)
        if place.path.startswith(of_layer)
    }
    for place in model.linear_places(config):
        if place.path.startswith(of_layer):
            for name, linear in zip(place.names, place.maps(model), strict=True):
                tensors[f"{name}.weight"] = linear.kernel.get_value().T
    ids = np.asarray(tokens_place(config).read(model), np.int64)
    is_token = np.zeros(config.vocab_size, bool)
    is_token[ids] = True
    tensors |= {TOKENS: ids - np.arange(len(ids)), IS_TOKEN: is_token}
    shard = shards.Shard("model.safetensors", array_file.in_order(tensors))
    with staged(folder) as new:
        text = json.dumps(_written_config(config), indent=2)
        (new / CONFIG_NAME).write_text(text, encoding="utf-8")
        with shards.writing(new, [shard]) as write:
            for name in shard.tensors:
                write(name, tensors[name], lambda count: None)


def _written_config(config: DecoderConfig) -> dict[str, Any]:
    """The keys of the config.json of a head, which has no rotary scaling."""
    layer = config.layers[-1]
    spec, mlp = layer.attention, layer.mlp
    assert isinstance(spec, EagleSpec)
    assert mlp is not None
    scaling = config.rope_scaling if spec.attention.rope == "global" else spec.attention.scaling
    assert scaling is None, "a head with a rotary scaling, which config.json would not have"
    heads, kv_heads, head_dim = spec.attention.sizes(config)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.attention.theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": spec.vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
        "eagle_config": {IDS: [at - 1 for at in spec.taps], "use_aux_hidden_state": True},
    }
