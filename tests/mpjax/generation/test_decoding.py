from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.bench.random_model import random_model
from mpjax.generation import decoding
from mpjax.generation.decoding import decode, generate_tokens, jit_decode, jit_prefill, prefill
from mpjax.generation.speculation.draft import Draft
from mpjax.kernels import KVFormat, WeightFormat, device
from mpjax.models import DecoderConfig, Llama, llama_layers
from mpjax.sampling.random_keys import row_keys
from mpjax.sampling.settings import STOP_IDS_MULTIPLE, RowSettings, Sampling
from tests.mpjax.odd_models import with_damaged_token
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

LENGTHS = (5, 1, 9)
ROWS = len(LENGTHS)
NEW = 8
FORMATS = [KVFormat(name) for name in (16, 8, 4, "2g64")]
# The option with which tests/conftest.py compiles faster leaves copies in jax 0.10's programs.
AS_PEOPLE_DO = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None
HOT = Sampling(temperature=1.5)
PENALTY = 0.3  # below 1 it rewards, so that a random model repeats itself
# The first two rows are greedy.
MIXED = Sampling(temperature=np.array([0, 0, 1.5]), top_k=50, repetition_penalty=PENALTY)
FULL = 32  # the length that the oracle pads to, so that it is compiled once


@pytest.fixture(scope="module")
def prompts() -> tuple[jax.Array, jax.Array]:
    """Three prompts padded with tokens that must not matter, and their lengths."""
    tokens = np.random.default_rng(0).integers(1, 2048, (ROWS, 16))
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)


