"""The tiny model has two layers here: quantisation goes from one layer to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpjax


@pytest.fixture(scope="session")
def tiny_folder(two_layers_folder: Path) -> Path:
    """The folder of the model."""
    return two_layers_folder


@pytest.fixture(scope="session")
def tiny(two_layers: mpjax.LanguageModel) -> mpjax.LanguageModel:
    """The model."""
    return two_layers
