"""Measures an engine on several loads: python -m benchmarks.serving FOLDER [NAME ...].

Each case is a run of `mpjax bench serve`, which writes NAME.json to the folder. Each takes a few
minutes on an H100, most of which is compiling.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHARING = ("--requests", "32", "--prompt-tokens", "4096", "--new-tokens", "2")
CASES = {
    "at_once": (
        *("--precision", "W4A16KV8,W4A8KV8", "--requests", "256"),
        *("--prompt-tokens", "1024", "--new-tokens", "512"),
    ),
    "uneven": (
        *("--requests", "512", "--prompt-tokens", "lognormal:1024:0.8:4096"),
        *("--new-tokens", "lognormal:512:0.8:4096", "--static", "64"),
    ),
    "shared": (*SHARING, "--shared-tokens", "3072"),
    "not_shared": (*SHARING, "--shared-tokens", "3072", "--no-share"),
    "late_prompt": (
        *("--requests", "32", "--prompt-tokens", "1024", "--new-tokens", "2000"),
        *("--late-prompt", "32768", "--slots", "64", "--steps", "1"),
    ),
    "alone": ("--requests", "1", "--prompt-tokens", "2048", "--new-tokens", "512", "--static", "1"),
}


def command(name: str, folder: Path) -> list[str]:
    """The command line of a case."""
    output = str(folder / f"{name}.json")
    start = [sys.executable, "-m", "mpjax", "bench", "serve"]
    return [*start, *CASES[name], "--no-plot", "--output", output]


def main(arguments: list[str]) -> int:
    """Runs the cases that are named, or all; returns how many failed, and 2 for wrong usage."""
    if not arguments:
        print((__doc__ or "").partition("\n")[0], file=sys.stderr)
        return 2
    folder, *names = arguments
    if unknown := sorted(set(names) - set(CASES)):
        print(f"there is no case {unknown[0]!r}: expected {', '.join(CASES)}", file=sys.stderr)
        return 2
    return sum(
        subprocess.run(command(name, Path(folder)), check=False).returncode != 0
        for name in names or CASES
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
