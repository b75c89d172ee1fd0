"""Benchmark of generation by a published shape with random weights, against the roofline."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.bench import adapters as of_adapters
from mpjax.bench import checkpoint, measure, speculation, tables
from mpjax.bench.cached_bytes import moved_bytes
from mpjax.bench.case_state import CaseDecoding, empty_loop, endless, fill, from_host
from mpjax.bench.pieces import read_pieces, require_pieces
from mpjax.bench.random_model import random_model
from mpjax.checkpoint.packed_tables import packed, tables_of
from mpjax.devices import read_devices, read_experts
from mpjax.generation.decoding import decode, decode_program, jit_prefill
from mpjax.generation.loop import STRIDE, Loop
from mpjax.generation.speculation.proposer import read_k
from mpjax.kernels import WeightFormat, device
from mpjax.memory import free_bytes_on
from mpjax.models import Decoder, DecoderConfig, ExpertPlace, ExpertsSpec, Qwen3
from mpjax.models.eagle import with_usual_eagle
from mpjax.models.mtp import with_mtp
from mpjax.models.presets import QWEN3_8B
from mpjax.models.share import ExpertDivision
from mpjax.models.state import DecoderCache
from mpjax.precision import Precision

# The largest allowed difference of log-probabilities, in nats. Different rounding in kernels causes
# a small difference, and a 2-bit cache about one nat; a wrong cache causes several nats.
GATE, GATE_OF_TWO_BITS = 1.0, 1.5
CHECKED_TOKENS = 1 << 13  # with this number, the logits of one pass take 5 GB
# How often prefill and decoding are repeated. The first time compiles and is not counted.
READS, ROUNDS = 3, 4
AWQ = WeightFormat("uint4", 128)
EAGLE_TOKENS = 32_000  # the vocabulary of most published EAGLE-3 heads
COLUMNS: tables.Columns = {
    "precision": lambda row: row["precision"] + on_devices(row) + with_adapters(row),
    "batch": "{batch}",
    "context": "{prompt_tokens}",
    "load": "{load_seconds:.1f} s",
    "first token": tables.scaled("{:.1f} ms", "time_to_first_token_seconds", 1e3),
    "tokens/s": "{decode_tokens_per_second:.0f}",
    "step": "{decode_step_microseconds:.0f} µs",
    "kernels": "{sum_of_kernels_microseconds:.0f} µs",
    "roofline": "{roofline_microseconds:.0f} µs",
    "of it": "{roofline_share:.0%}",
    "peak memory": tables.scaled("{:.1f} GB", "peak_bytes", 1e-9),
    "check": "{logprob_difference:.2f} nats",
}


class Case(NamedTuple):
    """One case of a sweep. is_read: whether its prompt is prefilled, rather than the cache filled.

    adapters: the number of different adapters among the rows; None for a model without adapters.
    headed: the model with its head; None without.
    """

    batch: int
    prompt: int
    new: int
    is_read: bool = True
    piece: int | None = None
    speculate: tuple[int, ...] = ()
    adapters: int | None = None
    headed: Decoder | None = None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of the benchmark: every precision, batch and number of prompt tokens.

    filled: whether only the first case of a precision prefills its prompt. The caches of the other
        cases are filled with as many random keys and values; these cases have no time to first
        token and are not checked.
    from_disk: whether to write an AWQ checkpoint and load it, to measure the time to load.
    config: of the model, which gets more positions if the cases need them. decoder: its class.
    devices: numbers of devices among which the model is divided. experts: how experts are divided
        among them; see `mpjax.load`.
    speculate: numbers of proposed tokens, 1 to 32, for which a verifying step is measured; and on
        one device a step with the proposals of a head: the family's multi-token-prediction head, or
        an EAGLE-3 head of EAGLE_TOKENS tokens.
    piece_tokens: the prefill chunk of each row, in tokens; None for the whole prompt.
    adapters: numbers of adapters that rows use in turn, each measured beside the case without
        adapters; 0 for rows without an adapter. The model has the largest of these numbers of
        adapters, at least one, for all linear maps of layers. rank: of the adapters.

    Raises ValueError for an unknown precision, a precision that random weights or an AWQ checkpoint
    can't have, and for numbers that leave nothing to measure.
    """

    precisions: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    from_disk: bool = False
    filled: bool = False
    config: DecoderConfig = QWEN3_8B
    decoder: type[Decoder] = Qwen3
    devices: tuple[int, ...] = (1,)
    speculate: tuple[int, ...] = ()
    piece_tokens: int | None = None
    experts: ExpertDivision = "divided"
    adapters: tuple[int, ...] = ()
    rank: int = 16

    def __post_init__(self) -> None:
        for text in self.precisions:
            self._require_random(text)
        if min(self.batches, default=0) < 1:
            raise ValueError(f"batches are {self.batches}: expected one or more positive numbers")
        for count in self.devices:
            read_devices(count)
        read_experts(self.experts, max(self.devices))
        for k in self.speculate:
            read_k("speculate", k)
        if self.adapters and (max(self.devices) > 1 or min(self.adapters) < 0 or self.rank < 1):
            raise ValueError("adapters are measured on one device, by numbers from 0 and a rank")
        if min(self.prompt_tokens, default=0) < 1 or self.new_tokens < 2:
            raise ValueError("a step is measured from one prompt token and two new ones on")
        for prompt in self.prompt_tokens:
            require_pieces(prompt, prompt if self.piece_tokens is None else self.piece_tokens)

    def _require_random(self, text: str) -> None:
        """Raises ValueError for a precision that random weights or the checkpoint can't have."""
        precision = Precision.parse(text)
        weights, kv = precision.weights, precision.kv
        if precision.mixture or precision.bits != 16:
            raise ValueError(
                f"{text}: random weights are all in one format, and compute in 16 bits"
            )
        if kv.scaling == "static":
            raise ValueError(f"{text}: {kv} needs a calibration, which random weights have not")
        if self.from_disk and self.decoder is not Qwen3:
            raise ValueError(f"{self.decoder.__name__} is not written to disk: only Qwen3 is")
        if self.from_disk and weights not in (AWQ, None):
            raise ValueError(f"{text}: the checkpoint on disk is AWQ's, W4 in groups of 128")

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        cases = len(self.precisions) * len(self.batches) * len(self.prompt_tokens)
        return cases * len(self.devices) * (1 + len(self.adapters))

    @property
    def model_config(self) -> DecoderConfig:
        """The model's configuration, with enough positions for every case."""
        positions = max(self.prompt_tokens) + self.new_tokens
        positions = max(positions, self.config.max_position_embeddings)
        config = dataclasses.replace(self.config, max_position_embeddings=positions)
        if not self.speculate or max(self.devices) > 1:
            return config
        if self.decoder.draft_names:
            return with_mtp(config, self.decoder.draft_names)
        return with_usual_eagle(config, min(EAGLE_TOKENS, config.vocab_size))


