"""Benchmark of an engine under load, by a published shape with random weights or by a model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.bench import tables
from mpjax.bench.generate import on_devices
from mpjax.bench.lengths import Lengths
from mpjax.bench.random_model import random_model
from mpjax.devices import read_devices
from mpjax.engine.compiled import MOST_PROGRAMS
from mpjax.engine.program_run import ProgramRun
from mpjax.files.atomic_write import atomic_write
from mpjax.generation.buckets import bucket_tokens
from mpjax.generation.decoding import decode_program, jit_prefill
from mpjax.generation.speculation.proposer import Proposer
from mpjax.models import Decoder, DecoderConfig, Qwen3
from mpjax.models.presets import QWEN3_8B
from mpjax.precision import Precision
from mpjax.sampling.settings import RowSettings, Sampling
from mpjax.serve.garbage import short_collections

COLUMNS: tables.Columns = {
    "precision": lambda row: row["precision"] + on_devices(row),
    "through": lambda row: row["through"] + _speculated(row),
    "requests": "{requests}",
    "seconds": "{seconds:.2f} s",
    "requests/s": "{requests_per_second:.2f}",
    "tokens/s": "{new_tokens_per_second:.0f}",
    "first token": "{first_token_seconds[p50]:.2f} / {first_token_seconds[p99]:.2f} s",
    "token": lambda row: _milliseconds(row["token_seconds"]),
    "longest gap": lambda row: _longest_gap(row),
    "shared": lambda row: _share(row.get("shared_tokens", 0), row.get("prompt_tokens", 0)),
    "preempted": lambda row: str(row.get("preemptions") or ""),
    "idle": "{idle_share:.1%}",
}
GREEDY = Sampling(stop_ids=())  # random weights must not end a row early


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests and their arrival times.

    requests: the number of requests. prompt_tokens, new_tokens: distributions of lengths. pairs:
        (prompt, completion) token counts instead of random ones.
    rate: requests per second of a Poisson process, or None for all at once.
    shared: the length of a prefix common to all prompts, part of their prompt_tokens.
    late: tokens of a prompt that arrives once all others decode, or 0 for none.
    seed: of all random numbers.
    """

    requests: int
    prompt_tokens: Lengths
    new_tokens: Lengths
    pairs: tuple[tuple[int, int], ...] = ()
    rate: float | None = None
    shared: int = 0
    late: int = 0
    seed: int = 0

    def sizes(self) -> list[tuple[int, int]]:
        """The token counts (prompt, completion) of each request."""
        if self.pairs:
            return [self.pairs[i % len(self.pairs)] for i in range(self.requests)]
        rng = np.random.default_rng(self.seed)
        prompts = self.prompt_tokens.draw(self.requests, rng)
        return list(zip(prompts, self.new_tokens.draw(self.requests, rng), strict=True))

    def arrivals(self) -> list[float]:
        """The arrival time of each request, in seconds."""
        if self.rate is None:
            return [0.0] * self.requests
        rng = np.random.default_rng(self.seed + 1)
        return np.cumsum(rng.exponential(1 / self.rate, self.requests)).tolist()

    def prompts(self, vocabulary: int, number: int) -> list[list[int]]:
        """Random token ids of each prompt. number: of the round; each round has other ids."""
        rng = np.random.default_rng((self.seed, number))
        begin = rng.integers(0, vocabulary, self.shared).tolist()
        prompts = []
        for tokens, _ in self.sizes():
            own = max(1, tokens - self.shared)
            prompts.append(begin[: tokens - own] + rng.integers(0, vocabulary, own).tolist())
        return prompts

    @property
    def most(self) -> int:
        """The most tokens of a request, prompt and completion."""
        return max([self.late + self.late_new, *map(sum, self.sizes())])

    @property
    def late_new(self) -> int:
        """The number of new tokens of the late request."""
        return 8 if self.late else 0


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of the benchmark: a load for each of several precisions.

    slots, chunk_tokens, max_gap, steps, cache_memory, share_prefixes, speculate: of the engine.
        Text of random weights is repetitive, so gains of speculation don't transfer to real text.
    head: further arguments of mpjax.load, with which the head that proposes is loaded with `model`.
    static: the batch size of static batches (`generate_tokens`' programs, in the order of
        requests), as a comparison; 0 for none.
    engine: whether the load runs through an engine, rather than only in static batches.
    rounds: how often the engine runs the load; the last round counts. The engine compiles all
        programs before the first. Static batches run the load once, after two steps that compile.
    config, decoder: of a model with random weights. model: a folder or hub id to load instead.
    devices: the number of devices among which the model is divided.
    trace: a file for the programs of the counted round of the last precision, in the Trace Event
        Format (for Perfetto), or None.

    Raises ValueError for a precision that random weights can't have, too many devices, a trace
    without an engine, and if there is nothing to measure.
    """

    precisions: tuple[str, ...]
    load: Load
    slots: int = 256
    chunk_tokens: int = 4096
    max_gap: float | None = None
    steps: int = 8
    cache_memory: float | None = None
    share_prefixes: bool = True
    speculate: Proposer | None = None
    head: Mapping[str, Any] | None = None
    static: int = 0
    engine: bool = True
    rounds: int = 2
    config: DecoderConfig = QWEN3_8B
    decoder: type[Decoder] = Qwen3
    model: str | None = None
    devices: int = 1
    trace: Path | None = None

    def __post_init__(self) -> None:
        read_devices(self.devices)
        if not self.engine and not self.static:
            raise ValueError("nothing is measured without an engine and without --static batches")
        if self.trace is not None and not self.engine:
            raise ValueError("--trace tells of programs of an engine, and --no-engine runs none")
        for text in self.precisions if self.model is None else ():
            precision = Precision.parse(text)
            if precision.mixture or precision.bits != 16 or precision.kv.scaling == "static":
                raise ValueError(
                    f"{text}: random weights are all in one format, compute in 16 bits, and have "
                    "no calibration"
                )

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        return len(self.precisions) * (self.engine + bool(self.static))


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Runs the load in an engine and in static batches, as configured; yields a row for each."""
    for text in sweep.precisions:
        lm = _random_lm(text, sweep) if sweep.model is None else _load(text, sweep)
        layers, precision = lm.config.num_layers, str(lm.precision) if sweep.model else text
        row = {"precision": precision, "layers": layers, "requests": sweep.load.requests}
        row |= {"load": dataclasses.asdict(sweep.load), "devices": sweep.devices}
        row["asked_prompt_tokens"] = sum(read for read, _ in sweep.load.sizes()) + sweep.load.late
        if sweep.engine:
            yield row | _serve(lm, sweep)
        if sweep.static:
            yield row | _static(lm, sweep)
        del lm


