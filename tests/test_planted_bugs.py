"""The list of planted bugs fits the sources, and the tool tells the seen from the missed."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from tests import planted_bugs
from tests.planted_bugs import ROOT, Bug, chosen, copy_tree, plant, read

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


def test_all_floors_have_bugs_of_different_names():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 50
    assert {bug.file.split("/")[0] for bug in BUGS} == {"mpjax", "models", "pallas_kernels"}
    assert chosen(BUGS, ["pallas_kernels/experts", BUGS[0].name])[0] is BUGS[0]
    assert chosen(BUGS, []) == BUGS


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


def test_a_copy_has_what_git_knows_or_does_not_ignore(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "inner").mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=source, check=True)
    for name in ("new.py", "ignored.txt", "inner/new.py"):
        (source / name).write_text(name)
    (source / ".gitignore").write_text("ignored.txt\n")
    (source / "link").symlink_to("inner")
    copy.mkdir()
    (copy / "old.py").write_text("of the last copy")
    copy_tree(source, copy)
    names = sorted(path.name for path in copy.iterdir())
    assert names == [".gitignore", "inner", "link", "new.py"]
    assert (copy / "link").is_symlink()


def test_the_status_tells_whether_all_are_seen(tmp_path, monkeypatch, capsys):
    bug = write(tmp_path)
    missed = dataclasses.replace(bug, name="nothing changes", new="n // 2 + 0")
    changes = {
        "COPY": tmp_path,
        "copy_tree": lambda *_: None,
        "run_tests": lambda *_: subprocess.CompletedProcess([], 0),
        "plant": lambda _, bug: "seen" if bug.name == "half is less" else "MISSED",
    }
    for name, value in changes.items():
        monkeypatch.setattr(planted_bugs, name, value)
    for bugs, status, said in (([bug], 0, "1 of 1"), ([bug, missed], 1, "1 of 2")):
        monkeypatch.setattr(planted_bugs, "read", lambda bugs=bugs: bugs)
        assert planted_bugs.main([]) == status
        assert capsys.readouterr().out.endswith(f"{said} bugs are seen.\n")
