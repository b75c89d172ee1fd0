from __future__ import annotations

import pytest

from mpjax.cli.unfinished import Unfinished, job_name

pytestmark = pytest.mark.any_version


def results_of(target):
    kept = Unfinished(target, "job")
    kept.close(is_done=False)
    return kept.results


def test_results_are_kept_until_the_end(tmp_path):
    target = tmp_path / "out.jsonl"
    first = Unfinished(target, "job")
    assert first.results == {}
    first.close(is_done=False)
    assert not list(tmp_path.iterdir())
    first = Unfinished(target, "job")
    first.add(2, {"text": "ä"})
    first.add(0, {"text": "b"})
    first.close(is_done=False)
    second = Unfinished(target, "job")
    assert second.results == {2: {"text": "ä"}, 0: {"text": "b"}}
    second.add(1, {"text": "c"})
    second.close(is_done=True)
    assert not list(tmp_path.iterdir())


def test_a_line_that_was_not_finished_is_left_out(tmp_path):
    target = tmp_path / "out.jsonl"
    first = Unfinished(target, "job")
    first.add(0, {"text": "a"})
    first.close(is_done=False)
    with first.path.open("a") as file:
        file.write('{"number": 1, "result": {"te')
    second = Unfinished(target, "job")
    assert second.results == {0: {"text": "a"}}
    second.add(1, {"text": "b"})
    second.close(is_done=False)
    assert results_of(target) == {0: {"text": "a"}, 1: {"text": "b"}}


@pytest.mark.parametrize("text", ["", "null", "[1]", "{", '{"job": "other"}', "\x00\xff"])
def test_another_job_begins_anew(tmp_path, text):
    target = tmp_path / "out.jsonl"
    first = Unfinished(target, "job")
    first.close(is_done=False)
    first.path.write_text(text + '\n{"number": 0, "result": {"text": "a"}}\n')
    assert results_of(target) == {}


def test_two_processes_do_not_share_an_output(tmp_path):
    target = tmp_path / "out.jsonl"
    first = Unfinished(target, "job")
    first.add(0, {"text": "a"})
    with pytest.raises(ValueError, match=r"out\.jsonl is the output of another process, which is"):
        Unfinished(target, "job")
    first.add(1, {"text": "b"})
    first.close(is_done=False)
    assert results_of(target) == {0: {"text": "a"}, 1: {"text": "b"}}


def test_names_of_jobs():
    assert job_name("a", [1]) == job_name("a", [1]) != job_name("a", [2])