@pytest.fixture(scope="module")
def full_logits(tiny):
    """Logits after a list of tokens, float64 [vocabulary], by the forward pass without a cache."""
    forward = jax.jit(lambda model, tokens: model(tokens))

    def compute(tokens):
        padded = np.zeros((1, FULL), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = forward(tiny.model, jnp.asarray(padded))
        return np.asarray(logits, np.float64)[0, len(tokens) - 1]

    return compute


@pytest.fixture(scope="module")
def run(tiny, prompts):
    """generate_tokens of the three prompts, of some of them, or of others."""

    def call(rows=slice(None), tokens=None, **options: Any):
        options = {"max_new_tokens": NEW} | options
        tokens = prompts[0][rows] if tokens is None else tokens
        return generate_tokens(tiny.model, tokens, prompts[1][rows], **options)

    return call


def prompt(prompts, row):
    return prompts[0][row, : LENGTHS[row]].tolist()


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_greedy_takes_the_likeliest_token_of_the_full_forward_pass(run, prompts, full_logits):
    found = run()
    for row in range(ROWS):
        text = prompt(prompts, row)
        for step in range(NEW):
            logits = full_logits(text)
            assert found.tokens[row, step] == np.argmax(logits)
            expected = log_softmax(logits)[np.argmax(logits)]
            np.testing.assert_allclose(found.logprobs[row, step], expected, rtol=1e-4)
            text.append(int(np.argmax(logits)))
    np.testing.assert_array_equal(found.lengths, NEW)
    assert not found.stopped.any()


def test_logprobs_are_of_the_unmodified_distribution(run, prompts, full_logits):
    found = run(sampling=MIXED, seeds=[3, 4, 5])
    text = prompt(prompts, 2)
    for step in range(NEW):
        token = int(found.tokens[2, step])
        expected = log_softmax(full_logits(text))[token]
        np.testing.assert_allclose(found.logprobs[2, step], expected, rtol=1e-4)
        text.append(token)


def test_a_repetition_penalty_counts_prompt_and_text_but_no_padding(run, prompts, full_logits):
    found = run(sampling=MIXED)
    changed = False
    for row in (0, 1):
        text = prompt(prompts, row)
        for step in range(NEW):
            logits = full_logits(text)
            seen = np.unique(text)
            penalised = logits.copy()
            penalised[seen] *= np.where(logits[seen] < 0, PENALTY, 1 / PENALTY)
            assert found.tokens[row, step] == np.argmax(penalised)
            changed |= bool(np.argmax(penalised) != np.argmax(logits))
            text.append(int(found.tokens[row, step]))
    assert changed, "the penalty never decided anything: choose another"


def test_a_row_ends_with_its_stop_token_and_the_others_go_on(run):
    free = run()
    stop = int(free.tokens[0, 2])
    first = free.tokens[0].tolist().index(stop)
    found = run(sampling={"stop_ids": (stop,)})
    ends = [row.index(stop) + 1 if stop in row else NEW for row in np.asarray(free.tokens).tolist()]
    assert ends[0] == first + 1 < NEW
    assert max(ends) == NEW
    assert found.lengths.tolist() == ends
    assert found.stopped.tolist() == [end < NEW for end in ends]
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(found.tokens[row, :end], free.tokens[row, :end])
        assert not found.tokens[row, end:].any()
        assert not found.logprobs[row, end:].any()


def test_stop_tokens_are_held_back_until_the_minimum(run, prompts, full_logits):
    free = run().tokens[0].tolist()
    stop = free[2]
    for minimum in (free.index(stop), free.index(stop) + 1):
        length = int(run(sampling=Sampling(stop_ids=(stop,), min_new_tokens=minimum)).lengths[0])
        assert (length == free.index(stop) + 1) == (minimum == free.index(stop))
    found = run(sampling=Sampling(stop_ids=(stop,), min_new_tokens=5))
    assert stop not in found.tokens[0, :5].tolist()
    assert found.lengths.min() >= 5
    text = [*prompt(prompts, 0), *found.tokens[0, :2].tolist()]
    logits = full_logits(text)
    assert np.argmax(logits) == stop
    logits[stop] = -np.inf
    assert found.tokens[0, 2] == np.argmax(logits)


def test_each_row_may_have_a_minimum_of_its_own(run):
    free = run().tokens
    stops = sorted({int(token) for token in free[:, 2]})
    held = run(sampling=Sampling(stop_ids=stops, min_new_tokens=[NEW, 0, NEW]))
    alone = run(sampling={"stop_ids": stops})
    assert held.lengths[0] == held.lengths[2] == NEW
    assert held.lengths[1] == alone.lengths[1] < NEW
    np.testing.assert_array_equal(held.tokens[1], alone.tokens[1])


def test_stop_tokens_that_are_held_back_count_in_logprobs(run, prompts, full_logits):
    logits = full_logits(prompt(prompts, 0))
    ranked = np.argsort(-logits)
    stops = ranked[:STOP_IDS_MULTIPLE]
    expected = log_softmax(logits)
    without = -np.log1p(-np.exp(expected[stops]).sum())
    assert without > 1e-2, "the stop tokens are too unlikely to be missed: choose more"
    found = run(sampling=Sampling(stop_ids=stops.tolist(), min_new_tokens=1))
    assert found.tokens[0, 0] == ranked[len(stops)]
    np.testing.assert_allclose(found.logprobs[0, 0], expected[ranked[len(stops)]], rtol=1e-4)


def test_what_a_row_draws_is_its_own_affair(run):
    options = {"sampling": HOT, "kv_format": KVFormat(4)}
    together = run(seeds=[7, 8, 9], **options).tokens
    assert len({tuple(row) for row in np.asarray(together).tolist()}) == ROWS
    backwards = run(slice(None, None, -1), seeds=[9, 8, 7], **options).tokens
    np.testing.assert_array_equal(backwards[::-1], together)
    alone = run(slice(2, 3), seeds=[9], **options).tokens
    np.testing.assert_array_equal(alone[0], together[2])
    other = run(slice(2, 3), seeds=[10], **options).tokens
    assert not np.array_equal(other, alone)


def test_keys_are_seeds(run):
    """Typed ones and raw ones; they can be used again, as nothing that is donated is theirs."""
    expected = run(seeds=[7, 8, 9], sampling=HOT).tokens
    typed = jax.vmap(jax.random.key)(jnp.asarray([7, 8, 9]))
    raw = jax.vmap(jax.random.PRNGKey)(jnp.asarray([7, 8, 9]))
    for seeds in (typed, typed, raw, raw, list(raw), np.asarray(raw)):
        np.testing.assert_array_equal(run(seeds=seeds, sampling=HOT).tokens, expected)
    split = run(seeds=jax.random.split(jax.random.key(0), ROWS), sampling=HOT).tokens
    assert not np.array_equal(split, expected)


def test_rows_that_are_not_finite_can_be_told(run, tiny, prompts):
    assert run().finite.all()
    bad = run().tokens[0, 3]
    others = np.concatenate([run().tokens[1:].ravel(), *(prompt(prompts, i) for i in range(ROWS))])
    assert bad not in others
    lm = with_damaged_token(tiny, bad)
    for length, finite in ((4, True), (NEW, False)):
        found = generate_tokens(lm.model, *prompts, max_new_tokens=length)
        assert found.finite.tolist() == [finite, True, True]


def test_it_can_be_jitted(run, tiny, prompts):
    jitted = jax.jit(
        functools.partial(generate_tokens, max_new_tokens=NEW),
        static_argnames="kv_format",
    )
    keys = row_keys(range(ROWS))  # the seeds that are the default
    found = jitted(tiny.model, *prompts, keys, sampling=HOT, kv_format=KVFormat(4))
    expected = run(sampling=HOT, kv_format=KVFormat(4))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_padding_does_not_matter(run, prompts):
    tokens, lengths = prompts
    zeros = jnp.where(jnp.arange(tokens.shape[1])[None] < lengths[:, None], tokens, 0)
    np.testing.assert_array_equal(run(tokens=zeros).tokens, run().tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 2, 3]}, r"tokens have shape \(3,\): expected \[batch, tokens\]"),
        ({"tokens": np.zeros((0, 3), int)}, r"shape \(0, 3\): expected \[batch, tokens\]"),
        ({"tokens": np.ones((3, 16), np.float32)}, "tokens are float32: expected integers"),
        ({"tokens": np.full((3, 16), 2048)}, "tokens must be from 0 to 2047"),
        ({"lengths": [5, 1]}, "lengths have shape"),
        ({"lengths": [5, 0, 9]}, "expected each from 1 to 16"),
        ({"lengths": [5, 1, 17]}, "expected each from 1 to 16"),
        ({"lengths": [5.7, 1, 9]}, "lengths are float32: expected integers"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: expected at least one new token"),
        ({"max_new_tokens": 4.0}, r"max_new_tokens is 4\.0: expected a whole number"),
        (
            {"max_new_tokens": 4, "sampling": {"min_new_tokens": [5, 0, 1]}},
            r"min_new_tokens is \[5 0 1\] and max_new_tokens 4",
        ),
        ({"max_new_tokens": 250}, "250 new tokens would pass the 256 positions"),
        ({"sampling": {"stop_ids": (3, -1)}}, r"stop_ids are \[3, -1\]: expected each from 0"),
        ({"seeds": [1, 2]}, "there are 2 seeds for a batch of 3: expected one for each row"),
        ({"seeds": jax.random.key(0)}, r"seeds are keys of threefry2x32 \(\): expected one of"),
        ({"seeds": jax.random.PRNGKey(0)}, "there are 2 seeds for a batch of 3"),
        ({"seeds": [1, 2**64, 3]}, "seeds are"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tiny, prompts, change, message):
    arguments = {"lengths": LENGTHS, "max_new_tokens": NEW, "sampling": HOT} | change
    tokens = jnp.asarray(arguments.pop("tokens", prompts[0]))
    lengths = jnp.asarray(arguments.pop("lengths"))
    with pytest.raises(ValueError, match=message):
        generate_tokens(tiny.model, tokens, lengths, **arguments)


def test_it_can_be_mapped_over_prompts(tiny):
    """Without a warning of buffers that can't be donated, as there is nothing to donate."""
    tokens = jnp.asarray([[[5, 6, 7]], [[8, 9, 10]]])
    draft = Draft(tiny, k=2)
    for options in ({}, {"speculate": draft}):

        def continued(tokens, options=options):
            lengths = jnp.array([3])
            return generate_tokens(tiny.model, tokens, lengths, max_new_tokens=4, **options).tokens

        found = jax.vmap(continued)(tokens)
        np.testing.assert_array_equal(found, [continued(row) for row in tokens])


def begin(model, format, sampling, rows=2, lengths=(16, 5), program=jit_prefill, **ends):
    """The loop after prefill in a cache of two pages for each row."""
    ends = {"max_new_tokens": 16, "stop_ids": [0]} | ends
    return program(
        model,
        jnp.ones((rows, 16), jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        model.create_cache(rows, 128, format, 64),
        RowSettings.of([sampling], rows, **ends),
        16,
    )


KERNELS_CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    layers=llama_layers((None,), 128),
    max_position_embeddings=256,
)


def primitives(jaxpr):
    """The names of all primitives, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_decoding_is_one_loop_that_never_visits_the_host(tiny):
    sampling = Sampling(temperature=1.0, top_k=5, repetition_penalty=1.1)
    loop = jax.eval_shape(lambda: begin(tiny.model, KVFormat(8), sampling, program=prefill))
    traced = jax.make_jaxpr(decode)(tiny.model, loop, jnp.int32(16))
    names = list(primitives(traced))
    assert names.count("while") == 1
    assert len(names) > 100, "the loop's body was not looked at"
    assert not [name for name in names if "callback" in name or "feed" in name]
    assert traced.eqns[-1].primitive.name == "while"


@pytest.mark.parametrize(
    ("stop_ids", "stride", "until"),
    [in_sweep((), 3, NEW), ((7, 1500), 3, NEW), ((7, 1500), 3, 2), in_sweep((), 16, NEW)],
)
def test_strides_change_nothing_but_the_looks(tiny, stop_ids, stride, until):
    """Neither where a stride passes the end, nor where rows end in the middle of one."""
    sampling = Sampling(temperature=2.0, repetition_penalty=1.1)
    ends = []
    for steps in (1, stride):
        maximum = np.arange(2) + 2  # rows end one by one
        loop = begin(tiny.model, KVFormat(8), sampling, max_new_tokens=maximum, stop_ids=stop_ids)
        ends.append(jit_decode(tiny.model, loop, jnp.int32(until), stride=steps))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert ends[0].state.counts.max() > 1


def test_a_row_of_no_new_tokens_has_none_and_is_not_stopped(tiny):
    """Its zeros are no token, though token 0 is a stop token."""
    loop = begin(tiny.model, KVFormat(8), Sampling(), max_new_tokens=np.array([0, 3]))
    found = decoding.collect(jit_decode(tiny.model, loop, jnp.int32(16)))
    assert found.lengths.tolist() == [0, 3]
    assert found.stopped.tolist() == [False, False]
    assert not found.tokens[0].any()
    assert not found.logprobs[0].any()


def test_no_kernel_is_launched_early_beside_those_of_warpgroups(tiny, monkeypatch):
    """The two programs give the same tokens; inside of `jit` there is no choice."""
    quantized = random_model(Llama, KERNELS_CONFIG, WeightFormat.parse("uint4:g128"))
    monkeypatch.setattr(decoding, "runs_by_warpgroups", lambda problem: problem.rows >= 8)
    chosen, ends = [], []
    for model, rows in ((tiny.model, 8), (quantized, 7), (quantized, 8)):  # the first not packed
        loop = begin(model, KVFormat(), Sampling(), rows, [5] * rows)
        chosen.append(decoding.decode_program(model, loop))
        ends.append(chosen[-1](model, loop, jnp.int32(4)).tokens)
    np.testing.assert_array_equal(ends[1], ends[2][:7])
    jax.eval_shape(lambda loop: chosen.append(decoding.decode_program(quantized, loop)), loop)
    assert chosen == [
        *(jit_decode, jit_decode, decoding.jit_decode_in_turn),
        decoding._traced_decode,
    ]
    in_turn = functools.partial(decoding.jit_decode_in_turn, quantized)
    # JAX names the options where a program with some is called inside of another.
    with pytest.raises(ValueError, match="'xla_gpu_enable_pdl': False"):
        jax.eval_shape(lambda *rest: in_turn(*rest), loop, jnp.int32(4))


def test_a_stride_is_a_loop_whose_length_is_known(tiny):
    loop = jax.eval_shape(lambda: begin(tiny.model, KVFormat(8), Sampling(), program=prefill))
    traced = jax.make_jaxpr(functools.partial(decode, stride=5))(tiny.model, loop, jnp.int32(16))
    [inner] = [
        equation
        for equation in traced.eqns[-1].params["body_jaxpr"].eqns
        if equation.primitive.name == "scan"
    ]
    assert inner.params["length"] == 5


@pytest.mark.parametrize("format", [KVFormat(16), in_sweep(KVFormat(8)), KVFormat("2g64")], ids=str)
def test_the_loop_does_not_copy_the_cache(tiny, format):
    check_that_the_loop_copies_nothing(tiny.model, format, stride=1)


def test_strides_do_not_copy_the_cache(tiny):
    check_that_the_loop_copies_nothing(tiny.model, KVFormat(8), stride=4)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_loop_does_not_copy_the_cache_on_the_gpu(format):
    """A model in bfloat16 with heads of 64 channels: the kernels' own path."""
    model = Llama(KERNELS_CONFIG, nnx.Rngs(0))
    check_that_the_loop_copies_nothing(model, format, stride=8)
    prompt = jnp.arange(40, dtype=jnp.int32).reshape(2, 20)
    options = {"max_new_tokens": 12, "kv_format": format, "sampling": {"stop_ids": ()}}
    first, again = (generate_tokens(model, prompt, jnp.array([20, 7]), **options) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert first.lengths.tolist() == [12, 12]


def check_that_the_loop_copies_nothing(model, format, stride):
    loop = begin(model, format, Sampling())
    arguments = (model, loop, jnp.int32(16))
    state = loop.state

    def copies(program):
        text = program.as_text()
        assert len(re.findall(r" while\(", text)) == (2 if stride > 1 else 1)
        # The block that waits, whose size no text changes, is copied on a CPU with jax 0.10.
        pages = [dataclasses.replace(layer, residual=None) for layer in state.cache.layers]
        shapes = {leaf.shape for leaf in jax.tree.leaves(pages)}
        names = "|".join(",".join(map(str, shape)) for shape in shapes)
        return re.findall(rf"\[(?:{names})\]\S* copy(?:-start)?\(", text)

    if format == KVFormat(16):  # once is enough: it takes seconds to compile
        undonated = jax.jit(decode, static_argnames="stride")
        assert copies(undonated.lower(*arguments, stride=stride).compile(AS_PEOPLE_DO)), (
            "without donation there must be copies to find"
        )
    program = jit_decode.lower(*arguments, stride=stride).compile(AS_PEOPLE_DO)
    assert not copies(program)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache.layers)]
    after = program(*arguments).state.cache.layers
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache.layers))


