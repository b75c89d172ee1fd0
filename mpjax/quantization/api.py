"""`quantize`, the public function: quantises a loaded model or a checkpoint folder by a recipe."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import jax
from flax import nnx

from mpjax.arguments import compute_dtype, require_documents
from mpjax.checkpoint import huggingface
from mpjax.checkpoint.description import is_saved
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.packed_tables import packed, tables_of
from mpjax.checkpoint.progress import layers_bar
from mpjax.devices import Devices, read_devices
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.loading import find_folder
from mpjax.models import Decoder, DecoderLayer, ExpertPlace, LinearPlace
from mpjax.precision import Precision
from mpjax.quantization.finished import FinishedLayers, describe_run
from mpjax.quantization.hadamard import check_blocks
from mpjax.quantization.methods import HADAMARD
from mpjax.quantization.pipeline import quantize_decoder
from mpjax.quantization.placing import LAYERS, divided_decoder, move_layer, move_rest
from mpjax.quantization.recipe import Recipe, Rule
from mpjax.quantization.text import DEFAULT_CALIBRATION, Calibration, Windows
from mpjax.text.tokenizer import Tokenizer


class Running(TypedDict, total=False):
    """Further keyword arguments of `quantize`, about how it runs."""

    work: str | os.PathLike[str] | None
    overwrite: bool
    devices: Devices | None
    progress: bool | None


def quantize(
    source: LanguageModel | str | os.PathLike[str],
    recipe: Recipe | Precision | str,
    documents: Iterable[str] | None = None,
    *,
    calibration: Calibration = DEFAULT_CALIBRATION,
    dtype: jax.typing.DTypeLike | None = None,
    **running: Unpack[Running],
) -> LanguageModel:
    """Quantises a model by a recipe, minimising the error of its outputs on calibration text.

    source: a 16-bit model, or a checkpoint's folder or hub id. A folder is read layer by layer, so
        the 16-bit model needn't fit on the device. The result has none of the model's
        loaded adapters.
    recipe: a Recipe; or a precision such as "W4A16KV8" for all linear maps, with the default
        method.
    documents: the calibration text; the method `rtn` needs none.
    dtype: the dtype of activations; by default as in `load`. Only for a folder.
    work: a folder for finished layers. After an interruption, the same call continues with the
        first missing layer. Only if the source is a folder or hub id; delete `work` when the result
        is saved. A call that raises ValueError deletes its layers.
    overwrite: whether finished layers of another call in `work` are deleted.
    devices: among which the result is divided, as for `load`. Layers are quantised one by one on
        the default device, and distributed before the next is read.
        Only if the source is a folder or hub id.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.

    Raises ValueError for a recipe that does not fit the model, missing calibration text, devices
    among which the result can't be divided, layers of another call in `work` without overwrite, and
    hidden states that are NaN or infinite; CheckpointError for a folder that can't be loaded.
    """
    if unknown := running.keys() - Running.__annotations__.keys():
        raise TypeError(f"quantize() got an unexpected keyword argument {unknown.pop()!r}")
    if not isinstance(recipe, Recipe):
        recipe = Recipe.of(recipe)
    require_type("calibration", calibration, Calibration)
    if documents is not None:
        require_documents(documents)
        documents = list(documents)
    if isinstance(source, LanguageModel):
        if any(each is not None for each in (dtype, running.get("work"), running.get("devices"))):
            raise ValueError(
                "dtype, work and devices are for a folder: leave them out beside a model"
            )
        return _from_model(source, recipe, documents, calibration, running.get("progress"))
    folder = find_folder(source).resolve()
    if is_saved(folder):
        raise ValueError(
            f"{folder} is a model that mpjax saved: take the 16-bit checkpoint that it was made "
            "from, or load it and pass the model"
        )
    return _from_folder(folder, recipe, documents, calibration, dtype, running)


def _from_model(
    lm: LanguageModel,
    recipe: Recipe,
    documents: list[str] | None,
    calibration: Calibration,
    progress: bool | None,
) -> LanguageModel:
    lm.require_no_head("quantising")
    lm.require_one_device("quantising", "pass the folder of its 16-bit checkpoint with devices")
    recipe = recipe.of_model(lm.model.linear_places(lm.config), lm.config.num_layers)
    _check(recipe, lm.model, documents)
    for place in lm.model.linear_places(lm.config):
        if any(not isinstance(kernel, jax.Array) for kernel in place.kernels(lm.model)):
            raise ValueError(
                f"{place.path} is quantised already: load the 16-bit checkpoint without a W part"
            )
    # Copy the variables, since rotations change them in place; arrays are shared.
    model = nnx.clone(lm.model)
    batches = _read(documents, lm.tokenizer, lm.source, model, calibration)
    with layers_bar("Quantising", lm.source, progress, model.config.num_layers) as advance:
        quantize_decoder(
            model,
            lambda number: (model.layers[number], False),
            batches,
            recipe,
            lambda *done: advance(1),
        )
    return _with_cache(lm.with_model(model, kv_format=recipe.kv), documents)


def _from_folder(
    folder: Path,
    recipe: Recipe,
    documents: list[str] | None,
    calibration: Calibration,
    dtype: jax.typing.DTypeLike | None,
    running: Running,
) -> LanguageModel:
    mesh, work = read_devices(running.get("devices")), running.get("work")
    model, checkpoint, plan = huggingface.open_plain(
        folder, compute_dtype(dtype, Precision(bits=recipe.bits))
    )
    recipe = recipe.of_model(model.linear_places(model.config), model.config.num_layers)
    _check(recipe, model, documents)
    source = locate(folder)
    tokenizer = source.read_tokenizer()
    batches = _read(documents, tokenizer, folder, model, calibration)
    finished, divided = None, None
    if work is not None:
        run = describe_run(folder, recipe, batches, model.config.dtype)
        finished = FinishedLayers.open(Path(work), run, overwrite=running.get("overwrite", False))
    with contextlib.nullcontext() if finished is None else finished:
        huggingface.fill(model, checkpoint, plan, belongs=lambda path: not path.startswith(LAYERS))

        def read_layer(number: int) -> tuple[DecoderLayer, bool]:
            nonlocal divided
            if mesh is not None and divided is None:  # now that the tables have their formats
                divided = divided_decoder(model, recipe, mesh)
            if finished is not None and finished.load(model, number, recipe):
                return model.layers[number], True
            prefix = f"{LAYERS}{number}."
            huggingface.fill(model, checkpoint, plan, belongs=lambda path: path.startswith(prefix))
            return model.layers[number], False

        bar = layers_bar("Quantising", folder, running.get("progress"), model.config.num_layers)
        with bar as advance:

            def watch(number: int, layer: DecoderLayer) -> None:
                if finished is not None:
                    finished.save(model, number)
                if divided is not None:
                    move_layer(model, number, divided)
                advance(1)

            quantize_decoder(model, read_layer, batches, recipe, watch)
    if divided is not None:
        move_rest(model, divided)
        model = divided
    sampling = source.read_sampling()
    lm = LanguageModel(model, tokenizer, recipe.kv, folder, sampling=sampling)
    return _with_cache(lm, documents)


def _check(recipe: Recipe, model: Decoder, documents: list[str] | None) -> None:
    """Raises ValueError if a recipe does not fit the model, or lacks calibration text."""
    if not recipe.rotates:  # rotation unties a tied table
        for path, format in packed(tables_of(recipe.tables, model.config)).items():
            format.require_matrix((model.config.hidden_size, model.config.vocab_size), path)
    places = [place for place in model.linear_places(model.config) if not place.is_table]
    if recipe.rotates:
        _check_rotation(model)
    if recipe.hadamard:
        check_blocks(model.config)
        _warn_of_plain_inputs(recipe, places)
    recipe.require_used([place.path for place in places])
    for place in places:
        rule = recipe.rule_of(place.path)
        if not rule.weights.is_packed:
            continue
        if isinstance(place, ExpertPlace):
            _check_experts(rule, place)
        for shape in place.shapes:
            rule.weights.require_matrix(shape, place.path)
        rule.method.require_usable(rule.weights)
        if documents is None:
            _require_no_text(rule)
    is_read = any(recipe.rule_of(place.path).needs_text for place in places)
    _check_text(recipe, is_read, documents)


def _check_text(recipe: Recipe, is_read: bool, documents: list[str] | None) -> None:
    """Warns of unused calibration text; raises ValueError if the cache needs text.

    is_read: whether an applied rule needs text.
    """
    if documents is not None and not is_read and recipe.kv.scaling != "static":
        warnings.warn(
            "the text is not used, because no method of the recipe needs any: leave it out, or "
            "choose a method such as gptq",
            stacklevel=5,
        )
    if documents is None and recipe.kv.scaling == "static":
        raise ValueError(
            f"{recipe.kv} has scales that are measured on text: pass documents (--text), or "
            "choose another KV format"
        )


def _check_rotation(model: Decoder) -> None:
    """Raises ValueError for a model whose residual stream can't be rotated."""
    if any(spec.has_post_norms for spec in model.config.layers):
        raise ValueError(
            f"{model.family_name} models can't be rotated, because the outputs of attention and "
            "MLP have norms, whose weights scale channels before they are added to the residual "
            "stream: leave `rotate` out of the method"
        )
    if model.config.centered_norms:
        raise ValueError(
            f"{model.family_name} models can't be rotated, because their norms subtract the mean "
            "of the channels: leave `rotate` out of the method"
        )


