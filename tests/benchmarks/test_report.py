from __future__ import annotations

import dataclasses
import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from benchmarks import report
from benchmarks.figures import FIGURES, speed
from mpjax.bench import attention, figures, gemm, generate
from mpjax.cli.application import app
from mpjax.kernels import ProductFormat
from mpjax.kernels.gemm.plans import OPERATION, Problem, plan_by_rule
from mpjax.kernels.plans.tables import SHIPPED, file_name, read
from tests.mpjax.bench.rows import gemm_row


def shown() -> set[str]:
    """The names of the figures that pages show."""
    pages = [page.read_text(encoding="utf-8") for page in report.DOCS.rglob("*.md")]
    return {match[2] for text in pages for match in report.PLACE.finditer(text)}


def test_pages_and_plots_are_those_of_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(figures.Figure, "savefig", lambda _, path, **options: path.touch())
    for page in report.DOCS.rglob("*.md"):
        copy = tmp_path / page.relative_to(report.DOCS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    written = report.write(report.RESULTS, tmp_path)
    assert written
    for page in written:
        expected = (report.DOCS / page.relative_to(tmp_path)).read_text(encoding="utf-8")
        assert page.read_text(encoding="utf-8") == expected, "run python -m benchmarks.report"
    plots = {path.name for path in (report.DOCS / "benchmarks").glob("*.svg")}
    assert plots == {path.name for path in (tmp_path / "benchmarks").glob("*.svg")}


def test_a_page_shows_every_result_file():
    paths = {path for name in shown() for path in FIGURES[name].paths(report.RESULTS)}
    assert paths == {*report.RESULTS.glob("*.json")}


def test_text_around_figures_stays(tmp_path, monkeypatch):
    def table(results):
        return ["name", "value"], [[row["name"], row["value"]] for row in results]

    figures = report.Figures(("x*.json",), table, notes=lambda result: ["A note."])
    monkeypatch.setitem(FIGURES, "x", figures)
    stamp = {"device": "GPU", "versions": {"jax": "0.99"}, "command": "a command"}
    for name in ("x1", "x2"):
        row = {"name": name, "value": "3"}
        (tmp_path / f"{name}.json").write_text(json.dumps(stamp | row))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    begin, end = "before\n<!-- figures: x -->\n", "<!-- end of figures -->\nafter\n"
    page.write_text(f"{begin}something old\n{end}")
    for _ in range(2):
        assert report.write(tmp_path, tmp_path / "docs") == [page]
    parts = [
        f"\n| name | value |\n| --- | ---: |\n| {name} | 3 |\n\n"
        "A note.\n\n`a command` · GPU, jax 0.99\n"
        for name in ("x1", "x2")
    ]
    assert page.read_text() == begin + "".join(parts) + "\n" + end
    with pytest.raises(FileNotFoundError, match="no file x"):
        report.write(tmp_path / "empty", tmp_path / "docs")


def test_commands_of_the_pages_exist(monkeypatch):
    for name in shown():
        figures = FIGURES[name]
        for path in () if figures.is_joined else figures.paths(report.RESULTS):
            program, *words = shlex.split(json.loads(path.read_text())["command"])
            options = [word for word in words if word.startswith("--")]
            if program == "mpjax":
                command = words[: 1 if words[0] == "evaluate" else 2]
                said = CliRunner().invoke(app, [*command, "--help"], terminal_width=200).output
            else:
                said = (report.HERE.parent / f"{words[1].replace('.', '/')}.py").read_text()
            unknown = [option for option in options if not re.search(rf"{option}(?![\w-])", said)]
            assert unknown == [], path.name


def test_products_with_another_plan_since_are_marked():
    entries = read(OPERATION, SHIPPED / file_name("NVIDIA H200"), "NVIDIA H200").entries
    tuned = next(key for key, entry in entries.items() if entry.plan.config is not None)
    by_rule = Problem(7, ProductFormat.of("uint4:g128"), 4224, 4224, speed.GPUS["NVIDIA H200"])
    found = []
    for key, plan in (
        (tuned, entries[tuned].plan),
        (OPERATION.key_of(by_rule), plan_by_rule(by_rule)),
    ):
        assert plan.config is not None
        place = {"format": key.format, "K": key.channels, "N": key.outputs, "M": key.rows}
        for stages in (plan.config.stages, plan.config.stages + 1):
            config = dataclasses.asdict(plan.config) | {"stages": stages}
            found.append(gemm_row(implementation="triton", configuration=config, **place))
    result = {"results": found, "device": "NVIDIA H200"}
    _, lines = FIGURES["gemm"].table([result])
    assert [line[-1] for line in lines] == ["triton", "triton \\*"] * 2
    assert "\\* Measured with an older plan: 2 of 4 rows." in FIGURES["gemm"].notes(result)


@pytest.mark.parametrize(
    ("pattern", "bench"),
    [("generate*.json", generate), ("gemm*.json", gemm), ("attention*.json", attention)],
)
def test_recorded_results_are_within_their_gates(pattern, bench):
    paths = sorted(report.RESULTS.glob(pattern))
    assert paths
    for path in paths:
        result = json.loads(path.read_text())
        assert bench.failures(result.get("results", [result])) == []