def on_devices(row: Mapping[str, Any]) -> str:
    """The suffix of a table cell with the number of devices; empty for one device."""
    return f" on {row['devices']} devices" if row.get("devices", 1) > 1 else ""


def with_adapters(row: Mapping[str, Any]) -> str:
    """The suffix of a table cell with the number of adapters; empty without adapters."""
    return f" with {row['adapters']} adapters" if "adapters" in row else ""


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the figures derived from its measured times: rates, roofline and share."""
    roofline = row.get("roofline_microseconds")
    if roofline is None:
        roofline = row["step_bytes"] / row["read_bandwidth_bytes_per_second"] * 1e6
    return dict(row) | {
        "decode_tokens_per_second": row["batch"] / row["decode_step_microseconds"] * 1e6,
        "roofline_microseconds": roofline,
        "roofline_tokens_per_second": row["batch"] / roofline * 1e6,
        "roofline_share": roofline / row["decode_step_microseconds"],
    }


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each checked row whose difference is NaN or not below the limit."""
    return [
        f"{row['precision']}, batch {row['batch']}: log-probabilities of the new tokens differ by "
        f"{row['logprob_difference']:.2f} from those of one pass over the text, and the gate is "
        f"{_gate(row):.1f}"
        for row in rows
        if row["logprob_difference"] is not None and not row["logprob_difference"] < _gate(row)
    ]


