from __future__ import annotations

import time
from typing import Any

import pytest

import mpjax
from mpjax.cli.batch import complete, summary
from mpjax.cli.requests import Request
from mpjax.memory import DeviceMemoryError


def request(number, prompt, max_new_tokens=4, seed=0):
    return Request(number, prompt, max_new_tokens, seed, f"line {number}")


@pytest.fixture
def calls(monkeypatch):
    """The prompts and options of each call of `mpjax.generate`."""
    seen: list[tuple[list[str], dict[str, Any]]] = []
    generate = mpjax.generate

    def call(lm, prompts, **options):
        seen.append((prompts, options))
        return generate(lm, prompts, **options)

    monkeypatch.setattr(mpjax, "generate", call)
    return seen


def test_results_keep_the_order_whatever_the_groups_are(tiny, calls):
    prompts = ["a b c d", "a", "a b", "a b c", "a b c d e"]
    limits = [4, 4, 4, 4, 2]
    hot = mpjax.Sampling(temperature=1.0)
    asked = [request(index, prompts[index], limits[index], 10 + index) for index in range(5)]
    results = complete(tiny, asked, 2, {"sampling": hot})
    assert [prompts for prompts, _ in calls] == [
        ["a b c d", "a b c"],
        ["a b", "a"],
        ["a b c d e"],
    ]
    assert [options["seeds"] for _, options in calls] == [[10, 13], [12, 11], [14]]
    for index, result in enumerate(results):
        alone = mpjax.generate(
            tiny, prompts[index], max_new_tokens=limits[index], sampling=hot, seeds=[10 + index]
        )
        assert result["id"] == index
        assert result["text"] == alone.text[0]
        assert result["tokens"] == alone.tokens[0]
        assert result["logprobs"] == pytest.approx(alone.logprobs[0], abs=1e-5)
        assert result["prompt_tokens"] == alone.prompt_tokens[0]


def test_a_stop_string_is_a_reason_to_finish(tiny):
    [plain] = complete(tiny, [request(1, "def f", 20)], 1, {})
    [stopped] = complete(tiny, [request(1, "def f", 20)], 1, {"stop": plain["text"][3:5]})
    assert (plain["finish_reason"], stopped["finish_reason"]) == ("length", "stop")
    assert plain["text"].startswith(stopped["text"])


def test_all_requests_are_looked_at_before_the_first_is_generated(tiny, calls):
    with pytest.raises(ValueError, match="line 2 is empty"):
        complete(tiny, [request(1, "a"), request(2, "")], 1, {})
    assert calls == []


def test_a_group_that_does_not_fit_says_what_helps(tiny, monkeypatch):
    def generate(*arguments, **options):
        raise DeviceMemoryError("a cache needs 9 GB: choose a lower precision")

    monkeypatch.setattr(mpjax, "generate", generate)
    with pytest.raises(DeviceMemoryError, match="lower precision, or a smaller --batch than 2"):
        complete(tiny, [request(1, "a"), request(2, "b")], 8, {})


def test_the_summary_counts_tokens():
    results = [{"prompt_tokens": 1000, "tokens": [1, 2]}, {"prompt_tokens": 2, "tokens": [1]}]
    line = summary(results, time.perf_counter())
    assert line == "2 prompts, 1,002 tokens, 3 new: 0.0 s with compiling"
