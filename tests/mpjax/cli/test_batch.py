from __future__ import annotations

import pytest

import mpjax
from mpjax.cli.batch import complete
from mpjax.cli.requests import Request
from mpjax.cli.unfinished import Unfinished


def request(number, prompt, max_new_tokens=4, seed=0):
    return Request(number, prompt, max_new_tokens, seed, f"line {number}")


def test_results_keep_the_order_of_requests(tiny):
    prompts = ["a b c d", "a", "a b", "a b c", "a b c d e"]
    limits = [14, 4, 4, 4, 2]
    hot = mpjax.Sampling(temperature=1.0)
    asked = [request(index, prompts[index], limits[index], 10 + index) for index in range(5)]
    results = complete(tiny, asked, {"slots": 2}, {"sampling": hot})
    for index, result in enumerate(results):
        alone = mpjax.generate(
            tiny, prompts[index], max_new_tokens=limits[index], sampling=hot, seeds=[10 + index]
        )
        assert result["id"] == index
        assert result["text"] == alone.text[0]
        assert result["tokens"] == alone.tokens[0]
        assert result["logprobs"] == pytest.approx(alone.logprobs[0], abs=1e-5)
        assert result["prompt_tokens"] == alone.prompt_tokens[0]


def test_all_requests_are_looked_at_before_the_first_is_generated(tiny, monkeypatch):
    monkeypatch.setattr(mpjax, "Engine", None)
    with pytest.raises(ValueError, match="line 2 is empty"):
        complete(tiny, [request(1, "a"), request(2, "")], {"slots": 1}, {})


def test_an_interrupted_run_goes_on(tiny, tmp_path, monkeypatch):
    """With the results that it had, and in the same order."""
    asked = [request(number, "a b", 2 + number) for number in range(4)]
    expected = complete(tiny, asked, {"slots": 2}, {})
    kept = Unfinished(tmp_path / "out.jsonl", "job")

    def add(number, result):
        keep(number, result)
        if len(kept.path.read_text().splitlines()) == 3:
            raise KeyboardInterrupt

    keep = kept.add
    monkeypatch.setattr(kept, "add", add)
    with pytest.raises(KeyboardInterrupt):
        complete(tiny, asked, {"slots": 2}, {}, kept)
    kept.close(is_done=False)
    again = Unfinished(tmp_path / "out.jsonl", "job")
    assert len(again.results) == 2
    again.results[0]["text"] = "kept"
    found = complete(tiny, asked, {"slots": 2}, {}, again)
    assert found[0]["text"] == "kept"
    assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
    again.close(is_done=False)
    found[0]["text"] = expected[0]["text"]  # which the file still has
    last = Unfinished(tmp_path / "out.jsonl", "job")
    monkeypatch.setattr(mpjax, "Engine", None)  # nothing is left to generate
    assert complete(tiny, asked, {"slots": 2}, {}, last) == found
    last.close(is_done=True)
