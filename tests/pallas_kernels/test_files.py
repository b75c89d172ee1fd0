from __future__ import annotations

import os

import pytest

from mpjax.kernels import files


class Refused(ValueError):
    """A class that the functions don't know."""


def refuses(message):
    return pytest.raises(Refused, match=message)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "x is a named pipe: expected a regular file"),
        (os.mkdir, "x is a folder: expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "x is a device: expected a regular file"),
        (lambda path: path.symlink_to("x"), "x can't be read: Too many levels of symbolic links"),
        (lambda path: path.symlink_to("gone"), "x is a link to gone, which does not exist: fetch"),
        (lambda path: path.symlink_to("/proc/self/mem"), "x can't be read: Input/output error"),
        (lambda path: None, "x can't be read: No such file or directory"),
        (
            lambda path: (path.parent / "x").write_bytes(b"a\xff"),
            "x is not a text in UTF-8: byte 1",
        ),
    ],
)
def test_what_is_no_file_or_no_text(make, message, tmp_path):
    make(tmp_path / "x")
    with refuses(message):
        files.read_text(tmp_path / "x", Refused)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "x is a git-lfs pointer, not the file",
        ),
        (
            b"<!DOCTYPE html><html>",
            "x is a web page, not the file itself: fetch it by its download",
        ),
        (b'<html lang="en">', "x is a web page"),
    ],
)
def test_what_stands_in_the_place_of_a_file(start, message, tmp_path):
    with refuses(message):
        files.require_content(start, tmp_path / "x", Refused)
    files.require_content(b"{" + start, tmp_path / "x", Refused)


def nested(levels):
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^here is not valid JSON: Expecting value: line 1 column 1 \(char 0\)$"),
        ("[1]", "^here is a JSON list: expected an object$"),
        (nested(files.MAXIMUM_DEPTH + 1), "^here is nested deeper than 64 levels: expected a fl"),
        ("[" * 99_999, "^here is nested deeper than 64 levels"),
        ('{"a": [' + "[" * 64 + "]" * 65 + "}", "^here is nested deeper than 64 levels"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "^here names 'c' twice, with two values$"),
        (r'{"\ud83d": 1}', r"^here has '\\ud83d' in a string, half of a surrogate pair: expected"),
        (r'{"a": ["\ude00\ud83d"]}', r"^here has '\\ude00' in a string"),
        ('{"a": ' + "1" * 4301 + "}", r"^here Exceeds the limit \(4300 digits\)"),
    ],
)
def test_what_is_no_object(text, message):
    with refuses(message):
        files.parse_object(text, "here", Refused)
