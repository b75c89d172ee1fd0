from __future__ import annotations

import numpy as np
import pytest

from mpjax.bench.lengths import Lengths, read_file

pytestmark = pytest.mark.any_version


def test_fixed_uniform_and_log_normal(rng):
    assert Lengths.parse("7").draw(3, rng) == [7, 7, 7]
    uniform = Lengths.parse("5-9").draw(2000, rng)
    assert set(uniform) == {5, 6, 7, 8, 9}
    drawn = np.array(Lengths.parse("lognormal:1000:0.5:100000").draw(20_000, rng))
    assert drawn.mean() == pytest.approx(1000, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.03)
    assert max(Lengths.parse("lognormal:1000:0.8:1500").draw(500, rng)) == 1500


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0", "9-5", "1.5", "lognormal:5", "lognormal:-5:1:9", "lognormal:0:1:9"),
        *("lognormal:nan:1:9", "lognormal:5:inf:9"),
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"expected 1024, a range such as 512-2048, or lognormal"):
        Lengths.parse(text)


def test_lengths_come_from_a_file(tmp_path):
    path = tmp_path / "lengths.jsonl"
    lines = '{"prompt_tokens": 3, "new_tokens": 4}', '{"prompt_tokens": 5, "new_tokens": 6}'
    path.write_text("\n\n".join(lines))
    assert read_file(path) == [(3, 4), (5, 6)]
    for text, message in (
        ("", "has no lines"),
        ("[1]", r"line 1: expected \{"),
        ('{"prompt_tokens": 0, "new_tokens": 4}', r"line 1: \(0, 4\) are not two positive"),
        ("{", "line 1: expected"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_file(path)
