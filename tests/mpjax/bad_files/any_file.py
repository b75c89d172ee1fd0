"""Faults that any file of a checkpoint may have."""

from __future__ import annotations

from pathlib import Path

from tests.mpjax.bad_files.ways import (
    DEEP,
    INDEX,
    POINTER,
    REMOVED,
    Case,
    Way,
    as_folder,
    edit,
    link,
    pipe,
    sharded,
    steps,
    text,
    without,
)

JSON_OF_TEXT = (
    *("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    "chat_template.json",
)
TEXTS = ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja")


def reading(name: str) -> Way:
    """The changes without which a file is not read."""
    if name == INDEX:
        return sharded
    if name == "special_tokens_map.json":
        return edit("tokenizer_config.json", added_tokens_decoder=REMOVED)
    if name == "chat_template.json":
        return without("chat_template.jinja")
    return text(name, "") if name.startswith("additional") else steps()


def misplaced(name: str, shown: str | None = None) -> list[Case]:
    """Things that are no regular file, in the place of a file."""
    shown = shown or name.rpartition("/")[2]
    ways = [
        ("pipe", pipe(name), f"{shown} is a named pipe: expected a regular file"),
        ("folder", as_folder(name), f"{shown} is a folder: expected a regular file"),
        ("device", link(name, "/dev/zero"), f"{shown} is a device: expected a regular file"),
        ("link to itself", link(name, shown), f"{shown} can't be read: Too many levels"),
        ("link to nothing", link(name, "gone"), f"{shown} is a link to gone, which does not exist"),
        ("unreadable", link(name, "/proc/self/mem"), f"{shown} can't be read: Input/output error"),
    ]
    return [(f"{name}: {kind}", steps(reading(name), way), said) for kind, way, said in ways]


def unreadable(name: str) -> list[Case]:
    """Files that are no text of reasonable size."""
    shown = name.rpartition("/")[2]
    ways = [
        ("git-lfs", text(name, POINTER), f"{shown} is a git-lfs pointer, not the file itself: run"),
        ("web page", text(name, "<!DOCTYPE html>"), f"{shown} is a web page, not the file itself"),
        ("latin-1", text(name, b'"\xe9"'), f"{shown} is not a text in UTF-8: byte 1 is 0xe9"),
        ("utf-16", text(name, '"e"'.encode("utf-16")), f"{shown} is not a text in UTF-8: byte 0"),
        ("huge", grown(name), f"{shown} has 1099511627776 bytes: expected at most"),
    ]
    return [(f"{name}: {kind}", steps(reading(name), way), said) for kind, way, said in ways]


def unparsable(name: str) -> list[Case]:
    """Files that are no JSON object."""
    ways = [
        ("empty", "", "is not valid JSON: Expecting value"),
        ("cut", '{"a": ', "is not valid JSON: Expecting value"),
        ("list", "[]", "is a JSON list: expected an object"),
        ("null", "null", "is a JSON NoneType: expected an object"),
        ("deep lists", DEEP, "is nested deeper than 64 levels"),
        ("deep objects", '{"a":' * 70 + "1" + "}" * 70, "is nested deeper than 64 levels"),
        ("two values", '{"a": 1, "a": 2}', "names 'a' twice, with two values"),
        ("half a pair", r'{"a": "x\ud83dy"}', r"has '\ud83d' in a string, half of a surrogate"),
        ("endless number", f'{{"a": {"9" * 5000}}}', "Exceeds the limit (4300 digits)"),
    ]
    return [
        (f"{name}: {kind}", steps(reading(name), text(name, content)), f"{name} {said}")
        for kind, content, said in ways
    ]


def grown(name: str) -> Way:
    """A file of a terabyte, which takes no space: all but its beginning is a hole."""

    def make(folder: Path) -> None:
        with open(folder / name, "ab") as stream:
            stream.truncate(2**40)

    return make
