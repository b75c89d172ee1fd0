"""Writes docs/benchmarks.md, the pages of tables in docs/benchmarks, and plots from saved results.

python -m benchmarks.report
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mode
from typing import Any

from benchmarks import (
    block_steps,
    blocks,
    memory,
    methods,
    online_rotation,
    quantization,
    summary,
    systems,
)
from benchmarks.measured import models_or_shapes
from mpjax.bench import agreement_plot, attention, blocks_plot, gemm, generate, roofline, tables
from mpjax.cli.evaluate import markdown
from mpjax.kernels import ProductFormat, WeightFormat
from mpjax.kernels.device import Limits
from mpjax.kernels.gemm.plans import OPERATION, Problem, plan_by_rule
from mpjax.kernels.gemm.shapes import MODELS
from mpjax.kernels.plans.tables import SHIPPED, file_name, read

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
SHARES = 10  # number of kernels of a decoding step that are listed by name
GPUS = {"NVIDIA H200": Limits(132, 9.0)}  # GPUs with a shipped table, and their limits
Results = list[dict[str, Any]]
# Models of the benchmarks of blocks.
HELD_OUT = "held_out.jsonl"  # of the bundled model, the default text of `mpjax evaluate`
ABOUT = {"bundled": "the bundled model", "planted": "a random model with planted outliers"}


def main() -> None:
    """Writes the pages of this checkout, and prints the path of the first."""
    write(RESULTS, DOCS)
    print(DOCS / "benchmarks.md")


def write(results: Path, docs: Path) -> None:
    """Writes benchmarks.md into the folder `docs`, and pages of tables into docs/benchmarks.

    A benchmark may have several result files, such as `gemm*.json`, measured at different times.
    Each has its own table and source; a plot shows the rows of all. A benchmark without result
    files is left out.
    """
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    page = [(HERE / "overview.md").read_text()]
    for name, patterns, build, summarise in (
        ("generate", ("generate*.json",), _generate, _summary_of_generate),
        ("gemm", ("gemm*.json",), _gemm, _summary_of_gemm),
        ("attention", ("attention*.json",), _attention, _summary_of_attention),
        (
            "quality",
            (
                *("perplexity*.json", "agreement*.json", "methods*.json", "blocks*.json"),
                *("block-steps*.json", "online-rotation*.json", "memory*.json"),
                "quantization.json",
            ),
            _quality,
            _summary_of_quality,
        ),
    ):
        paths = [path for pattern in patterns for path in sorted(results.glob(pattern))]
        if found := [json.loads(path.read_text()) for path in paths]:
            (folder / f"{name}.md").write_text("\n".join(build(found, folder)))
            page += summarise(found)
    lines = systems.page(
        lambda pattern: (json.loads(path.read_text()) for path in sorted(results.glob(pattern)))
    )
    if lines:
        (folder / "systems.md").write_text("\n".join(lines))
    page.append((HERE / "limits.md").read_text())
    (docs / "benchmarks.md").write_text("\n".join(page))


def _summary_of_generate(results: Results) -> list[str]:
    rows = [generate.figures(row) for result in results for row in result.get("results", [result])]
    return [
        "## Whole models\n",
        f"Qwen3-8B's shapes with random weights, decoding after {summary.CONTEXT} tokens.\n",
        _plot("tokens per second below the memory roofline", "benchmarks/generate.svg"),
        summary.generate(rows),
    ]


def _summary_of_gemm(results: Results) -> list[str]:
    rows = [gemm.figures(row) for rows in _of_one_gpu(results) for row in rows]
    return [
        "## Products with packed weights\n",
        "The largest matrix of a layer of Qwen3-8B, K4096 N24576. Activations of 8 bits are "
        "rounded before, as by a model's norm.\n",
        _plot("TFLOP/s over rows, below the rooflines", "benchmarks/gemm-qwen3-8b.svg"),
        summary.gemm(rows),
    ]


def _summary_of_attention(results: Results) -> list[str]:
    rows = [attention.figures(row) for result in results for row in result["results"]]
    return [
        "## Attention over the cache\n",
        "One new token for each sequence; 32 query heads and 8 KV heads of 128 channels. Columns "
        "are sequences × tokens.\n",
        _plot("times as fast as cuDNN, below the rooflines", "benchmarks/attention.svg"),
        summary.attention(rows),
    ]


def _summary_of_quality(results: Results) -> list[str]:
    rows = [
        row
        for result in results
        if "rows" in result and not result.get("reference") and _is_bundled(result)
        for row in result["rows"]
    ]
    return [
        "## Quality\n",
        "The bundled model, a small one that writes Python, rounded to nearest, on text that it "
        "has not seen.\n",
        summary.perplexity(rows),
    ]


def _source(result: dict[str, Any], command: str) -> str:
    return f"`{command}` · {result['device']}, jax {result['versions']['jax']}\n"


def _plot(text: str, name: str) -> str:
    return f"![{text}]({name})\n"


def _generate(results: Results, folder: Path) -> list[str]:
    # A result file holds the rows of a sweep, or is itself a row.
    sweeps = [result.get("results", [result]) for result in results]
    order = sorted(range(len(sweeps)), key=lambda i: _first_case(sweeps[i]))
    results, sweeps = [results[i] for i in order], [sweeps[i] for i in order]
    over_contexts = [row for rows in sweeps if _spans_contexts(rows) for row in rows]
    others = [row for rows in sweeps if not _spans_contexts(rows) for row in rows]
    parts = ["# Whole models: Qwen3-8B's shapes, random weights\n"]
    for rows, about, name in (
        (others, "tokens per second below the memory roofline", "generate.svg"),
        (over_contexts, "tokens per second over the context", "generate-context.svg"),
    ):
        if rows:
            roofline.draw_generate(rows, folder / name)
            rows = rows if rows is over_contexts else sorted(rows, key=lambda row: row["batch"])
            parts.append(tables.markdown(generate.HEADERS, map(generate.cells, rows)))
            parts.append(_plot(about, name))
    if any(row.get("filled") for row in others + over_contexts):
        parts.append(
            "Rows without a time to the first token were decoded from a cache of random keys and "
            "values, for which there is no text to check against.\n"
        )
    for result, rows in zip(results, sweeps, strict=True):
        parts.append(_source(result, _generate_command(rows)))
        if not all("step_bytes" in row for row in rows):
            parts.append("Peak memory includes the 2 GB with which bandwidth was measured.\n")
    return [*parts, *(_shares(rows[0]) for rows in sweeps)]


def _first_case(rows: Sequence[dict[str, Any]]) -> tuple[int, str]:
    return rows[0]["batch"], rows[0]["precision"]


def _spans_contexts(rows: Sequence[dict[str, Any]]) -> bool:
    return len({row["prompt_tokens"] for row in rows}) > 1


def _generate_command(rows: Sequence[dict[str, Any]]) -> str:
    """The command that measured a sweep's rows, without options that have their default."""
    options = {"precision": _distinct(rows, "precision"), "batch": _distinct(rows, "batch")}
    options["prompt-tokens"] = _distinct(rows, "prompt_tokens")
    options["new-tokens"] = _distinct(rows, "new_tokens")
    usual = {"prompt-tokens": "2048", "new-tokens": "256"}
    command = "mpjax bench generate"
    for option, value in options.items():
        command += "" if usual.get(option) == value else f" --{option} {value}"
    command += " --filled" if any(row.get("filled") for row in rows) else ""
    return command + ("" if rows[0].get("load_seconds") is None else " --from-disk")