def _random_lm(text: str, sweep: Sweep) -> mpjax.LanguageModel:
    """A random model in a precision, without a tokenizer."""
    precision, mesh = Precision.parse(text), read_devices(sweep.devices)
    positions = max(sweep.load.most, sweep.config.max_position_embeddings)
    config = dataclasses.replace(sweep.config, max_position_embeddings=positions)
    model = random_model(sweep.decoder, config, precision.weights, mesh=mesh)
    return mpjax.LanguageModel(model, None, precision.kv, Path())


def _load(text: str, sweep: Sweep) -> mpjax.LanguageModel:
    """The loaded model in a precision, or, for "", in the checkpoint's."""
    assert sweep.model is not None
    return mpjax.load(
        sweep.model, precision=text or None, devices=sweep.devices, **(sweep.head or {})
    )


def _serve(lm: mpjax.LanguageModel, sweep: Sweep) -> dict[str, Any]:
    with mpjax.Engine(
        lm,
        slots=sweep.slots,
        cache_memory=sweep.cache_memory,
        max_tokens=sweep.load.most,
        chunk_tokens=sweep.chunk_tokens,
        max_gap=sweep.max_gap,
        steps=sweep.steps,
        share_prefixes=sweep.share_prefixes,
        speculate=sweep.speculate,
    ) as engine:
        begin = time.perf_counter()
        engine.compile(greedy_only=True)
        programs: list[ProgramRun] = []
        engine.observe(programs.append)
        for number in range(sweep.rounds):
            programs.clear()
            before = engine.statistics()
            with short_collections():
                traces, seconds = _round(engine, sweep.load, number)
        after = engine.statistics()
        if sweep.trace is not None:
            events = [program.trace_event(programs[0].begin) for program in programs]
            atomic_write(sweep.trace, json.dumps({"traceEvents": events}))
        names = ["prompt_tokens", "shared_tokens", "preemptions", "steps", "late_steps"]
        names += ["proposed_tokens", "accepted_tokens"]
        work, idle = (after[n] - before[n] for n in ("work_seconds", "idle_seconds"))
        return {
            "through": "engine",
            "slots": sweep.slots,
            "chunk_tokens": sweep.chunk_tokens,
            "max_gap": None if sweep.max_gap is None else str(sweep.max_gap),
            "idle_share": idle / work,
            "speculate": None if sweep.speculate is None else repr(sweep.speculate),
            "capacity_tokens": engine.capacity,
            "programs": after["programs"],
            "lost_pages": after["pages"] - after["free_pages"],
            "all_seconds": time.perf_counter() - begin,
            **{name: after[name] - before[name] for name in names},
            "asked_tokens": sum(new for _, new in sweep.load.sizes()) + sweep.load.late_new,
            **_figures(traces, seconds, since=traces[-1].came if sweep.load.late else 0.0),
        }