def _gate(row: Mapping[str, Any]) -> float:
    kv = Precision.parse(row["precision"]).kv
    return GATE_OF_TWO_BITS if min(kv.key_codes.bits, kv.value_codes.bits) < 4 else GATE


def step_bytes(lm: mpjax.LanguageModel, cache: DecoderCache, tokens: float) -> float:
    """The bytes that each device moves in a decoding step: its weights and its cache.

    tokens: of each row in the cache. Not counted are an untied embedding, of which a step reads
    only a few rows, and the expected share of experts without a token, if all are equally likely.
    """
    batch = len(cache.lengths)
    tied = lm.config.tie_word_embeddings
    embedding = 0 if tied else lm.summary()["tables"]["embedding"]["bytes"]
    lengths = [round(tokens)] * len(cache.lengths)
    weights = (lm.nbytes - embedding - _missed_bytes(lm, batch)) / lm.devices
    return weights + sum(moved_bytes(layer, lengths) for layer in cache.layers)


def _missed_bytes(lm: mpjax.LanguageModel, batch: int) -> float:
    """The expected bytes of experts to which no row of a batch is routed."""
    missed = 0.0
    for place in lm.model.linear_places(lm.config):
        if isinstance(place, ExpertPlace):
            mlp = lm.config.layers[int(place.path.split(".")[1])].mlp
            assert isinstance(mlp, ExpertsSpec)
            share = (1 - mlp.experts_per_token / mlp.num_experts) ** batch
            missed += share * sum(kernel.nbytes for kernel in place.kernels(lm.model))
    return missed


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case of a sweep, and yields its row."""
    bandwidth = measure.read_bandwidth()
    for count in sweep.devices:
        yield from _run_on(sweep, count, bandwidth)


def _run_on(sweep: Sweep, devices: int, bandwidth: float) -> Iterator[dict[str, Any]]:
    """The result rows for a number of devices. bandwidth: of one device, in bytes per second."""
    by_weights = itertools.groupby(sweep.precisions, lambda text: Precision.parse(text).of_weights)
    for _, texts in by_weights:
        lm = None
        for text in texts:
            precision = Precision.parse(text)
            if lm is None:
                lm, load_seconds = _load(sweep, precision, devices)
                headed = lm.model
                if headed.config.depth < headed.config.num_layers:
                    lm = dataclasses.replace(lm, model=headed.without_drafts())
            lm = dataclasses.replace(lm, kv_format=precision.kv)
            pairs = itertools.product(sweep.batches, sweep.prompt_tokens)
            for number, (batch, prompt) in enumerate(pairs):
                row = {"precision": text, "layers": sweep.config.num_layers, "batch": batch}
                row |= {"devices": devices, "experts": sweep.experts}
                row |= {"load_seconds": load_seconds, "read_bandwidth_bytes_per_second": bandwidth}
                is_read = number == 0 or not sweep.filled
                case = Case(
                    batch, prompt, sweep.new_tokens, is_read, sweep.piece_tokens, sweep.speculate
                )
                case = case._replace(headed=None if headed is lm.model else headed)
                plain = figures(row | _measure(lm, case))
                yield plain
                yield from _beside_adapters(lm, sweep, case, row, plain)
        del lm, headed  # frees their memory before the next model is made


def _load(
    sweep: Sweep, precision: Precision, devices: int = 1
) -> tuple[mpjax.LanguageModel, float | None]:
    if not sweep.from_disk:
        mesh = read_devices(devices)
        model = random_model(
            *(sweep.decoder, sweep.model_config, precision.weights),
            mesh=mesh,
            experts=sweep.experts,
        )
        for path, format in packed(tables_of(precision.tables, model.config)).items():
            model.pack_table(path, format)
        return mpjax.LanguageModel(model, None, precision.kv, Path()), None
    with tempfile.TemporaryDirectory() as folder:
        config = checkpoint.qwen3_config(sweep.model_config)
        written = checkpoint.write(Path(folder, "model"), config, "W4A16KV16", "awq")
        begin = time.perf_counter()
        lm = mpjax.load(written, precision=precision, progress=False, devices=devices)
        jax.block_until_ready(lm.model)
        return lm, time.perf_counter() - begin


def _beside_adapters(
    lm: mpjax.LanguageModel,
    sweep: Sweep,
    case: Case,
    facts: dict[str, Any],
    plain: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """The rows of a case with each number of adapters, relative to the case without adapters."""
    if not sweep.adapters:
        return
    places = max(1, *sweep.adapters)
    model = of_adapters.adapted(lm.model, places, sweep.rank)
    lm = dataclasses.replace(lm, model=model)
    for count in sweep.adapters:
        row = facts | {"adapters": count, "rank": sweep.rank}
        is_read = case.is_read and not sweep.filled
        row |= _measure(lm, case._replace(adapters=count, is_read=is_read))
        yield figures(of_adapters.compared(row, plain, places))


_decode_serial = measure.serial_jit(decode, static_argnames="stride", donate_argnames="loop")


def _measure(lm: mpjax.LanguageModel, case: Case) -> dict[str, Any]:
    batch, prompt, new, is_read, piece, speculate, count, headed = case
    case_begin, peak_before = time.perf_counter(), _peak_bytes()
    fitting = _fitting_tokens(lm)
    rows = np.random.default_rng(0).integers(0, lm.config.vocab_size, (batch, prompt))
    tokens = jnp.asarray(rows, jnp.int32)
    places = None if count is None else of_adapters.places(batch, count)
    loop = empty_loop(lm, endless(batch, new), prompt + new, new, places)
    program = decode_program(lm.model, loop)
    loop, reading = (
        _read(lm, loop, tokens, piece) if is_read else (fill(loop, prompt, lm.model.mesh), {})
    )
    decoding = CaseDecoding(lm.model, loop, prompt)
    del loop  # calls of `decoding` donate it
    seconds = []
    for number in range(ROUNDS):
        begin = time.perf_counter()
        decoding.run(program, jnp.int32(new)).block_until_ready()
        seconds.append(time.perf_counter() - begin)
        if number == 0:
            said, scores = (np.array(x[:1]) for x in (decoding.loop.tokens, decoding.loop.logprobs))
    peak = _peak_bytes()
    measure_costs = functools.partial(speculation.step_costs, lm.model, tokens)
    costs: list[dict[str, Any]] = [measure_costs(k, decoding.act) for k in speculate]
    if headed is not None:
        for cost in costs:
            cost |= speculation.head_cost(headed, tokens, int(cost["k"]), decoding.act)
    steps = -(-(new - 1) // STRIDE) * STRIDE  # decoding runs in whole strides
    kernels = {}
    if is_read and lm.devices == 1:  # the profiler would sum the kernels of all devices
        kernels = _kernels_of_step(decoding, new)
        for cost in costs:
            found = speculation.verifying_kernels(
                lm.model, decoding.loop.state.cache, int(cost["k"])
            )
            cost["kernel_microseconds_of_verifying"] = _without_copies(found)
    cache = decoding.loop.state.cache
    is_checked = is_read and prompt + new <= CHECKED_TOKENS
    text = jnp.concatenate([tokens[:1], jnp.asarray(said)], 1)
    first = None if count is None else of_adapters.places(1, count)
    difference = _difference(lm, text, jnp.asarray(scores), first) if is_checked else None
    return reading | {
        "prompt_tokens": prompt,
        "new_tokens": new,
        "filled": not is_read,
        "piece_tokens": piece if is_read else None,
        "time_to_first_token_seconds": reading.get("time_to_first_token_seconds"),
        "decode_seconds_with_compilation": seconds[0],
        "decode_step_microseconds": statistics.median(seconds[1:]) / steps * 1e6,
        "sum_of_kernels_microseconds": sum(kernels.values()) if kernels else None,
        "step_bytes": step_bytes(lm, cache, prompt + new / 2),
        "weights_bytes": lm.nbytes,
        "cache_bytes": cache.nbytes,
        "cache_tokens_that_fit": fitting,
        # The allocator never resets its peak, so a case's peak is known only if it is a new one.
        "peak_bytes": peak if peak != peak_before else None,
        "logprob_difference": difference,
        "speculation": costs,
        "case_seconds": time.perf_counter() - case_begin,
        "kernel_microseconds_per_step": kernels,
    }


def _kernels_of_step(decoding: CaseDecoding, new: int) -> dict[str, float]:
    """Microseconds of each kernel in a decoding step; afterwards the loop is rewound to the prompt.

    new: the new tokens of a row.
    """
    # The loop runs one whole stride of steps, even if fewer tokens are wanted.
    until = jnp.int32(min(1 + STRIDE, new))
    run = measure.Unjitted(functools.partial(decoding.run, _decode_serial))
    found = measure.kernel_microseconds(run, until, iterations=1)
    decoding.act(lambda loop: loop)
    return {name: time / STRIDE for name, time in _without_copies(found).items()}


def _fitting_tokens(lm: mpjax.LanguageModel) -> int | None:
    """The number of tokens whose cache fits beside the model; None if unknown."""
    one_page = functools.partial(lm.model.create_cache, 1, lm.page_size, lm.kv_format, lm.page_size)
    pages = jax.eval_shape(one_page).layers
    page = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)) // lm.devices
    free = free_bytes_on(lm.model.mesh)
    return None if free is None else free // page * lm.page_size


def _read(
    lm: mpjax.LanguageModel, loop: Loop, tokens: jax.Array, piece: int | None = None
) -> tuple[Loop, dict[str, Any]]:
    """Prefills prompts [batch, tokens]; returns the loop and the measured times.

    piece: the prefill chunk of a row, in tokens; None for the whole prompt.
    """
    batch, prompt = tokens.shape
    columns = loop.tokens.shape[1]
    lengths, settings = jnp.full(batch, prompt, jnp.int32), endless(batch, columns)
    jax.block_until_ready(loop)

    def read() -> jax.Array:
        nonlocal loop
        state = loop.state
        cache = dataclasses.replace(state.cache, lengths=from_host(np.zeros(batch, np.int32)))
        if piece is not None:
            best, logprobs, cache = read_pieces(lm.model, tokens, cache, piece)
            state = dataclasses.replace(state, cache=cache, newest=best)
            first = loop.tokens.at[:, 0].set(best), loop.logprobs.at[:, 0].set(logprobs)
            loop = dataclasses.replace(loop, state=state, tokens=first[0], logprobs=first[1])
            return loop.tokens
        # Always the given settings: the result's settings have another sharding, which would
        # compile another program.
        loop = jit_prefill(lm.model, tokens, lengths, cache, settings, columns)
        return loop.tokens

    seconds = []
    for _ in range(READS):
        begin = time.perf_counter()
        read().block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return loop, {
        "prefill_seconds_with_compilation": seconds[0],
        "time_to_first_token_seconds": statistics.median(seconds[1:]),
    }


def _without_copies(kernels: dict[str, float]) -> dict[str, float]:
    """The times of kernels except memory copies, the longest first."""
    kept = {name: time for name, time in kernels.items() if "memcpy" not in name.lower()}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))


def _peak_bytes() -> int | None:
    statistics = device.default_device().memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


@functools.partial(jax.jit, static_argnames="new")
def _logprobs(
    model: Decoder, text: jax.Array, new: int, adapters: jax.Array | None = None
) -> jax.Array:
    """The log-probabilities of the last `new` tokens of texts, float32 [batch, new], in one pass.

    The pass has no KV cache, so that it is compiled once for all KV formats.
    """
    logprobs = jax.nn.log_softmax(model(text, adapters)[:, -new - 1 : -1])
    return jnp.take_along_axis(logprobs, text[:, -new:, None], -1)[..., 0]


def _difference(
    lm: mpjax.LanguageModel,
    text: jax.Array,
    scores: jax.Array,
    adapters: jax.Array | None = None,
) -> float:
    """Mean absolute difference, in nats, of log-probabilities between decoding and one pass.

    text: int32 [1, prompt and new tokens].
    scores: float32 [1, new tokens], the log-probabilities of the new tokens from decoding.
    adapters: int32 [1], as in DecoderCache.

    The pass over the whole text has no KV cache, and runs other kernels than decoding.
    """
    expected = _logprobs(lm.model, text, scores.shape[1], adapters)
    return float(jnp.abs(expected - scores).mean())
