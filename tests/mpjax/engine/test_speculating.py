"""An engine that speculates says what a plain one says."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import mpjax
from mpjax import Sampling
from mpjax.engine.calls import count_programs
from mpjax.errors import NotFiniteError
from mpjax.kernels import KVFormat
from tests.mpjax.engine.conftest import Knowing, make_engine, resize, said_alone
from tests.mpjax.odd_models import with_damaged_token
from tests.sweeps import in_sweep

pytestmark = pytest.mark.usefixtures("exact_products")

PROMPTS = ["def f(x):\n    return", "import", "class Stack(list):\n    ", "for i in range(9):"]
NEW = 40
MIXED = Sampling(
    temperature=[0, 1.2, 0.8, 1.0],
    top_k=[1, 9999, 20, 9999],
    top_p=[1, 1, 0.9, 1],
    repetition_penalty=[1.5, 1, 1, 1.2],
    min_new_tokens=[0, 3, 0, NEW],
)
SEEDS = [3, 5, 7, 11]


@pytest.fixture(scope="module")
def plain(engine):
    """What a plain engine says: greedily, and by rows that are drawn in other ways."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "seeds": SEEDS}
    greedy = engine.generate(PROMPTS, **options)
    return greedy, engine.generate(PROMPTS, sampling=MIXED, **options)


@pytest.fixture(scope="module")
def speculating(tiny, plain):
    """An engine that is proposed what a plain one says, with mistakes."""
    ids = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    said = [a + b for one in plain for a, b in zip(ids, one.tokens, strict=True)]
    with make_engine(tiny, speculate=Knowing.of(said)) as engine:
        yield engine


def check(found, expected):
    assert found.tokens == expected.tokens
    assert found.text == expected.text
    assert found.finish_reasons == expected.finish_reasons
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    report = found.speculation
    assert report.tokens_per_step > 1.5
    assert 0.5 < report.acceptance < 1
    assert report.tokens == [len(tokens) - 1 for tokens in found.tokens]


def drain(engine):
    """Runs steps until nothing is under way, also of rows whose end was not known."""
    for _ in engine:
        pass


def test_tokens_are_those_of_a_plain_engine(speculating, plain):
    """Greedy rows, and rows that are drawn, with penalties, minima, ends and their seeds."""
    greedy, drawn = plain
    assert greedy.speculation is None
    check(speculating.generate(PROMPTS, max_new_tokens=NEW, seeds=SEEDS), greedy)
    options = {"max_new_tokens": NEW, "sampling": MIXED, "seeds": SEEDS}
    check(speculating.generate(PROMPTS, **options), drawn)


def test_a_program_draws_no_more_than_a_page_of_tokens(tiny, plain):
    """Steps of eleven tokens, three of which are one more than a page has."""
    [greedy, _] = plain
    prompt = tiny.tokenizer.encode(PROMPTS[2])
    sure = Knowing.of([prompt + greedy.tokens[2]], k=10, errs=False)
    with make_engine(tiny, slots=1, speculate=sure) as engine:
        handle, most = engine.submit(prompt, max_new_tokens=NEW), 0
        while not handle.is_finished:
            before = len(handle.tokens)
            engine.step()
            most = max(most, len(handle.tokens) - before)
        assert handle.tokens == greedy.tokens[2]
        assert handle.speculation.accepted == handle.speculation.proposed
        assert most == 22


def test_drawn_tokens_repeat_with_their_seeds(speculating):
    """Whatever is drawn beside them."""

    def say(*seeds):
        hot = {"temperature": 1.2, "stop_ids": ()}
        options: dict[str, Any] = {"max_new_tokens": NEW, "sampling": hot}
        handles = [speculating.submit(PROMPTS[0], seed=seed, **options) for seed in seeds]
        return [handle.result().tokens for handle in handles]

    first, second = say(3, 5)
    assert first != second
    assert say(5, 4, 3)[::2] == [second, first]


