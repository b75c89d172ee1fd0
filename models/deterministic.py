"""Deterministic mode: a token's logits depend on the tokens before it, and on nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from flax import nnx

from mpjax.kernels import KVFormat, UnsupportedError, device
from mpjax.kernels.attention.api import BLOCKS
from mpjax.kernels.invariance import batch_invariant
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import LayerSpec, MixerSpec
from mpjax.models.experts import ExpertsSpec
from mpjax.models.gated_delta import GatedDeltaSpec
from mpjax.models.latent import LatentSpec
from mpjax.models.mamba2 import Mamba2Spec
from mpjax.models.parallel import JointSpec
from mpjax.models.short_conv import ShortConvSpec

if TYPE_CHECKING:
    from mpjax.models.decoder import Decoder

RECURRENT = GatedDeltaSpec, Mamba2Spec, ShortConvSpec
CPU_HAS_EXPERTS = jax.__version_info__ >= (0, 11)
Method = TypeVar("Method", bound=Callable[..., Any])


def with_determinism(model: Decoder, format: KVFormat | None) -> Decoder:
    """The model in deterministic mode, for caches of one KV format, or without; arrays are shared.

    Its steps are batch invariant (`batch_invariant`), and tokens without a cache attend to keys and
    values of this format, too, so that a forward pass has the bits of steps with a cache.

    Raises UnsupportedError, which names the part, for a model or a format that can't have the mode.
    """
    if format is not None and (reason := _why_not(model, format)):
        raise UnsupportedError(f"deterministic: {reason}")
    model = nnx.clone(model)
    model.deterministic = format
    if model.mesh is not None:
        model.share.deterministic = format  # type: ignore[attr-defined]
    return model


def _why_not(model: Decoder, format: KVFormat) -> str | None:
    """The reason why the model can't have the mode with caches of this format, or None."""
    if format.block is not None:
        return f"{format}: {BLOCKS}"
    if format.scaling is not None:
        return f"{format}: a forward pass without a cache has no static scales"
    reasons = (_why_not_layer(layer) for layer in model.config.layers)
    return next((reason for reason in reasons if reason), None)


def _why_not_layer(layer: LayerSpec) -> str | None:
    if layer.attention is not None and (reason := _why_not_mixer(layer.attention)):
        return reason
    if layer.per_layer is not None or layer.streams is not None:
        return "per-layer embeddings and several residual streams have no batch-invariant form"
    if isinstance(layer.mlp, ExpertsSpec) and not device.on_gpu() and not CPU_HAS_EXPERTS:
        return "experts on a CPU need JAX 0.11, before which XLA rounds them by the number of rows"
    return None


def _why_not_mixer(mixer: MixerSpec) -> str | None:
    if isinstance(mixer, JointSpec):
        reasons = (_why_not_mixer(part) for part in mixer.parts.values())
        return next((reason for reason in reasons if reason), None)
    if isinstance(mixer, (*RECURRENT, LatentSpec)):
        return None
    if not isinstance(mixer, GroupedQuerySpec):
        return f"layers of kind {mixer.kind} have no batch-invariant form"
    if mixer.bidirectional:
        return "bidirectional attention has no steps with which a forward pass could agree"
    if mixer.chunked or mixer.reads_back is not None:
        return "attention in chunks, and to other layers' keys, has no batch-invariant form"
    return None


def in_own_mode(method: Method) -> Method:
    """A decorator of a decoder's methods: they run in the model's mode."""

    @functools.wraps(method)
    def run(model: Decoder, *arguments: Any, **named: Any) -> Any:
        with batch_invariant(model.deterministic is not None):
            return method(model, *arguments, **named)

    return run  # type: ignore[return-value]