@dataclasses.dataclass
class _Trace:
    """A request's arrival time, and the times and counts at which its tokens were reported."""

    came: float
    times: list[float] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)


def _round(engine: mpjax.Engine, load: Load, number: int) -> tuple[list[_Trace], float]:
    """Runs the load once; returns the trace of each request, and the total seconds."""
    prompts, sizes = load.prompts(engine.lm.config.vocab_size, number), load.sizes()
    pending = [*zip(load.arrivals(), prompts, (new for _, new in sizes), strict=True)][::-1]
    traces: dict[Any, _Trace] = {}
    late = load.late
    begin = time.perf_counter()
    while pending or engine.has_work:
        now = time.perf_counter() - begin
        while pending and pending[-1][0] <= now:
            came, prompt, new = pending.pop()
            handle = engine.submit(prompt, max_new_tokens=new, sampling=GREEDY)
            traces[handle] = _Trace(came)
        if late and not pending and all(trace.times for trace in traces.values()):
            vocabulary = engine.lm.config.vocab_size
            prompt = np.random.default_rng((9, number)).integers(0, vocabulary, late).tolist()
            handle = engine.submit(prompt, max_new_tokens=load.late_new, sampling=GREEDY)
            traces[handle], late = _Trace(now), 0
        if not engine.has_work:
            time.sleep(max(0.0, pending[-1][0] - now))
            continue
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            traces[event.handle].times.append(now)
            traces[event.handle].counts.append(len(event.tokens))
    return list(traces.values()), time.perf_counter() - begin


def _figures(traces: Sequence[_Trace], seconds: float, since: float = 0.0) -> dict[str, Any]:
    """Rates and percentiles of a round.

    The time per token is a request's time after its first token, divided by its further tokens. A
    gap is the time between two reports of a request's new tokens. since: the time after which gaps
    count.
    """
    first = [trace.times[0] - trace.came for trace in traces]
    gaps = [
        after - before
        for trace in traces
        for before, after in itertools.pairwise(trace.times)
        if after > since
    ]
    token = [
        (trace.times[-1] - trace.times[0]) / (sum(trace.counts) - 1)
        for trace in traces
        if sum(trace.counts) > 1
    ]
    new = sum(sum(trace.counts) for trace in traces)
    return {
        "seconds": seconds,
        "new_tokens": new,
        "requests_per_second": len(traces) / seconds,
        "new_tokens_per_second": new / seconds,
        "first_token_seconds": _percentiles(first),
        "token_seconds": _percentiles(token),
        "gap_seconds": _percentiles(gaps),
        "all_first_tokens_seconds": max(trace.times[0] for trace in traces),
    }


def vllm_keys(row: Mapping[str, Any]) -> dict[str, float | None]:
    """A row's figures under the keys of `vllm bench serve`; None where the load has none.

    Times are in milliseconds: ttft is the time to the first token, tpot the time of each further
    token, itl the gap between two reports.
    """
    every = row["new_tokens"] + row["asked_prompt_tokens"]
    found: dict[str, float | None] = {
        "request_throughput": row["requests_per_second"],
        "output_throughput": row["new_tokens_per_second"],
        "total_token_throughput": every / row["seconds"],
    }
    times = {"ttft": "first_token_seconds", "tpot": "token_seconds", "itl": "gap_seconds"}
    for name, kind in times.items():
        for word, statistic in {"mean": "mean", "median": "p50", "p99": "p99"}.items():
            seconds = row[kind]
            found[f"{word}_{name}_ms"] = None if seconds is None else seconds[statistic] * 1e3
    return found