def test_rows_end_inside_of_accepted_tokens(speculating, plain):
    """At a stop token, a stop string, their maximum, or because they are cancelled."""
    [greedy, _] = plain
    text, tokens = greedy.text[2], greedy.tokens[2]
    for most in range(2, 9):
        assert speculating.submit(PROMPTS[2], max_new_tokens=most).result().tokens == tokens[:most]
    for at in (3, 4, 5, 6):
        first = tokens.index(tokens[at])
        options = {"max_new_tokens": NEW, "sampling": {"stop_ids": [tokens[at]]}}
        handle = speculating.submit(PROMPTS[2], **options).result()
        assert (handle.tokens, handle.finish_reason) == (tokens[: first + 1], "stop")
    handle = speculating.submit(PROMPTS[2], max_new_tokens=NEW, stop=[text[5:8]]).result()
    assert (handle.text, handle.finish_reason) == (text[: text.index(text[5:8])], "stop")
    for steps in (1, 2, 3):
        handle = speculating.submit(PROMPTS[2], max_new_tokens=NEW)
        for _ in range(steps):
            speculating.step()
        handle.cancel()
        drain(speculating)
        assert handle.tokens == tokens[: len(handle.tokens)]
    numbers = speculating.statistics()
    assert numbers["free_pages"] == numbers["pages"]


def test_the_likeliest_tokens_in_the_place_of_accepted_ones(speculating, engine):
    options = {"max_new_tokens": 8, "logprobs": 3}
    expected = engine.submit(PROMPTS[0], **options).result()
    found = speculating.submit(PROMPTS[0], **options).result()
    assert found.speculation.accepted[0] > 0
    for one, other in zip(found.top_logprobs, expected.top_logprobs, strict=True):
        assert [i for i, _ in one] == [i for i, _ in other]
        np.testing.assert_allclose([c for _, c in one], [c for _, c in other], atol=1e-4)


