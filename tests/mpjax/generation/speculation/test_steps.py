"""The speculative loop gives what plain decoding gives, in fewer steps and in place."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.generation import decoding
from mpjax.generation.decoding import (
    begin_speculation,
    generate_tokens,
    jit_prefill,
    jit_speculate,
    prefill,
)
from mpjax.generation.speculation import steps
from mpjax.generation.speculation.proposer import Proposal, Proposer
from mpjax.kernels import KVFormat, device
from mpjax.models import Llama
from mpjax.models.state import DecoderCache
from mpjax.precision import Precision
from mpjax.sampling.settings import RowSettings, Sampling
from tests.mpjax.generation.test_decoding import AS_PEOPLE_DO, KERNELS_CONFIG, primitives
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

NEW = 24
NGRAM = mpjax.Ngram(k=4, n=2)
# A reward for repetition; the first rows are greedy, and the last row's draws are nearly free.
SAMPLING: dict[str, Any] = {
    "temperature": np.array([0, 0, 0.7, 3.0]),
    "top_p": 0.95,
    "repetition_penalty": 0.9,
    "min_new_tokens": np.array([0, 7, 0, 9]),
    "stop_ids": (3, 7, 11, 30),
}
FORMATS = ("KV4c",)
SWEPT_FORMATS = ("KV16", "KV8", "KVfp8", "KV4", "KV4t", "KV2g32", "KV2t", "K4cV4c", "K8V4cg64")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["k"])
@dataclasses.dataclass(frozen=True)
class Stubborn(Proposer):
    """Proposes one token, again and again."""

    token: Any
    k: int = 4
    always: ClassVar[bool] = True

    def propose(self, context):
        tokens = jnp.full((len(context.most), self.k), self.token, jnp.int32)
        return Proposal(tokens, context.most), context.state.speculation.own


def begin(model, prompts, proposer, format="KV8", maximum=NEW):
    """The loop after prefill and `begin_speculation`."""
    tokens, lengths = prompts
    batch = len(lengths)
    settings = RowSettings.of([Sampling()], batch, max_new_tokens=maximum)
    format = Precision.parse(f"W16A16{format}").kv
    cache = model.create_cache(batch, tokens.shape[1] + NEW, format)
    loop = jit_prefill(model, tokens, lengths, cache, settings, NEW)
    return begin_speculation(proposer, loop, tokens, lengths)


@pytest.mark.parametrize("text", [*FORMATS, *map(in_sweep, SWEPT_FORMATS)])
def test_tokens_are_those_of_plain_decoding(model, prompts, text):
    """Greedy and drawn rows, with penalties, minima and stop tokens, over the end of a block."""
    format = Precision.parse(f"W16A16{text}").kv
    run = functools.partial(
        generate_tokens, model, *prompts, max_new_tokens=NEW, kv_format=format, sampling=SAMPLING
    )
    plain, found = run(), run(speculate=NGRAM)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_allclose(found.logprobs, plain.logprobs, rtol=1e-3, atol=1e-3)
    for name in ("lengths", "stopped", "finite"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))
    assert found.stopped.any()
    done = found.speculated
    np.testing.assert_array_equal(done.steps + done.accepted >= found.lengths - 1, True)
    assert int(done.accepted.sum()) > 10
    assert (done.accepted <= done.proposed).all()
    assert (done.steps < found.lengths).all()
    # Wrong tokens in each step leave no trace in the cache.
    unsaid = min(set(range(50)) - set(np.asarray(plain.tokens).ravel().tolist()))
    found = run(speculate=Stubborn(unsaid))
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert not found.speculated.accepted.any()
    np.testing.assert_array_equal(found.speculated.steps, found.lengths - 1)
    assert (found.speculated.proposed > 2 * found.lengths).sum() >= 2


def test_rows_stop_once_they_have_as_many_tokens_as_wanted(model, prompts):
    """Or a few more; and a second call goes on where the first has stopped."""
    whole = begin(model, prompts, NGRAM)
    whole = jit_speculate(NGRAM, model, whole, jnp.int32(NEW), stride=1)
    loop = begin(model, prompts, NGRAM)
    for until in (5, 5, 9, NEW):
        loop = jit_speculate(NGRAM, model, loop, jnp.int32(until), stride=1)
        state = loop.state
        assert until <= state.counts.min() <= until + NGRAM.k
        np.testing.assert_array_equal(state.cache.lengths, prompts[1] + state.counts - 1)
    np.testing.assert_array_equal(loop.tokens, whole.tokens)
    assert not state.running.any()


def test_strides_change_nothing_but_the_looks(model, prompts):
    """Also where a stride passes the end, and where rows are done before."""
    proposer = Stubborn(7)
    ends = []
    for stride in (1, 5):
        loop = begin(model, prompts, proposer, maximum=np.array([0, 3, NEW, NEW]))
        end = jit_speculate(proposer, model, loop, jnp.int32(11), stride=stride)
        assert end.state.counts.tolist()[:2] == [0, 3]
        state = dataclasses.replace(end.state, cache=None)
        ends.append(dataclasses.replace(end, state=state))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_no_token_is_proposed_behind_the_end_or_the_block(model, prompts):
    state = begin(model, prompts, NGRAM, maximum=np.array([NEW, NEW, 3, 1])).state
    alive = jnp.array([True, False, True, True])
    assert steps.most_proposed(state, alive, 4, None).tolist() == [4, 0, 1, 0]
    assert state.cache.lengths.tolist() == [100, 127, 128, 122]
    state, every = begin(model, prompts, NGRAM).state, jnp.ones(4, bool)
    assert steps.most_proposed(state, every, 9, 128).tolist() == [9, 0, 9, 5]


def test_a_row_ends_with_a_token_behind_nan(model, prompts):
    broken = jax.tree.map(lambda x: x, model)
    loop = begin(model, prompts, NGRAM)
    said = loop.tokens[0, 0]
    broken.embedding.set_value(broken.embedding.get_value().at[said].set(jnp.nan))
    end = jit_speculate(NGRAM, broken, loop, jnp.int32(NEW), stride=1)
    assert not decoding.collect(end).finite[0]
    assert end.state.counts[0] == 2


@pytest.mark.parametrize("proposer", ["ngram", in_sweep("draft")])
def test_the_loop_never_visits_the_host_and_copies_no_cache(model, prompts, proposer):
    """Neither the model's cache nor the draft's, in any of the loops."""
    lm = mpjax.LanguageModel(model, None, KVFormat(4), mpjax.bundled_model())
    proposer = NGRAM if proposer == "ngram" else mpjax.Draft(lm, 2)
    loop = begin(model, prompts, proposer, "KV2g32")
    arguments = proposer, model, loop, jnp.int32(NEW)
    traced = jax.make_jaxpr(functools.partial(steps.decode, stride=2))(*arguments)
    names = list(primitives(traced))
    assert traced.eqns[-1].primitive.name == "while"
    assert names.count("while") == (3 if proposer is NGRAM else 1)
    assert not [name for name in names if "callback" in name or "feed" in name]
    check_that_no_cache_is_copied(arguments, stride=2)


def check_that_no_cache_is_copied(arguments, stride):
    """Compiles and runs `jit_speculate`; returns its loop."""

    def caches(loop):
        state = loop.state
        own = state.speculation.own
        return [state.cache.layers, *([own.layers] if isinstance(own, DecoderCache) else [])]

    loop = arguments[2]
    program = jit_speculate.lower(*arguments, stride=stride).compile(AS_PEOPLE_DO)
    pages = [dataclasses.replace(layer, residual=None) for layer in sum(caches(loop), ())]
    shapes = {leaf.shape for leaf in jax.tree.leaves(pages)}
    sizes = "|".join(",".join(map(str, shape)) for shape in shapes)
    assert not re.findall(rf"\[(?:{sizes})\]\S* copy(?:-start)?\(", program.as_text())
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches(loop))]
    end = program(*arguments)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches(end))] == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(caches(loop)))
    return end


def test_a_turn_of_plain_steps_looks_for_proposals_once(model, prompts):
    """The tokens are the same, and no row passes its end."""
    maximum = np.array([0, 3, NEW, NEW])
    found = []
    for stride in (1, 4):
        loop = begin(model, prompts, NGRAM, maximum=maximum)
        found.append(jit_speculate(NGRAM, model, loop, jnp.int32(NEW), stride=stride))
    each, fourth = found
    np.testing.assert_array_equal(fourth.tokens, each.tokens)
    assert not (fourth.state.running | each.state.running).any()
    np.testing.assert_allclose(fourth.logprobs, each.logprobs, rtol=1e-3, atol=1e-3)
    history = fourth.state.speculation.history
    for row, (prompt, count) in enumerate(
        zip(prompts[1].tolist(), fourth.state.counts, strict=True)
    ):
        np.testing.assert_array_equal(
            history[row, prompt : prompt + int(count)], fourth.tokens[row, : int(count)]
        )
    done = fourth.state.speculation.done
    assert 0 < done.proposed.sum() < each.state.speculation.done.proposed.sum()
    np.testing.assert_array_equal(
        done.steps + done.accepted, jnp.maximum(fourth.state.counts - 1, 0)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["KV16", "KV8", "KV4", "KV2g64"])
@pytest.mark.parametrize("proposer", ["ngram", "draft"])
def test_on_a_gpu_tokens_are_the_likeliest_and_no_cache_is_copied(prompts, proposer, text):
    """By the kernels, whose sums differ from those of a pass over the whole text by rounding."""
    model = Llama(KERNELS_CONFIG, nnx.Rngs(0))
    lm = mpjax.LanguageModel(model, None, KVFormat(8), mpjax.bundled_model())
    proposer = NGRAM if proposer == "ngram" else mpjax.Draft(lm, 3)
    loop = begin(model, prompts, proposer, text)
    end = check_that_no_cache_is_copied((proposer, model, loop, jnp.int32(NEW)), stride=4)
    assert end.state.counts.tolist() == [NEW] * 4
    assert int(end.state.speculation.done.accepted.sum()) > 0
    tolerance = 0.5 if text.startswith("KV2") else 0.1
    for row, length in enumerate(prompts[1].tolist()):
        said = jnp.concatenate([prompts[0][row, :length], end.tokens[row]])
        logprobs = jax.nn.log_softmax(model(said[None])[0, length - 1 : -1])
        of_tokens = jnp.take_along_axis(logprobs, end.tokens[row][:, None], 1)[:, 0]
        np.testing.assert_allclose(end.logprobs[row], of_tokens, atol=tolerance)
        np.testing.assert_array_less(logprobs.max(-1) - tolerance, of_tokens)


def test_programs_are_for_the_rows_of_both_kinds_of_step(model, prompts, monkeypatch):
    asked = []
    monkeypatch.setattr(decoding, "has_warpgroups", lambda model, rows: asked.append(rows) or False)
    loop = begin(model, prompts, NGRAM)
    program = decoding.speculative_program(model, loop, NGRAM)
    assert (program.func, program.args) == (jit_speculate, (NGRAM,))  # type: ignore[attr-defined]
    assert asked == [4, 4 * 5]
    monkeypatch.setattr(decoding, "has_warpgroups", lambda model, rows: rows > 4)
    program = decoding.speculative_program(model, loop, NGRAM)
    assert program.func is decoding.jit_speculate_in_turn  # type: ignore[attr-defined]


def test_on_a_gpu_both_kinds_of_step_run_the_kernels_in_place(lower_for_cuda, monkeypatch):
    monkeypatch.setattr(device, "why_triton_cannot_run", lambda: None)
    model = nnx.eval_shape(lambda: Llama(KERNELS_CONFIG, nnx.Rngs(0)))

    def program(model, tokens, lengths, cache):
        settings = RowSettings.of([Sampling()], 2, max_new_tokens=8)
        loop = prefill(model, tokens, lengths, cache, settings, 8)
        loop = begin_speculation(NGRAM, loop, tokens, lengths)
        return steps.decode(NGRAM, model, loop, jnp.int32(8)).tokens

    cache = jax.eval_shape(lambda: model.create_cache(2, 256, KVFormat(8), 64))
    numbers = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_cuda(program, model, *numbers, cache)
    calls = [line for line in text.splitlines() if "custom_call" in line]
    for name, aliased in (("rotate_and_append_kv8", 4), ("attention_kv8", 0)):
        found = [line for line in calls if f'"{name}"' in line]
        assert len(found) == 3, name  # of the prompt, and of both kinds of step
        assert all(line.count("output_operand_alias<") == aliased for line in found)
