"""Makes the page of tables of experts, speculation, serving and several devices, from results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import sampling, speculation
from benchmarks.measured import models_or_shapes
from mpjax.bench import experts, serve, sums, tables
from mpjax.bench import speculation as steps
from mpjax.bench.lengths import Lengths
from mpjax.kernels.experts.shapes import MODELS
from mpjax.models.presets import PUBLISHED

Row = Mapping[str, Any]
SUMMED_KIBIBYTES = (
    "8,16,64,256,1024,4096,16384,65536"  # sizes that `mpjax bench sums` measures by default
)


class Section(NamedTuple):
    """A part of the page: the files that it is made from, and how.

    patterns: of the names of result files. about: sentences before the tables.
    headers, lines: of a table for each file; its lines come from the file's results.
    command: the command that measured the results of a file.
    """

    title: str
    patterns: tuple[str, ...]
    about: str
    headers: Sequence[str]
    lines: Callable[[Sequence[Row]], Iterable[list[str]]]
    command: Callable[[Sequence[Row]], str]


def page(results: Callable[[str], Iterable[dict[str, Any]]]) -> list[str]:
    """The lines of the page; empty without result files. results: those of a pattern."""
    parts = []
    for section in SECTIONS:
        found = [result for pattern in section.patterns for result in results(pattern)]
        if not found:
            continue
        parts += [f"## {section.title}\n", f"{section.about}\n"]
        for result in found:
            rows = result["results"]
            source = f"`{section.command(rows)}` · {result['device']}"
            parts.append(tables.markdown(section.headers, section.lines(rows)))
            parts.append(f"{source}, jax {result['versions']['jax']}\n")
    return ["# Experts, speculation, serving and several devices\n", *parts] if parts else []


def _experts_cells(row: Row) -> list[str]:
    return [row["shape"], *experts.cells(row)]


def _experts_command(rows: Sequence[Row]) -> str:
    shapes = models_or_shapes(rows, MODELS)
    formats, tokens = _distinct(row["format"] for row in rows), _distinct(row["M"] for row in rows)
    return f"mpjax bench gemm --experts --shapes {shapes} --formats {formats} --rows {tokens}"


def _steps_lines(rows: Sequence[Row]) -> Iterable[list[str]]:
    return itertools.chain.from_iterable(map(steps.rows, rows))


def _steps_command(rows: Sequence[Row]) -> str:
    precisions, batches = (_distinct(row[key] for row in rows) for key in ("precision", "batch"))
    proposed = _distinct(costs["k"] for row in rows for costs in row["speculation"])
    command = f"mpjax bench generate --precision {precisions} --batch {batches}"
    return f"{command} --new-tokens {rows[0]['new_tokens']} --speculate {proposed}"


def _serve_cells(row: Row) -> list[str]:
    gap = row.get("max_gap") or ""
    own = [str(row["chunk_tokens"]), gap] if row["through"] == "engine" else ["", ""]
    return [serve.describe(row["load"]), *own, *serve.cells(row)]


def _serve_command(rows: Sequence[Row]) -> str:
    first, load = rows[0], rows[0]["load"]
    if "command" in first:
        return first["command"]
    lengths = "".join(
        f" --{name.replace('_', '-')} {Lengths(**load[name])}"
        for name in ("prompt_tokens", "new_tokens")
    )
    command = f"mpjax bench serve --requests {first['requests']}{lengths}"
    command += f" --chunk-tokens {first['chunk_tokens']}"
    static = [row["through"].rpartition(" ")[2] for row in rows if row["through"] != "engine"]
    return command + (f" --static {static[0]}" if static else "")


def _devices_cells(row: Row) -> list[str]:
    first = row.get("time_to_first_token_seconds")
    return [
        row["precision"],
        str(row["layers"]),
        str(row["batch"]),
        str(row["devices"]) + ", whole experts" * (row.get("experts") == "whole"),
        "" if first is None else f"{first * 1e3:.0f} ms",
        f"{row['decode_tokens_per_second']:.0f}",
        f"{row['decode_step_microseconds'] / 1e3:.2f} ms",
        f"{row['roofline_share']:.0%}",
        f"{row['cache_tokens_that_fit']:,}",
    ]


def _devices_command(shapes: str, rows: Sequence[Row]) -> str:
    devices, batch = (_distinct(row[key] for row in rows) for key in ("devices", "batch"))
    command = f"mpjax bench generate --shapes {shapes} --devices {devices} --batch {batch}"
    options = {
        "precision": (_distinct(row["precision"] for row in rows), "W4A16KV8"),
        "experts": (rows[0].get("experts") or "divided", "divided"),
        "layers": (rows[0]["layers"], PUBLISHED[shapes][1].num_layers),
        "prompt-tokens": (rows[0]["prompt_tokens"], 2048),
        "piece-tokens": (rows[0].get("piece_tokens"), None),
        "new-tokens": (rows[0]["new_tokens"], 256),
    }
    command += _not_default(options)
    return command + (" --filled" if any(row["filled"] for row in rows) else "")


def _devices_section(shapes: str, name: str) -> Section:
    """Decoding by one device and by several, of a preset with random weights."""
    return Section(
        f"A model on one device and on several: {name}'s shapes, random weights",
        (f"devices-{shapes}*.json",),
        "Decoding after a prompt. The roofline is the time to read all weights and the cache; "
        "with several devices, each reads its share at the same time.",
        (
            *("precision", "layers", "batch", "devices", "first token", "tokens/s", "step"),
            *("of roofline", "cache tokens"),
        ),
        functools.partial(map, _devices_cells),
        functools.partial(_devices_command, shapes),
    )


def _sums_command(rows: Sequence[Row]) -> str:
    options = {
        "sizes": (_distinct(row["bytes"] // 1024 for row in rows), SUMMED_KIBIBYTES),
        "dtypes": (_distinct(row["dtype"] for row in rows), "bfloat16,float32"),
        "ways": (_distinct(row.get("way", "psum") for row in rows), "psum"),
    }
    command = f"mpjax bench sums --devices {_distinct(row['devices'] for row in rows)}"
    of_xla = [f"{k}={str(v).lower()}" for k, v in rows[0].get("compiler_options", {}).items()]
    return command + _not_default(options) + "".join(f" --options {text}" for text in of_xla)


def _not_default(options: Mapping[str, tuple[Any, Any]]) -> str:
    """The options of a command whose value, the first of each pair, is not the default."""
    return "".join(
        f" --{name} {value}" for name, (value, usual) in options.items() if value != usual
    )


def _distinct(values: Iterable[Any]) -> str:
    """The distinct values, with commas between them."""
    return ",".join(dict.fromkeys(map(str, values)))


SECTIONS = (
    Section(
        "Products of tokens with their experts",
        ("experts*.json",),
        "Each token draws its experts at random. The floor is an XLA reduction over the bytes of "
        "the experts that are hit; cuBLAS multiplies one matrix with as many rows; ragged_dot is "
        "jax.lax.ragged_dot on experts in bfloat16 and rows that are sorted already.",
        ("matrices", *experts.HEADERS),
        functools.partial(map, _experts_cells),
        _experts_command,
    ),
    Section(
        "Drawing a token of each row",
        ("sampling*.json",),
        "Logits of 151,936 tokens. Top-k keeps 50, and top-p 0.9; their thresholds are found by a "
        "search, and by a sort. Kernels: the sum of their times. Step: the time from draw to draw.",
        sampling.HEADERS,
        functools.partial(map, sampling.cells),
        lambda _: "python -m benchmarks.sampling OUT",
    ),
    Section(
        "Speculation: the cost of a step",
        ("speculation-steps*.json",),
        "Qwen3-8B's shapes, random weights: a step of the speculative loop over one of plain "
        "decoding, where no row is proposed a token, and where each row is proposed k.",
        steps.HEADERS,
        _steps_lines,
        _steps_command,
    ),
    Section(
        "Speculation on text",
        ("speculation-text*.json",),
        "One sequence. Texts that repeat their prompt: repeat, rename, edit, quote and answer. A "
        "step is one of the model, with or without proposed tokens.",
        speculation.HEADERS,
        functools.partial(map, speculation.cells),
        speculation.command,
    ),
    Section(
        "Serving: Qwen3-8B's shapes, random weights",
        ("serve*.json",),
        "A load has tokens of prompts and new ones; all requests come at once, but for a prompt "
        "that comes late. The engine reads prompts in chunks between decoding steps; rows that "
        "decode wait for a gap at most (seconds). A static batch reads all prompts, then decodes "
        "all rows to the end. First token and token are times, P50 / P99. Idle is the share of "
        "time, at most, in which the device waits for the host.",
        ("load", "chunk", "gap", *serve.HEADERS),
        functools.partial(map, _serve_cells),
        _serve_command,
    ),
    *(
        _devices_section(shapes, name)
        for shapes, name in (
            ("llama3-70b", "Llama-3-70B"),
            ("qwen3-8b", "Qwen3-8B"),
            ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
            ("gpt-oss-20b", "gpt-oss-20b"),
        )
    ),
    Section(
        "Sums over devices",
        ("sums*.json",),
        "A chain of additions, with and without a sum over devices behind each, in one program; "
        "the difference is the sum's. A divided model has two sums for each layer.",
        sums.HEADERS,
        functools.partial(map, sums.cells),
        _sums_command,
    ),
)
