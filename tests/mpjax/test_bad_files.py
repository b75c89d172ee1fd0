"""Damaged, misplaced and hostile files: the lists are in the folder `bad_files`, a case a line."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.checkpoint import CheckpointError
from mpjax.cli import info
from mpjax.tuning.products import model_shapes
from tests.mpjax.bad_files.any_file import JSON_OF_TEXT, TEXTS, misplaced, unparsable, unreadable
from tests.mpjax.bad_files.configs import CONFIGS, LIES
from tests.mpjax.bad_files.folders import FOLDERS
from tests.mpjax.bad_files.odd import ODD
from tests.mpjax.bad_files.texts import TOKENIZERS
from tests.mpjax.bad_files.ways import INDEX, WEIGHTS, Case, bounds, write_sound
from tests.mpjax.bad_files.weights import HEADERS, WEIGHT_FILES

# Both for `mpjax.load` and for `mpjax info`.
OF_WEIGHTS = [
    *(case for name in (WEIGHTS, "config.json", INDEX) for case in misplaced(name)),
    *(case for name in ("config.json", INDEX) for case in (*unreadable(name), *unparsable(name))),
    *((f"header: {name}", way, said) for name, way, said in HEADERS),
    *WEIGHT_FILES,
    *((f"config: {name}", way, said) for name, way, said in CONFIGS),
    *((f"lie: {name}", way, said) for name, way, said in LIES),
]
OF_TEXT = [
    *(case for name in (*TEXTS, *JSON_OF_TEXT) for case in (*misplaced(name), *unreadable(name))),
    *(case for name in JSON_OF_TEXT for case in unparsable(name)),
    *TOKENIZERS,
]
# Files of a model that mpjax saved.
OF_SAVED = [case for case in (*misplaced("mpjax.json"), *unreadable("mpjax.json"))]
OF_SAVED += unparsable("mpjax.json")


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("way", "said"), [pytest.param(way, said, id=f"{name:.60}") for name, way, said in cases]
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_sound(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture(scope="module")
def sound_saved(sound, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    mpjax.save(mpjax.load(sound), folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def require_refused(read, folder: Path, said: str) -> None:
    with bounds(), pytest.raises(CheckpointError) as caught:
        read(folder)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert len(message) < 1000
    message.encode()  # can be shown


@pytest.fixture(scope="module")
def expected(sound):
    return mpjax.load(sound)


def test_the_sound_folder_is_sound(sound_saved, expected):
    for lm in (expected, mpjax.load(sound_saved)):
        assert (lm.tokenizer.stop_ids, lm.tokenizer.special_ids) == ((2,), {0, 2, 3})
        assert lm.num_parameters == 86_336


@pytest.mark.filterwarnings("ignore:.* does not name .* of the shards' tensors")
@pytest.mark.parametrize("way", [pytest.param(way, id=name) for name, way in ODD])
def test_odd_files(way, folder, expected):
    way(folder)
    with bounds():
        lm = mpjax.load(folder)
    for found, leaf in zip(
        *(jax.tree.leaves(nnx.state(x.model)) for x in (lm, expected)), strict=True
    ):
        np.testing.assert_array_equal(found, leaf)
    assert lm.tokenizer.stop_ids == expected.tokenizer.stop_ids
    assert lm.tokenizer.special_tokens == expected.tokenizer.special_tokens
    assert info.inspect(folder).describe()[1:] == expected.describe()[1:]  # but for its folder


@each(OF_WEIGHTS)
def test_bad_weights_and_configurations(way, said, folder):
    way(folder)
    require_refused(mpjax.load, folder, said)
    if "NaN" not in said:  # which only values show
        require_refused(info.inspect, folder, said)


@each(OF_TEXT)
def test_bad_tokenizers(way, said, folder):
    way(folder)
    require_refused(mpjax.load, folder, said)


@each(OF_SAVED)
def test_bad_descriptions(way, said, sound_saved, tmp_path):
    folder = shutil.copytree(sound_saved, tmp_path / "model")
    way(folder)
    for read in (mpjax.load, info.inspect, model_shapes):
        require_refused(read, folder, said)


@each(FOLDERS)
def test_folders_that_are_no_checkpoint(way, said, folder):
    way(folder)
    require_refused(mpjax.load, folder, said)