def _shares(result: dict[str, Any]) -> str:
    kernels: dict[str, float] = result["kernel_microseconds_per_step"]
    total = sum(kernels.values())
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:SHARES]
    rest = total - sum(time for _, time in largest)
    rows = [
        [name, f"{time:.0f} µs", f"{time / total:.0%}"]
        for name, time in [*largest, ("everything else", rest)]
    ]
    title = f"Kernels of a decoding step, {result['precision']}, batch {result['batch']}"
    title += f", after {result['prompt_tokens']} tokens:\n"
    return "\n".join([title, tables.markdown(["kernel", "time", "share"], rows)])


def _gemm(results: Results, folder: Path) -> list[str]:
    parts = ["# Products with packed weights\n"]
    chosen_by_plans = [row for rows in _of_one_gpu(results) for row in rows if not _is_partial(row)]
    for model in roofline.models(chosen_by_plans):
        name = f"gemm-{model}.svg"
        chosen = [row for row in chosen_by_plans if row["shape"].partition(".")[0] == model]
        roofline.draw_gemm(chosen, folder / name)
        parts.append(_plot(f"TFLOP/s over rows, below the rooflines, {model}", name))
    for result in results:
        rows = result["results"]
        options = {
            "formats": _distinct(rows, "format"),
            "rows": _distinct(rows, "M"),
            "shapes": models_or_shapes(rows, MODELS),
        }
        if forced := rows[0].get("forced"):
            options["implementation"] = forced
        command = "".join(f" --{option} {value}" for option, value in options.items())
        command += " --in-model" if rows[0].get("in_model") else ""
        command += " --rounded" if rows[0].get("rounded") else ""
        cells = [[f"{row['K']} × {row['N']}", *gemm.cells(row)] for row in rows]
        others = [runs_otherwise(row, result["device"]) for row in rows]
        for texts, is_other in zip(cells, others, strict=True):
            texts[-1] += " \\*" if is_other else ""
        parts.append(tables.markdown(["K × N", *gemm.HEADERS], cells))
        if count := sum(others):
            parts.append(f"\\* The plan of {count} of {len(rows)} rows has changed since.\n")
        if not all("packed_bytes" in row for row in rows):
            parts.append("The floor of this table reads codes without scales and zero points.\n")
        parts.append(_source(result, "mpjax bench gemm" + command))
    return parts


