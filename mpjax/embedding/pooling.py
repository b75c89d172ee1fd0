"""Pools a text's hidden states to one vector, as sentence-transformers' files configure.

`modules.json` lists the steps after the model, each with its own folder: pooling, dense layers,
normalisation. `config_sentence_transformers.json` has prompts, which precede texts. Source:
sentence-transformers, models/Pooling.py, Dense.py and Normalize.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.errors import CheckpointError
from mpjax.kernels import files

Kind = Literal["last", "mean", "first"]
MODES: Mapping[str, Kind] = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "first"}
# By llama.cpp's numbers, of which 0 is none.
OF_GGUF: Mapping[int, Kind] = {0: "last", 1: "mean", 2: "first", 3: "last"}
IDENTITY = "torch.nn.modules.linear.Identity"
MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The steps from hidden states to an embedding.

    kind: the pooled tokens: the last token, the mean of all, or the first token.
    dense: successive layers: float32 matrices [inputs, outputs] and biases [outputs] or None.
    normalizes: whether embeddings are divided by their length at the end, also if the files
        normalise before dense layers.
    prompts: prompt name → text that precedes texts. usual: the name of the default prompt, or None.
    """

    kind: Kind = "last"
    dense: tuple[tuple[np.ndarray, np.ndarray | None], ...] = ()
    normalizes: bool = True
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    usual: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """The pooling that a folder's files configure; the last token, normalised, without files.

        Raises CheckpointError for files that can't be read, and for unsupported steps.
        """
        settings: Mapping[str, Any] = {}
        if os.path.lexists(path := folder / SETTINGS):
            settings = files.read_object(path, CheckpointError)
        prompts = settings.get("prompts") or {}
        if not isinstance(prompts, Mapping) or not all(
            isinstance(x, str) for x in prompts.values()
        ):
            raise CheckpointError(
                f"{path}: prompts is {prompts!r:.80}: expected an object of texts"
            )
        usual = settings.get("default_prompt_name")
        found = cls(prompts=prompts, usual=usual)
        if usual is not None and usual not in prompts:
            raise CheckpointError(f"{path}: default_prompt_name is {usual!r:.80}: no prompt has it")
        if not os.path.lexists(path := folder / MODULES):
            return found
        found = dataclasses.replace(found, normalizes=False)
        text = files.read_text(path, CheckpointError)
        steps = files.parse_object(f'{{"steps": {text}}}', str(path), CheckpointError)["steps"]
        if not isinstance(steps, list):
            raise CheckpointError(f"{path} is {steps!r:.80}: expected a list of steps")
        for step in steps:
            found = _with(found, folder, path, step)
        return found

    @classmethod
    def of_gguf(cls, path: Path) -> Pooling:
        """The pooling that a GGUF file names; the last token, normalised, if it names none.

        Raises CheckpointError for files of rerankers, whose scores are not read.
        """
        metadata = GGUFSource(path).metadata
        key = f"{metadata.text('general.architecture')}.pooling_type"
        if (number := metadata.whole(key, 0)) not in OF_GGUF:
            expected = " or ".join(map(str, OF_GGUF))
            raise CheckpointError(f"{path}: {key} is {number}: expected {expected}")
        return cls(OF_GGUF[number])

    def before(self, name: str | None) -> str:
        """The text of a prompt; name: None for the default prompt.

        Raises ValueError for an unknown name.
        """
        name = self.usual if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "it has none"
            raise ValueError(f"prompt is {name!r:.80}: expected a prompt of the model ({known})")
        return "" if name is None else self.prompts[name]

    def pool(self, hidden: jax.Array, counts: jax.Array) -> jax.Array:
        """Embeddings float32 [texts, channels], not normalised.

        hidden: [texts, tokens, channels]. counts: int32 [texts], the tokens of each text.
        """
        wide = hidden.astype(jnp.float32)
        if self.kind == "mean":
            real = jnp.arange(hidden.shape[1])[None] < counts[:, None]
            found = jnp.where(real[..., None], wide, 0.0).sum(1) / counts[:, None].astype(
                jnp.float32
            )
        else:
            place = counts - 1 if self.kind == "last" else jnp.zeros_like(counts)
            found = jnp.take_along_axis(wide, place[:, None, None], axis=1)[:, 0]
        for matrix, bias in self.dense:
            found = jnp.matmul(found, matrix, precision="highest")
            found = found if bias is None else found + jnp.asarray(bias)[None]
        return found


def _with(pooling: Pooling, folder: Path, path: Path, step: Any) -> Pooling:
    """The pooling with a further step of modules.json added."""
    if not isinstance(step, Mapping) or not all(
        isinstance(step.get(key, ""), str) for key in ("type", "path")
    ):
        raise CheckpointError(f"{path}: a step is {step!r:.80}: expected an object with a type")
    kind, place = str(step.get("type", "")).rpartition(".")[2], folder / step.get("path", "")
    if kind == "Transformer":
        return pooling
    if kind == "Normalize":
        return dataclasses.replace(pooling, normalizes=True)
    if kind == "Pooling":
        settings = files.read_object(place / "config.json", CheckpointError)
        modes = [
            key.removeprefix("pooling_mode_")
            for key, value in settings.items()
            if key.startswith("pooling_mode_") and value is True
        ]
        if isinstance(settings.get("pooling_mode"), str):
            modes.append(settings["pooling_mode"])
        if len(modes) != 1 or modes[0] not in MODES:
            expected = " or ".join(MODES)
            raise CheckpointError(
                f"{place / 'config.json'}: pooling_mode is {modes!r:.80}: expected {expected}"
            )
        kind = MODES[modes[0]]
        if settings.get("include_prompt") is False and kind == "mean" and pooling.prompts:
            raise CheckpointError(
                f"{place / 'config.json'}: include_prompt is false: expected true, since a mean "
                "here is that of all tokens"
            )
        return dataclasses.replace(pooling, kind=kind)
    if kind == "Dense":
        return dataclasses.replace(pooling, dense=(*pooling.dense, _dense(place)))
    raise CheckpointError(
        f"{path}: a step has the type {step.get('type')!r:.80}: expected Transformer, Pooling, "
        "Dense or Normalize"
    )


def _dense(folder: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The matrix [inputs, outputs] and the bias of a dense layer, float32; None without bias."""
    settings = files.read_object(folder / "config.json", CheckpointError)
    if (activation := settings.get("activation_function", IDENTITY)) != IDENTITY:
        raise CheckpointError(
            f"{folder / 'config.json'}: activation_function is {activation!r:.80}: expected "
            f"{IDENTITY}"
        )
    checkpoint = Checkpoint.open(folder)
    bias = "linear.bias" in checkpoint.tensors
    matrix, offset = (
        checkpoint.read(f"linear.{name}").astype(np.float32) if is_there else None
        for name, is_there in (("weight", True), ("bias", bias))
    )
    assert matrix is not None
    return matrix.T, offset
