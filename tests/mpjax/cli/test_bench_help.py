from __future__ import annotations

import pytest

from mpjax.cli import bench_help

TEXTS = {name: text for name, text in vars(bench_help).items() if name.endswith("EPILOG")}


@pytest.mark.parametrize("name", TEXTS)
def test_paragraphs_that_are_not_wrapped_are_marked(name):
    paragraphs = TEXTS[name].strip().split("\n\n")
    assert paragraphs[0].startswith("\b\nExamples:\n  mpjax bench ")
    for paragraph in paragraphs:
        lines = paragraph.splitlines()
        assert len(lines) == 1 or lines[0] == "\b" or not any(x.startswith("  ") for x in lines)
        assert max(map(len, lines[1:]), default=0) <= 79
