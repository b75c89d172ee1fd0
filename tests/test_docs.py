"""The Python of the first pages runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mpjax

ROOT = Path(__file__).resolve().parents[1]
# The pages that a newcomer copies from. Blocks of other pages go on from their text.
PAGES = ("README.md", "docs/index.md", "docs/control.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLACEHOLDER = "Qwen3-8B-AWQ/"  # stands for the reader's own checkpoint


def blocks() -> dict[str, str]:
    """The pages' blocks of Python, each once, with the page and line at which it begins."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            found.setdefault(match[1], f"{page}:{line}")
    return {place: code for code, place in found.items()}


def test_each_page_has_a_block():
    for page in PAGES:
        assert BLOCK.search((ROOT / page).read_text(encoding="utf-8")), page


@pytest.mark.parametrize(("place", "code"), blocks().items(), ids=blocks())
def test_a_block_runs_as_it_stands(place, code, monkeypatch):
    load = mpjax.load

    def load_bundled(path, **arguments):
        return load(mpjax.bundled_model() if path == PLACEHOLDER else path, **arguments)

    monkeypatch.setattr(mpjax, "load", load_bundled)
    exec(compile(code, place, "exec"), {"__name__": place})


FILE = re.compile(r"`((?:benchmarks|examples|models|mpjax|pallas_kernels|tests)/[\w/]+\.\w+)`")
MODULE = re.compile(r"python -m ((?:benchmarks|examples)(?:\.\w+)*)")
MADE_UP = {"pallas_kernels/codes/power.py"}  # a file that a tutorial adds


def test_files_and_commands_that_pages_name_exist():
    named: dict[str, str] = {}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        modules = (f"{module.replace('.', '/')}.py" for module in MODULE.findall(text))
        named |= dict.fromkeys([*FILE.findall(text), *modules], page.name)
    assert len(named) > 50
    missing = {name for name in named if not (ROOT / name).exists()} - MADE_UP
    assert not missing, {name: named[name] for name in missing}