def _warn_of_plain_inputs(recipe: Recipe, places: Sequence[LinearPlace]) -> None:
    """Warns of the Hadamard transform if no down projection has quantised activations."""
    formats = [recipe.rule_of(it.path).weights for it in places if it.path.endswith(".down")]
    if not any(format.operand for format in formats):
        warnings.warn(
            f"the method has {HADAMARD}, which is for down projections with activations of 4 or 8 "
            "bits, and here all have 16: the transform takes time in every step, and the model "
            f"can't be exported; leave {HADAMARD} out, or choose a precision such as W4A8KV8",
            stacklevel=5,
        )


def _require_no_text(rule: Rule) -> None:
    """Raises ValueError if a rule needs calibration text."""
    if rule.method.needs_text:
        raise ValueError(
            f"the method {rule.method} needs text: pass documents (--text), or choose rtn"
        )
    if rule.needs_text:
        raise ValueError(
            "which blocks of activations have 8 bits depends on text: pass documents (--text), or "
            "choose W4A4 or W4Ax1, in which all blocks are alike"
        )


def _check_experts(rule: Rule, place: ExpertPlace) -> None:
    """Raises ValueError for a method step that doesn't support experts."""
    if rule.method.learns:
        raise ValueError(
            f"{place.path} has experts, whose scales are not learned: leave `learn` out of their "
            "method"
        )


def _read(
    documents: list[str] | None,
    tokenizer: Tokenizer | None,
    folder: Path,
    model: Decoder,
    calibration: Calibration,
) -> list[Windows]:
    """The calibration text as batches of windows; empty without documents."""
    if documents is None:
        return []
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json, which text needs")
    return calibration.windows(documents, tokenizer, model.config)


def _with_cache(lm: LanguageModel, documents: list[str] | None) -> LanguageModel:
    """The model, with calibrated cache scales if its KV format needs them."""
    if lm.kv_format.scaling != "static":
        return lm
    from mpjax.quantization.calibration import calibrate_cache

    assert documents is not None  # ensured by `_check`
    return calibrate_cache(lm, documents)
