"""Plants known bugs in a copy of the tree, one at a time, and runs the tests that see each.

`planted_bugs.toml` lists the bugs. `python -m tests.planted_bugs [TEXT ...]` plants those whose
name or file has one of the texts, by default all of them, and fails if a bug is missed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST, COPY = ROOT / "tests/planted_bugs.toml", ROOT / "build/planted"
# What runs by default: a test that is named would also run its cases of the sweep.
PYTEST = ["-m", "pytest", "-x", "-q", "-m", "not sweep and not fuzz and not gpu"]
WATCHDOG = ["-o", "faulthandler_timeout=200", "-o", "faulthandler_exit_on_timeout=true"]
FAILED = 1  # pytest's status if tests ran and one failed; others say that tests could not run


@dataclasses.dataclass(frozen=True)
class Bug:
    """A text of a source file, another one in its place, and the tests that then fail.

    name: what goes wrong. old: occurs once in the file. tests: files or tests, as pytest has them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def planted(self, root: Path) -> str:
        """The file's text with the bug. Raises ValueError unless the old text occurs once."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has the old text {count} times, expected once: give "
                "tests/planted_bugs.toml the text that the file has now"
            )
        return text.replace(self.old, self.new)


def read() -> list[Bug]:
    """The listed bugs."""
    return [Bug(**each) for each in tomllib.loads(LIST.read_text(encoding="utf-8"))["bugs"]]


def chosen(bugs: Iterable[Bug], texts: Sequence[str]) -> list[Bug]:
    """The bugs whose name or file has one of the texts; all without texts."""
    return [bug for bug in bugs if not texts or any(t in bug.name or t in bug.file for t in texts)]


def copy_tree(root: Path, copy: Path) -> None:
    """Copies all files that git knows or doesn't ignore; links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(copy, ignore_errors=True)
    for name in filter(None, names.split("\0")):
        if os.path.lexists(root / name):  # not one that was removed since the last commit
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name, follow_symlinks=False)


def run_tests(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests in the copy, until the first that fails."""
    programs = {
        "JAX_COMPILATION_CACHE_DIR": str(copy.with_name("planted-programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, *PYTEST, *WATCHDOG, *tests]
    # What the bug leaves as bytecode could be taken for the file's, which is as old to the second.
    environment = programs | os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=copy, env=environment, check=False, capture_output=True, text=True
    )


def plant(copy: Path, bug: Bug) -> str:
    """What the bug's tests make of it: "seen", "MISSED", or why they could not run."""
    file = copy / bug.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(bug.planted(copy), encoding="utf-8")
    try:
        done = run_tests(copy, bug.tests)
    finally:
        file.write_text(whole, encoding="utf-8")
    if done.returncode in (0, FAILED):
        return "seen" if done.returncode else "MISSED"
    return f"its tests did not run (pytest's status {done.returncode}):\n{done.stdout[-3000:]}"


def main(texts: Sequence[str]) -> int:
    """Plants bugs; the status of the process."""
    bugs = chosen(read(), texts)
    copy_tree(ROOT, COPY)
    for bug in bugs:
        bug.planted(COPY)  # all old texts are there, before anything runs for minutes
    done = run_tests(COPY, sorted({test for bug in bugs for test in bug.tests}))
    if done.returncode:
        print(f"These tests must pass before bugs are planted.\n{done.stdout[-5000:]}")
        return done.returncode
    missed = 0
    for bug in bugs:
        begin = time.perf_counter()
        found = plant(COPY, bug)
        missed += found != "seen"
        print(f"{time.perf_counter() - begin:4.0f} s  {bug.file}: {bug.name}: {found}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} bugs are seen.")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
