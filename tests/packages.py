"""Builds what people install."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

sdist = pytest.importorskip("hatchling.builders.sdist")
wheel = pytest.importorskip("hatchling.builders.wheel")
ROOT = Path(__file__).resolve().parents[1]
BUILDERS = {"wheel": wheel.WheelBuilder, "sdist": sdist.SdistBuilder}


def build(kind: str, source: Path, folder: Path, version: str = "standard") -> Path:
    """Builds the wheel or the sdist of a checkout, in this process."""
    [path] = BUILDERS[kind](str(source)).build(directory=str(folder), versions=[version])
    return Path(path)


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def copy_checkout(folder: Path) -> Path:
    """Copies this checkout, but for hidden files and what is built."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))