def _of_one_gpu(results: Results) -> list[Results]:
    """The rows of results from the GPU that has the most results: plots don't compare GPUs."""
    devices = [result["device"] for result in results]
    return [result["results"] for result in results if result["device"] == mode(devices)]


def _is_partial(row: dict[str, Any]) -> bool:
    """Whether a row measured only a part of a product, or a forced implementation."""
    is_rounded = row.get("rounded") and WeightFormat.parse(row["format"]).operand is not None
    return bool(row.get("forced") or row.get("in_model") or is_rounded)


def runs_otherwise(row: dict[str, Any], device: str) -> bool:
    """Whether the shipped table, or the rule, now has another plan for a measured product.

    device: the GPU of the row; False for a GPU without a shipped table.
    """
    if row.get("forced") or "configuration" not in row or device not in GPUS:
        return False
    format = WeightFormat.parse(row["format"])
    problem = Problem(row["M"], ProductFormat.of(format), row["K"], row["N"], GPUS[device])
    table = read(OPERATION, SHIPPED / file_name(device), device)
    entry = OPERATION.find(table.entries, OPERATION.key_of(problem))
    plan = entry.plan if entry else plan_by_rule(problem)
    if plan.implementation != row["implementation"]:
        return True
    # A field that configurations did not have when the row was measured has its default.
    return plan.config is not None and plan.config != type(plan.config)(**row["configuration"])


def _attention(results: Results, folder: Path) -> list[str]:
    parts = ["# Paged attention\n"]
    if decoding := [r for result in results for r in result["results"] if r.get("queries") == 1]:
        roofline.draw_attention(decoding, folder / "attention.svg")
        parts.append(_plot("times as fast as cuDNN, below the rooflines", "attention.svg"))
    for result in results:
        rows = result["results"]
        parts.append(tables.markdown(attention.HEADERS, map(attention.cells, rows)))
        if not all("copies" in row for row in rows):
            parts.append("Calls read the same copy: a cache below 60 MB may be in the L2 cache.\n")
        shapes, formats = (_distinct(rows, name) for name in ("shape", "format"))
        for name, shapes_of in attention.SETS.items():
            shapes = name if shapes == ",".join(shape.name for shape in shapes_of) else shapes
        parts.append(
            _source(result, f"mpjax bench attention --shapes {shapes} --formats {formats}")
        )
    return parts


