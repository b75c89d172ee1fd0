from __future__ import annotations

from mpjax.kernels import files


class Refused(ValueError):
    """A class that the functions don't know."""


def test_an_object_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"größe": [1, {"b": null}], "x": 1e3}', encoding="utf-8")
    assert files.read_object(path, Refused) == {"größe": [1, {"b": None}], "x": 1000.0}
    (tmp_path / "link").symlink_to("a.json")
    assert files.read_object(tmp_path / "link", Refused)["x"] == 1000


def test_a_mark_of_the_byte_order_is_no_part_of_an_object_and_one_of_a_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}\r\n', encoding="utf-8-sig")
    assert files.read_object(path, Refused) == {"a": 1}
    assert files.read_text(path, Refused) == '\ufeff{"a": 1}\r\n'
