from __future__ import annotations

import pytest
from typer.testing import CliRunner

import mpjax
from mpjax.cli.application import app
from mpjax.quantization.finished import FinishedLayers


def quantize(*arguments):
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 30)
    return path


def test_a_folder_is_written_and_loads(tiny_folder, text, tmp_path):
    target = tmp_path / "quantized"
    options = ("--precision", "W4g32A16KV8", "--method", "awq", "--text", text, "--window", 64)
    result = quantize(tiny_folder, target, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{target}: W4g32A16KV8H8, ")
    assert mpjax.load(target).precision == "W4g32A16KV8H8"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    again = quantize(tiny_folder, target, *options)
    assert again.exit_code == 1
    assert "is not empty" in again.stderr


def test_a_recipe_gives_maps_other_precisions(tiny_folder, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'precision = "W4g32A16KV16"\nmethod = "rtn"\n'
        '[[rules]]\nmodules = "layers.*.mlp.down"\nprecision = "W8g64A16KV16"\n'
    )
    result = quantize(tiny_folder, tmp_path / "mixed", "--recipe", recipe)
    assert (result.exit_code, result.stderr) == (0, "")
    assert mpjax.load(tmp_path / "mixed").precision == "W4g32+W8g64A16KV16H8"


def test_a_budget_is_kept_and_its_recipe_written(two_layers_folder, text, tmp_path):
    target = tmp_path / "small"
    options = ("--budget", 6, "--method", "range", "--choices", "W4g32, W8g32", "--text", text)
    result = quantize(two_layers_folder, target, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    recipe = tmp_path / "small.toml"
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{recipe}: 6.00 bits")
    assert second.startswith(f"{target}: W4g32+W8g32A16KV16H8, ")
    assert recipe.read_text().startswith("# mpjax quantize --budget 6\nprecision = ")
    assert {rule.weights.bits for rule in mpjax.Recipe.read(recipe).rules} == {4, 8}
    kept = recipe.read_text()
    quantize(two_layers_folder, target, "--recipe", recipe, "--text", text, "--overwrite")
    assert recipe.read_text() == kept
    plain = ("--precision", "W4g32A16KV16", "--method", "rtn", "--overwrite")
    assert quantize(two_layers_folder, target, *plain).exit_code == 0
    assert not recipe.exists()  # which is not that of the new model
    recipe.write_text("mine")
    assert quantize(two_layers_folder, target, *plain).exit_code == 0
    result = quantize(two_layers_folder, tmp_path / "small", *options, "--overwrite")
    assert (result.exit_code, recipe.read_text()) == (1, "mine")
    assert "is in the place of the recipe" in result.stderr


def test_a_budget_that_is_too_small_is_named_as_an_option(tiny_folder, text, tmp_path):
    options = ("--budget", 0.5, "--choices", "W4g32", "--text", text)
    result = quantize(tiny_folder, tmp_path / "small", *options)
    assert result.exit_code == 1
    assert result.stderr.startswith("mpjax: --budget is 0.5, but even the smallest choice for each")


def test_scales_of_the_whole_model_are_learned(tiny_folder, text, tmp_path, monkeypatch):
    seen = []

    def learn(lm, documents, **options):
        seen.append((documents, options["reference"], options["learning"].epochs))
        return lm

    monkeypatch.setattr(mpjax, "learn_scales", learn)
    options = ("--method", "rtn", "--text", text, "--learn", 3, "--window", 64)
    # Of which text chooses the blocks, though rtn needs none.
    result = quantize(tiny_folder, tmp_path / "target", "--precision", "W4AxKV16", *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert seen.pop() == ([text.read_text()], str(tiny_folder), 3)


def test_layers_that_are_kept_are_told_of(tiny_folder, tmp_path, monkeypatch):
    """After an interruption; an error that would come again leaves none."""
    save = FinishedLayers.save

    def run(error, *more):
        def fail(self, model, number):
            save(self, model, number)
            raise error

        monkeypatch.setattr(FinishedLayers, "save", fail)
        options = ("--precision", "W4A16KV16", "--method", "rtn")
        return quantize(tiny_folder, tmp_path / "target", *options, *more)

    work = tmp_path / ".target.layers"
    result = run(KeyboardInterrupt())
    assert f"{work} keeps 1 finished layer: the same command goes on there" in result.stderr
    assert work.exists()
    result = run(KeyboardInterrupt(), "--precision", "W8A16KV16")
    assert result.exit_code == 1
    assert "holds 1 finished layer of another command: run that command again" in result.stderr
    result = run(KeyboardInterrupt(), "--precision", "W8A16KV16", "--overwrite")
    assert f"{work} keeps 1 finished layer: the same command goes on there" in result.stderr
    result = run(ValueError("layer 0: it is damaged"), "--precision", "W8A16KV16")
    assert (result.exit_code, result.stderr) == (1, "mpjax: layer 0: it is damaged\n")
    assert list(tmp_path.iterdir()) == []
