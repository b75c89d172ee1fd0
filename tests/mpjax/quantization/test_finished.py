from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from mpjax.quantization import finished
from mpjax.quantization.finished import FinishedLayers, describe_run
from mpjax.quantization.pipeline import quantize_decoder
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.text import Windows
from tests.models.small import CONFIG, small_model

CONTENT = {
    "precision": "W4g32A16KV16",
    "method": "rtn",
    "rules": [{"modules": "layers.*.mlp.down", "precision": "W16A16KV16"}],
}
RECIPE = Recipe.parse(CONTENT)


def layers_of(model):
    """A function that returns each layer of a model, none of them quantised."""
    return lambda number: (model.layers[number], False)


@pytest.fixture(scope="module")
def model():
    model = small_model(CONFIG)
    quantize_decoder(model, layers_of(model), [], RECIPE)
    return model


def test_layers_come_back_bit_for_bit(model, tmp_path):
    finished = FinishedLayers.open(tmp_path / "work", "run")
    finished.save(model, 1)
    other = small_model(CONFIG, seed=1)
    finished.close()  # as where the process has ended
    again = FinishedLayers.open(tmp_path / "work", "run")
    assert not again.load(other, 0, RECIPE)
    assert again.load(other, 1, RECIPE)
    states = [jax.tree.leaves(nnx.state(m.layers[1])) for m in (model, other)]
    for leaves in zip(*states, strict=True):
        np.testing.assert_array_equal(*leaves)
    finished.remove()
    assert not (tmp_path / "work").exists()


def test_layers_of_another_run_are_deleted_only_where_asked(model, tmp_path):
    finished = FinishedLayers.open(tmp_path, "run")
    finished.save(model, 0)
    finished.close()
    other = small_model(CONFIG)
    for _ in range(2):
        with pytest.raises(ValueError, match="holds 1 finished layer of another command: run that"):
            FinishedLayers.open(tmp_path, "another")
    again = FinishedLayers.open(tmp_path, "run")
    assert again.load(other, 0, RECIPE)
    again.close()
    another = FinishedLayers.open(tmp_path, "another", overwrite=True)
    assert not another.load(other, 0, RECIPE)
    another.close()
    FinishedLayers.open(tmp_path, "run").close()  # no layer is lost


def test_a_folder_of_other_files_is_left_alone(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(ValueError, match="is not empty and holds no finished layers"):
        FinishedLayers.open(tmp_path, "run")
    work = tmp_path / "work"
    finished = FinishedLayers.open(work, "run")
    (work / "notes.txt").write_text("text")
    finished.save(model, 0)
    finished.remove()
    assert [path.name for path in work.iterdir()] == ["notes.txt"]
    assert (tmp_path / "thesis.tex").exists()


def cut_file(file, arrays, advance):
    """Writes half of the bytes that `array_file.write` writes, and ends."""
    array_file_write(file, arrays, advance)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    raise KeyboardInterrupt


def cut_text(path, text, **options):
    """Writes half of a text, and ends."""
    path.write_bytes(text[: len(text) // 2].encode())
    raise KeyboardInterrupt


def end(*arguments, **options):
    raise KeyboardInterrupt


array_file_write = finished.array_file.write


@pytest.mark.parametrize(
    ("where", "name", "action"),
    [
        (finished.array_file, "write", end),
        (finished.array_file, "write", cut_file),
        (finished.os, "replace", end),
        (finished.Path, "write_text", end),
        (finished.Path, "write_text", cut_text),
    ],
)
def test_an_end_at_any_moment_leaves_no_half_layer(
    model, tmp_path, monkeypatch, where, name, action
):
    work = FinishedLayers.open(tmp_path, "run")
    work.save(model, 0)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, action)
        with pytest.raises(KeyboardInterrupt):
            work.save(model, 1)
    work.close()
    again, other = FinishedLayers.open(tmp_path, "run"), small_model(CONFIG, seed=1)
    assert [again.load(other, number, RECIPE) for number in (0, 1)] == [True, False]
    again.save(model, 1)
    assert again.load(other, 1, RECIPE)
    states = [jax.tree.leaves(nnx.state(m.layers)) for m in (model, other)]
    assert all(map(np.array_equal, *states))
    again.remove()
    assert not tmp_path.exists()


def test_a_file_with_other_bytes_is_no_layer(model, tmp_path):
    finished = FinishedLayers.open(tmp_path, "run")
    finished.save(model, 0)
    [file] = tmp_path.glob("layer-*.safetensors")
    file.write_bytes(file.read_bytes()[:-200] + b"\0" * 200)
    assert not finished.load(small_model(CONFIG), 0, RECIPE)


def test_one_process_at_a_time(tmp_path):
    first = FinishedLayers.open(tmp_path / "work", "run")
    with pytest.raises(ValueError, match="another process keeps its finished layers"):
        FinishedLayers.open(tmp_path / "work", "run")
    first.close()
    FinishedLayers.open(tmp_path / "work", "run").remove()
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match="is a file: expected a folder"):
        FinishedLayers.open(tmp_path / "file", "run")


def test_runs_are_told_apart(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    windows = Windows(np.ones((1, 2), np.int32), np.ones((1, 2), bool))
    other = Windows(np.zeros((1, 2), np.int32), np.ones((1, 2), bool))
    run = describe_run(tmp_path, RECIPE, [windows], "bfloat16")
    assert run == describe_run(tmp_path, RECIPE, [windows], "bfloat16")
    wide = Windows(*(array.reshape(2, 1) for array in windows))
    others = {
        describe_run(tmp_path, RECIPE, [wide], "bfloat16"),
        describe_run(tmp_path, RECIPE, [other], "bfloat16"),
        describe_run(tmp_path, RECIPE, [windows], "float16"),
        describe_run(tmp_path, Recipe.of("W4A16KV16"), [windows], "bfloat16"),
    }
    (tmp_path / "model.safetensors").write_bytes(b"12")
    others.add(describe_run(tmp_path, RECIPE, [windows], "bfloat16"))
    assert len(others) == 5
    assert run not in others
