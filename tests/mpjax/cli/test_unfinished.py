from __future__ import annotations

import pytest

from mpjax.cli.unfinished import Unfinished

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
    kept = second.path.read_bytes()
    second.add(1, {"text": "b"})
    second.close(is_done=False)
    assert second.path.read_bytes().startswith(kept)  # so that no moment is bad for a kill
    assert results_of(target) == {0: {"text": "a"}, 1: {"text": "b"}}


@pytest.mark.parametrize("text", ["", "null", "[1]", "{", '{"job": "other"}', "\x00\xff"])
def test_results_of_another_job_are_discarded_only_where_asked(tmp_path, text):
    target = tmp_path / "out.jsonl"
    path = tmp_path / ".out.jsonl.unfinished"
    path.write_text(text + '\n{"number": 0, "result": {"text": "a"}}\n')
    message = r"unfinished holds 1 finished result of another command: .* or give --overwrite"
    for _ in range(2):  # the results stay
        with pytest.raises(ValueError, match=message):
            Unfinished(target, "job")
    kept = Unfinished(target, "job", discards=True)
    assert kept.results == {}
    kept.add(1, {"text": "b"})
    kept.close(is_done=False)
    assert results_of(target) == {1: {"text": "b"}}


def test_a_file_that_was_removed_before_its_lock_is_opened_again(tmp_path, monkeypatch):
    def lock(descriptor):
        if not locked:
            (tmp_path / ".out.jsonl.unfinished").unlink()
        locked.append(descriptor)
        return True

    locked = []
    monkeypatch.setattr("mpjax.checkpoint.staging.try_to_lock", lock)
    kept = Unfinished(tmp_path / "out.jsonl", "job")
    kept.add(0, {"text": "a"})
    kept.close(is_done=False)
    assert results_of(tmp_path / "out.jsonl") == {0: {"text": "a"}}


def test_two_processes_do_not_share_an_output(tmp_path):
    target = tmp_path / "out.jsonl"
    first = Unfinished(target, "job")
    first.add(0, {"text": "a"})
    with pytest.raises(ValueError, match=r"out\.jsonl is the output of another process, which is"):
        Unfinished(target, "job")
    first.add(1, {"text": "b"})
    first.close(is_done=False)
    assert results_of(target) == {0: {"text": "a"}, 1: {"text": "b"}}