def test_pages_with_accepted_tokens_are_shared(speculating, plain, tiny):
    """They are final: who goes on from there says what the plain engine said."""
    [greedy, _] = plain
    drain(speculating)
    resize(speculating)
    prompt = tiny.tokenizer.encode(PROMPTS[2])
    said = prompt + greedy.tokens[2]
    speculating.submit(prompt, max_new_tokens=NEW).result()
    begun = len(said) - 3
    assert begun > 33 > len(prompt)
    again = speculating.submit(said[:begun], max_new_tokens=3).result()
    assert (again.tokens, again.shared_tokens) == (said[begun:], begun // 32 * 32)


def test_rows_are_counted_in_the_statistics(speculating):
    before = speculating.statistics()
    report = speculating.submit(PROMPTS[1], max_new_tokens=NEW).result().speculation
    after = speculating.statistics()
    for name in ("proposed", "accepted"):
        assert after[f"{name}_tokens"] - before[f"{name}_tokens"] == getattr(report, name)[0]
    assert 0 < report.accepted[0] < report.proposed[0]


def test_no_program_is_compiled_twice(speculating):
    def run():
        for count in (1, 2, 4):
            speculating.generate(PROMPTS[:count], max_new_tokens=5)
            speculating.generate(PROMPTS[:count], max_new_tokens=7, sampling={"temperature": 1.2})
        return count_programs()

    assert run() == run()
    assert speculating.statistics()["programs"] <= 15


def test_nan_behind_a_proposed_token_ends_its_own_row(tiny, plain, engine):
    """And leaves nothing in the pages that the next row takes."""
    [greedy, _] = plain
    bad = min({*range(1, 200)} - {i for row in greedy.tokens for i in row})
    knowing = Knowing.of([tiny.tokenizer.encode(PROMPTS[0]) + [bad] * NEW])
    long = [5] * 150
    expected = engine.submit(long, max_new_tokens=4).result().tokens
    damaged = with_damaged_token(tiny, bad)
    with make_engine(damaged, cache_memory=2_000_000, speculate=knowing) as broken:
        resize(broken, pages=7)
        for _ in range(2):
            handle = broken.submit(PROMPTS[0], max_new_tokens=NEW)
            with pytest.raises(NotFiniteError, match=f"request {handle.number}: "):
                handle.result()
            assert broken.submit(long, max_new_tokens=4).result().tokens == expected


@pytest.mark.sweep
def test_blocks_are_encoded_behind_accepted_tokens(tiny):
    """The block of 128 tokens ends in mid-decoding. Drawn tokens repeat, as their seeds do."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 2048, length).tolist() for length in (120, 110)]
    [expected] = said_alone(tiny, "KV4cg32", prompts[:1], NEW).tolist()
    drawn = {"temperature": 1.2, "stop_ids": ()}
    knowing = Knowing.of([prompts[0] + expected])
    sizes: dict[str, Any] = {"slots": 2, "chunk_tokens": 16, "speculate": knowing}
    with make_engine(tiny, "KV4cg32", **sizes) as engine:

        def say(*asked):
            # Candidates, so that all rows have the programs of those that are drawn.
            options: dict[str, Any] = {"max_new_tokens": NEW, "logprobs": 1}
            handles = [
                engine.submit(prompt, sampling=sampling, seed=seed, **options)
                for prompt, sampling, seed in asked
            ]
            return [handle.result() for handle in handles]

        greedy, first = say((prompts[0], {"stop_ids": ()}, 0), (prompts[1], drawn, 7))
        assert greedy.tokens == expected
        assert greedy.speculation.accepted[0] > 10
        again, other = say((prompts[1], drawn, 7), (prompts[1], drawn, 8))
        assert first.tokens == again.tokens != other.tokens


def draft_of(lm, text):
    """A draft model that is the model itself with another cache, which is nearly always right."""
    return mpjax.Draft(dataclasses.replace(lm, kv_format=KVFormat.parse(text), page_size=32), 3)


def test_a_draft_model_reads_each_row_that_begins(tiny, plain):
    """The second prompt's row begins where the first one's was."""
    with make_engine(tiny, slots=1, speculate=draft_of(tiny, "KV8")) as engine:
        found = engine.generate(PROMPTS[:2], max_new_tokens=NEW)
        assert found.tokens == plain[0].tokens[:2]
        for proposed, accepted in zip(
            found.speculation.proposed, found.speculation.accepted, strict=True
        ):
            assert accepted > proposed / 2 > 5


@pytest.mark.parametrize("text", [*map(in_sweep, ("KV8", "KV4cg32"))])
def test_a_draft_model_proposes_what_it_does_for_generate(text, tiny):
    """Seed by seed, as random numbers go on between programs; also candidates are told."""
    draft = draft_of(tiny, text)
    sampling = Sampling(temperature=[0, 1.2, 0.8, 1.0], top_k=[1, 99, 20, 9999])
    options = {"max_new_tokens": NEW, "sampling": sampling, "seeds": SEEDS}
    expected = mpjax.generate(tiny, PROMPTS, speculate=draft, **options)
    with make_engine(tiny, slots=2, speculate=draft) as engine:
        found = engine.generate(PROMPTS, **options)
        assert found.tokens == expected.tokens
        assert found.speculation.acceptance > 0.5
        told = engine.submit(PROMPTS[1], logprobs=2, sampling={"temperature": 1.0}).result()
        assert [len(one) for one in told.top_logprobs] == [2] * len(told.tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["W4A16KV8", "W4A16KV4c"])
def test_on_a_gpu_tokens_are_those_of_a_plain_engine(precision):
    """By other kernels, so that tokens may differ where two are nearly as likely."""
    lm = mpjax.load(mpjax.bundled_model(), precision=precision, progress=False)
    prompt = 3 * "def area(width, height):\n    return width * height\n\n\n" + "def area("
    found = []
    for speculate in (None, mpjax.Ngram(4, 2)):
        with mpjax.Engine(lm, slots=2, max_tokens=512, speculate=speculate) as engine:
            found.append(engine.generate([prompt, "import os\n"], max_new_tokens=120))
    plain, speculated = found
    assert speculated.speculation.tokens_per_step > 1.2
    for row in range(2):
        pairs = list(zip(plain.tokens[row], speculated.tokens[row], strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        ends = slice(0, same + 1)
        np.testing.assert_allclose(
            speculated.logprobs[row][ends], plain.logprobs[row][ends], atol=0.15
        )


@dataclasses.dataclass(frozen=True)
class Reading(Knowing):
    def read(self, own, tokens, lengths):
        return own


def test_proposers_that_do_not_fit_are_refused(tiny):
    for proposer, message in (
        (Reading(None), "speculate is a Reading, which reads prompts, but not those of an Engine"),
        (mpjax.Ngram(32, 3), "speculate proposes 32 tokens: an Engine verifies fewer than a page"),
        ("ngram:4:3", "speculate is 'ngram:4:3'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(tiny, speculate=proposer)