@pytest.mark.parametrize(
    "format", [in_sweep(f) if f == KVFormat(8) else f for f in FORMATS], ids=str
)
def test_on_a_gpu_the_append_kernels_write_in_place(format, lower_for_cuda, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: None)
    model = nnx.eval_shape(lambda: Llama(KERNELS_CONFIG, nnx.Rngs(0)))
    arrays = 2 if format == KVFormat(16) else 4  # pages and their parameters
    flushed = 0
    if format.block is not None:  # tokens are appended to 16-bit pages, and blocks encoded
        arrays, flushed = 2, 6

    def program(model, tokens):
        settings = RowSettings.of([Sampling()], 2, max_new_tokens=8)
        cache = model.create_cache(2, 64, format, 64)
        loop = prefill(model, tokens, jnp.full(2, 4, jnp.int32), cache, settings, 8)
        return decode(model, loop, jnp.int32(8)).tokens

    # The prompt's own attention would go to cuDNN, which only a GPU can choose.
    text = lower_for_cuda(program, model, jax.ShapeDtypeStruct((2, 4), jnp.int32))
    for name, aliased in (("append_kv", arrays), ("flush_kv", flushed)):
        calls = [line for line in text.splitlines() if "custom_call" in line and name in line]
        # Of prefill, and of the loop's body; a prompt may lie on both sides of a block's end.
        assert len(calls) in ((2, 2 + (format.block is not None)) if aliased else (0,))
        for call in calls:
            assert call.count("output_operand_alias<") == aliased


def test_positions_are_counted_from_real_lengths(run, tiny, prompts):
    """Padding takes no position, whether or not there were enough for it."""
    tokens, positions = prompts[0], tiny.config.max_position_embeddings
    padded = jnp.pad(tokens, ((0, 0), (0, positions - tokens.shape[1])))
    np.testing.assert_array_equal(run(tokens=padded).tokens, run().tokens)