def _quality(results: Results, folder: Path) -> list[str]:
    parts = ["# Quality\n"]
    evaluated = [result for result in results if "rows" in result]
    if alone := [result for result in evaluated if not result.get("reference")]:
        parts += _perplexity(alone)
    for result in evaluated:
        if result.get("reference"):
            parts += _agreement(result, folder)
    if measured := [result for result in results if "host_peak_bytes" in result]:
        parts += _memory(measured)
    for result in results:
        if "rows" in result or "host_peak_bytes" in result:
            continue
        if any("scales" in row for row in result["results"]):
            parts += _block_steps(result)
        elif any("wide" in row for row in result["results"]):
            parts += _blocks(result, folder)
        elif any("online" in row for row in result["results"]):
            parts += _online_rotation(result)
        else:
            parts += _methods(result) if "model" in result else _quantization(result)
    return parts


def _memory(results: Results) -> list[str]:
    layers = ", ".join(sorted({str(result["layers"]) for result in results}))
    return [
        "## Memory and time of quantising Qwen3-8B's shapes\n",
        f"Of {results[0]['all_layers']} layers, {layers} were measured. "
        "Minutes and the device's peak are those of all layers: the others take the time of a "
        "measured one, and stay on the device when they are packed. The host's peak is that of "
        "the process, which holds the hidden states of the text.\n",
        tables.markdown(memory.HEADERS, map(memory.cells, results)),
        *(
            _source(
                result,
                f"python -m benchmarks.memory --precision {result['precision']} "
                f"--method {result['method']} --layers {result['layers']}",
            )
            for result in results
        ),
    ]


def _agreement(result: dict[str, Any], folder: Path) -> list[str]:
    """A table and a plot of a model against its 16-bit version."""
    rows = result["rows"]
    plots = []
    if len({row["bits_per_weight"] for row in rows}) > 1:  # over which a plot would show something
        name = f"agreement-{result['model'].lower()}.svg"
        agreement_plot.draw(rows, folder / name)
        plots.append(_plot("KL divergence and rise of perplexity over the bits of a weight", name))
    is_bundled = result["model"] == "bundled"
    names = _distinct(rows, "precision")
    options = f"{_text_option(result)} --window {rows[0]['window']} --precisions {names}"
    output = "agreement" + _part_of_file_name(result) + ".json"
    source = "mpjax evaluate" + f" {result['model']}" * (not is_bundled)
    return [
        f"## Distance from 16 bits: {'the bundled model' if is_bundled else result['model']}\n",
        f"Next tokens' probabilities of {rows[0]['tokens']:,} positions of joined windows against "
        "those of the model in 16 bits. KL: mean divergence and its standard error, median and "
        "99th percentile. Same top: positions with the same most likely token. Δ is the change of "
        "the perplexity.\n",
        markdown(rows) + "\n",
        *plots,
        _source(result, f"{source} --against itself{options} --output benchmarks/results/{output}"),
    ]


def _methods(result: dict[str, Any]) -> list[str]:
    command = "python -m benchmarks.methods"
    is_bundled = result["model"] == "bundled"
    return [
        f"## Methods of quantisation: {'the bundled model' if is_bundled else result['model']}\n",
        "Perplexity on text that calibration has not seen; Δ against 16 bits. The command says "
        "which texts.\n",
        tables.markdown(methods.HEADERS, map(methods.cells, result["results"])),
        _source(result, command if is_bundled else f"{command} {result['model']}"),
    ]


def _online_rotation(result: dict[str, Any]) -> list[str]:
    command = "python -m benchmarks.online_rotation"
    is_bundled = result["model"] == "bundled"
    return [
        "## A rotation of what the down projection reads: "
        f"{'the bundled model' if is_bundled else result['model']}\n",
        "R4: the step `hadamard` before the others, QuaRot's online rotation. Perplexity on text "
        "that calibration has not seen; Δ against 16 bits.\n",
        tables.markdown(methods.HEADERS, map(online_rotation.cells, result["results"])),
        _source(result, command if is_bundled else f"{command} {result['model']}"),
    ]


