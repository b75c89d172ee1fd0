"""Engines for tests, the tokens of a request that runs alone, and what holds after each step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.engine.engine import Engine
from mpjax.engine.pages import NOWHERE
from mpjax.engine.planner import Planner
from mpjax.engine.row import Row
from mpjax.generation.speculation.proposer import Proposal, Proposer
from mpjax.kernels import KVFormat, KVPages

LONGEST = 192  # tokens of a request


def make_engine(
    lm: mpjax.LanguageModel, text: str = "KV16", page_size: int = 32, **options: Any
) -> Engine:
    """A small engine over a model, whose programs are few."""
    lm = dataclasses.replace(lm, kv_format=KVFormat.parse(text), page_size=page_size)
    options = {"slots": 4, "max_tokens": LONGEST, "chunk_tokens": 64, "steps": 4} | options
    options = {"max_gap": math.inf} | options  # so that plans don't depend on seconds
    return Engine(lm, **options)


def resize(engine: Engine, **sizes: Any) -> None:
    """Gives an idle engine other sizes, no larger than its own, and forgets all pages."""
    assert not engine.has_work
    runner = engine._runner
    if "pages" in sizes:
        sizes["pages"] = (sizes["pages"],) * len(engine.lm.config.page_groups)
    runner.planner = Planner(dataclasses.replace(runner.planner.sizes, **sizes))


def is_clean(engine: Engine) -> bool:
    """Whether nothing is left of earlier requests but pages that are kept for their content."""
    numbers = engine.statistics()
    names = ("running", "waiting")
    return numbers["free_pages"] == numbers["pages"] and not any(numbers[n] for n in names)


def damage_what_rows_leave(engine: Engine) -> list[Row]:
    """Has rows that are cancelled or preempted leave NaN behind, until the next `resize`.

    It lies in the pages that nobody else has or finds and in the residual of the slot, where a
    program that is under way may write it. Returns a list to which copies of preempted rows are
    added as they were.
    """
    runner, planner = engine._runner, engine._runner.planner
    preempt, remove, preempted = planner._preempt, planner.remove, []

    def damage(pages: list[list[int]], slot: int) -> None:
        own = planner.groups.unowned(pages)

        def damaged(layer: KVPages, group: int) -> KVPages:
            residual = layer.residual and _with_nan(layer.residual, [slot])
            return dataclasses.replace(_with_nan(layer, own[group]), residual=residual)

        cache = runner._state.cache
        layers = tuple(map(damaged, cache.layers, engine.lm.config.groups))
        cache = dataclasses.replace(cache, layers=layers)
        runner._state = dataclasses.replace(runner._state, cache=cache)

    def preempt_and_damage(row: Row) -> None:
        before = dataclasses.replace(row, pages=[list(own) for own in row.pages])
        preempted.append(before)
        preempt(row)
        damage(before.pages, before.slot)

    def remove_and_damage(row: Row, *, is_finite: bool = True) -> None:
        before = dataclasses.replace(row, pages=[list(own) for own in row.pages])
        remove(row, is_finite=is_finite)
        if not is_finite and before.slot is not None:
            damage(before.pages, before.slot)

    planner._preempt, planner.remove = preempt_and_damage, remove_and_damage
    return preempted


def _with_nan(layer: KVPages, pages: list[int]) -> KVPages:
    """Pages with NaN, or in formats of codes with scales of NaN, unless scales are given."""
    changed = {}
    for name in ("keys", "values", "key_parameters", "value_parameters"):
        array = getattr(layer, name)
        if array is not None and array.dtype == jnp.uint32:
            changed[name] = array.at[np.array(pages, int)].set(2**32 - 1)
        elif array is not None and array.ndim == 4 and jnp.issubdtype(array.dtype, jnp.floating):
            changed[name] = array.at[np.array(pages, int)].set(np.nan)
    return dataclasses.replace(layer, **changed)


def require_order(planner: Planner) -> None:
    """Raises unless pages, slots, lengths and queues of a planner agree, as after each step."""
    sizes = planner.sizes
    for group, (pool, count) in enumerate(zip(planner.groups.pools, sizes.pages, strict=True)):
        held = [page for row in planner.running for page in row.pages[group] if page != NOWHERE]
        assert all(pool.references(p) == held.count(p) for p in range(1, count))
        assert pool.available + len(set(held)) == count - 1
    for rows in (planner.running, planner.waiting):
        assert [row.order for row in rows] == sorted(row.order for row in rows)
    slots = [row.slot for row in planner.running]
    assert len(set(slots)) == len(slots)
    for row in planner.running:
        assert all(row.length <= len(own) * sizes.page_size for own in row.pages)
        assert row.certain <= max(row.length, len(row.tokens))
        assert row.drawn <= row.most
    assert all(row.slot is None and not row.pages for row in planner.waiting)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["texts"], meta_fields=["k", "errs"]
)
@dataclasses.dataclass(frozen=True)
class Knowing(Proposer):
    """Proposes what a row will say, as one of `texts` has it; if it errs, nothing, or a mistake."""

    texts: Any
    k: int = 4
    errs: bool = True

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], **options: Any) -> Knowing:
        padded = np.zeros((len(texts), LONGEST + 8), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        return cls(jnp.asarray(padded), **options)

    def propose(self, context):
        size = min(self.texts.shape[1], context.history.shape[1])
        is_known = jnp.arange(size)[None] < context.known[:, None]
        same = context.history[:, None, :size] == self.texts[None, :, :size]
        own = self.texts[(same & is_known[:, None]).sum(2).argmax(1)]
        places = context.known[:, None] + jnp.arange(self.k)[None]
        tokens = jnp.take_along_axis(own, jnp.minimum(places, self.texts.shape[1] - 1), 1)
        is_wrong, is_silent = (
            self.errs & (x % n == 0) for x, n in ((places, 7), (context.known, 5))
        )
        tokens = jnp.where(is_wrong, 1 + tokens // 2, tokens)
        counts = jnp.where(is_silent, 0, context.most)
        return Proposal(tokens, counts), context.state.speculation.own


@functools.partial(jax.jit, static_argnums=0)
def _step(graph, state, tokens, counts, cache):
    return nnx.merge(graph, state).step(tokens, counts, cache)


def said_alone(
    lm: mpjax.LanguageModel, text: str, prompts: list[list[int]], new: int
) -> np.ndarray:
    """The greedy tokens [prompts, new] behind prompts that are read from the cache.

    No piece of a prompt passes the end of a block.
    """
    format = KVFormat.parse(text)
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = max(LONGEST, int(lengths.max()) + new)
    cache = lm.model.create_cache(len(prompts), longest, format, max(32, format.group or 0))
    graph, state = nnx.split(lm.model)
    size = format.block or longest
    logits = None
    for start in range(0, int(lengths.max()), size):
        counts = np.clip(lengths - start, 0, size)
        tokens = np.zeros((len(prompts), size), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            part = prompt[start : start + size]
            row[: len(part)] = part
        found, cache = _step(graph, state, tokens, counts.astype(np.int32), cache)
        is_last = (counts > 0)[:, None]
        logits = found if logits is None else jnp.where(is_last, found, logits)
    assert logits is not None
    said = [np.asarray(logits.argmax(-1))]
    ones = np.ones(len(prompts), np.int32)
    for _ in range(new - 1):
        logits, cache = _step(graph, state, said[-1][:, None].astype(np.int32), ones, cache)
        said.append(np.asarray(logits.argmax(-1)))
    return np.stack(said, 1)


@pytest.fixture(scope="module")
def engine(tiny):
    """An engine over the tiny model; tests leave it idle."""
    with make_engine(tiny) as engine:
        yield engine
