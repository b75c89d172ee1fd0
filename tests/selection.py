"""Parts of the suite: a shard of its files, and the files that test what has changed."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

ROOT = Path(__file__).parents[1]


def in_shard(files: Sequence[str], shard: str) -> list[bool]:
    """Whether each test belongs to a shard: whole files, about as many tests as in the others.

    Args:
        files: the file of each test.
        shard: such as `1/4`, the first of four. Raises ValueError for anything else.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"the shard is {shard!r}: expected one such as 1/4, from 1/4 to 4/4")
    number, count = int(match[1]), int(match[2])
    loads, shards = [0] * count, {}
    for file, tests in sorted(Counter(files).items(), key=lambda item: (-item[1], item[0])):
        shards[file] = loads.index(min(loads))
        loads[shards[file]] += tests
    return [shards[file] == number - 1 for file in files]


def files_for(changed: Iterable[str], tests: Iterable[str]) -> list[str]:
    """The test files to run for changed files: those that changed, or import a changed module.

    changed, tests: paths from the root. A changed helper of the tests counts as a module, too.
    """
    changed = set(changed)
    names = {name for path in changed if (name := _module(path)) is not None}
    return sorted(
        path
        for path in tests
        if path in changed or not names.isdisjoint(imports((ROOT / path).read_text("utf-8")))
    )


def imports(text: str) -> set[str]:
    """The modules that a file imports, and the names that it imports from modules, dotted."""
    found = set()
    for module, names in re.findall(r"^from ([\w.]+) import (\([^)]*\)|.*)$", text, re.MULTILINE):
        found.add(module)
        found.update(f"{module}.{name}" for name in re.findall(r"\w+", names))
    return found | set(re.findall(r"^import ([\w.]+)", text, re.MULTILINE))


def _module(path: str) -> str | None:
    """The name by which tests import a Python file; None for other files."""
    if not path.endswith(".py"):
        return None
    floor, *rest = PurePath(path).with_suffix("").parts
    floor = {"models": "mpjax.models", "pallas_kernels": "mpjax.kernels"}.get(floor, floor)
    return ".".join([floor, *rest]).removesuffix(".__init__")


def _listed(*command: str) -> list[str]:
    run = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def main() -> None:
    """Prints the test files for what differs from a commit, also if it is not committed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("commit", nargs="?", default="HEAD")
    changed = _listed("diff", "--name-only", parser.parse_args().commit)
    changed += _listed("ls-files", "--others", "--exclude-standard")
    paths = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py"))
    print(*files_for(changed, paths))


if __name__ == "__main__":
    main()
