"""The list of planted bugs fits the sources, and the tool tells the seen from the missed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.planted_bugs import ROOT, Bug, plant, read

BUGS = read()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_listed_bug_can_be_planted(bug):
    """Where this fails, give `planted_bugs.toml` the text that the source has now."""
    assert bug.planted(ROOT) != (ROOT / bug.file).read_text(encoding="utf-8")
    assert bug.tests
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8") if name else True


def write(folder: Path) -> Bug:
    """A tree with a file and a test of it, and a bug that the test sees."""
    (folder / "halves.py").write_text("def half(n):\n    return n // 2\n")
    (folder / "test_halves.py").write_text(
        "from halves import half\n\ndef test_half():\n    assert half(4) == 2\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  sweep\n  fuzz\n  gpu\n")
    return Bug("half is less", "halves.py", "n // 2", "n // 3", ["test_halves.py"])


def test_bugs_are_seen_or_missed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # to start sooner
    bug = write(tmp_path)
    before = (tmp_path / bug.file).read_text()
    assert plant(tmp_path, bug) == "seen"
    assert plant(tmp_path, dataclasses.replace(bug, new="n // 2 + 0")) == "MISSED"
    assert "did not run" in plant(tmp_path, dataclasses.replace(bug, new="(n"))
    assert (tmp_path / bug.file).read_text() == before
    for old, count in (("n // 4", 0), ("n", 3)):
        with pytest.raises(ValueError, match=f"half is less: .* {count} times, expected once"):
            dataclasses.replace(bug, old=old).planted(tmp_path)