def vllm_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines of a table of the rows' figures, with a line for each of vLLM's keys."""
    found = [vllm_keys(row) for row in rows]
    heads = ["key", *(f"{row['precision']}, {row['through']}" for row in rows)]
    shown = [["" if x is None else f"{x:.2f}" for x in each.values()] for each in found]
    return heads, [[*line] for line in zip(found[0], *shown, strict=True)]


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"mean": statistics.fmean(values), "p50": p50, "p99": p99, "most": max(values)}


def _static(lm: mpjax.LanguageModel, sweep: Sweep) -> dict[str, Any]:
    """Runs the load in static batches, one after the other; returns the figures."""
    seconds = 0.0
    traces: list[_Trace] = []
    for is_counted in (False, True):
        prompts = sweep.load.prompts(lm.config.vocab_size, int(is_counted))
        begin, traces, sizes = time.perf_counter(), [], sweep.load.sizes()
        for at in range(0, len(prompts), sweep.static):
            group = slice(at, at + sweep.static)
            new = [new for _, new in sizes[group]]
            traces += _batch(lm, prompts[group], new, begin, steps=None if is_counted else 2)
        seconds = time.perf_counter() - begin
    return {"through": f"batches of {sweep.static}", **_figures(traces, seconds)}


def _batch(
    lm: mpjax.LanguageModel,
    prompts: Sequence[list[int]],
    new: Sequence[int],
    begin: float,
    *,
    steps: int | None,
) -> list[_Trace]:
    """Generates a batch; returns each request's trace, in which only the first token has a time.

    Lengths are padded as `generate` does, so that batches share programs. steps: the number of
    decoding steps; None for as many as the longest completion needs.
    """
    rows = len(prompts)
    padded, room = (bucket_tokens(most) for most in (max(map(len, prompts)), max(new)))
    tokens = np.zeros((rows, padded), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    settings = RowSettings.of([GREEDY], rows, max_new_tokens=np.array(new))
    cache = lm.model.create_cache(rows, padded + room, lm.kv_format, lm.page_size)
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)
    loop = jit_prefill(lm.model, jnp.asarray(tokens), lengths, cache, settings, room)
    jax.block_until_ready(loop.tokens)
    first = time.perf_counter() - begin
    loop = decode_program(lm.model, loop)(lm.model, loop, jnp.int32(steps or room))
    jax.block_until_ready(loop.tokens)
    end = time.perf_counter() - begin
    return [
        _Trace(0.0, [first, end], [1, count - 1]) if count > 1 else _Trace(0.0, [first], [1])
        for count in np.asarray(loop.state.counts).tolist()
    ]


def describe(load: Mapping[str, Any]) -> str:
    """A load in words: its lengths, and its rate, shared prefix and late prompt if it has any."""
    prompt, new = (Lengths(**load[name]) for name in ("prompt_tokens", "new_tokens"))
    text = "lengths of a file" if load["pairs"] else f"{prompt} + {new}"
    special = {"{:g}/s": load["rate"], "{} shared": load["shared"], "{} late": load["late"]}
    return ", ".join([text, *(words.format(n) for words, n in special.items() if n)])


def _milliseconds(seconds: Mapping[str, float] | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds['p50'] * 1e3:.1f} / {seconds['p99'] * 1e3:.1f} ms"


def _longest_gap(row: Mapping[str, Any]) -> str:
    gaps = row["gap_seconds"] if row["through"] == "engine" else None
    return "" if gaps is None else f"{gaps['most'] * 1e3:.0f} ms"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if part else ""


def _speculated(row: Mapping[str, Any]) -> str:
    """The suffix of a table cell with the acceptance rate; empty without speculation."""
    if not row.get("speculate"):
        return ""
    proposed, accepted = row["proposed_tokens"], row["accepted_tokens"]
    return f", {accepted / proposed if proposed else 0:.0%} of {proposed} proposed"


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences for rows with missing tokens, lost pages, or too many compiled programs."""
    found = []
    for row in rows:
        if row["through"] == "engine" and row["programs"] > MOST_PROGRAMS:
            found.append(
                f"{row['precision']}: {row['programs']} programs were compiled, above "
                f"{MOST_PROGRAMS}"
            )
        if row.get("lost_pages"):
            found.append(f"{row['precision']}: {row['lost_pages']} pages of the cache were lost")
        if row["through"] == "engine" and row["new_tokens"] != row["asked_tokens"]:
            found.append(
                f"{row['precision']}: {row['new_tokens']} tokens were generated, and "
                f"{row['asked_tokens']} asked for"
            )
    return found