def _blocks(result: dict[str, Any], folder: Path) -> list[str]:
    """A table and a plot of W4Ax by the share of blocks in 8 bits."""
    model = result["model"]
    name = f"blocks-{model}.svg"
    blocks_plot.draw(result["results"], folder / name)
    return [
        f"## W4Ax by the share of blocks in 8 bits: {ABOUT.get(model, model)}\n",
        "Weights are rounded once for each order of channels. The text is not that of the "
        "calibration"
        + (
            "; the perplexity is that of the 16-bit model's own predictions, and 0.5 % of the "
            "channels, others in each layer, are thirty times as large.\n"
            if model == "planted"
            else ".\n"
        ),
        tables.markdown(blocks.HEADERS, map(blocks.cells, result["results"])),
        _plot("rise of perplexity over the share of blocks in 8 bits", name),
        _source(result, f"python -m benchmarks.blocks{_argument(model)}{_amounts(result)}"),
    ]


def _block_steps(result: dict[str, Any]) -> list[str]:
    """A table of W4Ax with steps of blocks that are multiples of one scale."""
    model = result["model"]
    return [
        f"## W4Ax with integer steps: {ABOUT.get(model, model)}\n",
        "Steps of blocks that are whole multiples of one scale of the token, or of one for each "
        "width, beside a scale for each block. An emulation; channels are sorted.\n",
        tables.markdown(block_steps.HEADERS, block_steps.cells(result["results"])),
        _source(result, f"python -m benchmarks.block_steps{_argument(model)}"),
    ]


def _amounts(result: dict[str, Any]) -> str:
    """The arguments of a benchmark of blocks that say how much text there is."""
    names = [name for name in ("tokens", "characters") if name in result]
    return "".join(f" --{name} {result[name]}" for name in names)


def _argument(model: str) -> str:
    """The model as an argument of a benchmark of blocks."""
    return "" if model == "bundled" else f" {model}"


def _quantization(result: dict[str, Any]) -> list[str]:
    return [
        "## Error of attention by quantisation\n",
        f"Attention of one query over {result['tokens']} random keys and values in bfloat16, "
        "against exact attention in float64: mean error over mean magnitude. Random values "
        "average out, so the result of attention is small, and the relative errors are larger "
        "than in a model; perplexity is the better measure. In the three columns, three of 128 "
        "channels of the keys are like the others, ten times as large, or shifted by ten. Tokens "
        "of the residual are exact.\n",
        tables.markdown(quantization.HEADERS, map(quantization.cells, result["results"])),
        _source(result, "python -m benchmarks.quantization"),
    ]


def _distinct(rows: Sequence[dict[str, Any]], key: str) -> str:
    """The distinct values of a column, with commas between them."""
    return ",".join(dict.fromkeys(str(row[key]) for row in rows))


def _text_option(result: dict[str, Any]) -> str:
    """The option of `mpjax evaluate` that names the text, unless it is the default."""
    text = result.get("text", HELD_OUT)
    return "" if text == HELD_OUT else f" --text {text}"


def _is_bundled(result: dict[str, Any]) -> bool:
    """Whether a result is of the model that comes with mpjax."""
    return result.get("model", "bundled") == "bundled"


def _part_of_file_name(result: dict[str, Any]) -> str:
    """The part of a result file's name that names its model; empty for the bundled model."""
    return "" if _is_bundled(result) else f"-{result['model'].removesuffix('.gguf').lower()}"


def _perplexity(results: Results) -> list[str]:
    """Tables of the bundled model's perplexities, and of those of other models."""
    parts = [
        "## Perplexity of the bundled model\n",
        "On its held-out text, unless the command names one, with keys and values read from the "
        "cache; Δ is the change from the first row.\n",
    ]
    for result in sorted(results, key=lambda result: not _is_bundled(result)):
        command, output = "mpjax evaluate", "perplexity" + _part_of_file_name(result)
        if not _is_bundled(result):
            name, names = result["model"], [row["precision"] for row in result["rows"]]
            parts.append(f"## Perplexity of {name}\n")
            command += f" {name} --precisions {','.join(names)}"
        command += _text_option(result)
        if calibration := result.get("calibration"):
            precisions = "".join(f" --precision {row['precision']}" for row in result["rows"])
            command += f"{precisions} --calibrate {calibration}"
            output += "-calibrated"
        command += f" --output benchmarks/results/{output}.json"
        versions = f"{result['device']}, jax {result['versions']['jax']}"
        parts += [markdown(result["rows"]) + "\n", f"`{command}` · {versions}\n"]
    return parts


if __name__ == "__main__":
    main()
