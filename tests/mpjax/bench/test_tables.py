from __future__ import annotations

from mpjax.bench import tables

HEADERS = ("format", "µs", "GB/s")


def test_cells_are_empty_where_a_row_lacks_a_value():
    columns = {
        "name": "{name}",
        "µs": tables.scaled("{:.1f}", "seconds", 1e6),
        "most": "{gap[most]:.0f} s",
        "own": lambda row: row["name"] * 2,
    }
    rows = [
        {"name": "a", "seconds": 2e-6, "gap": {"most": 3}},
        {"name": "b", "seconds": None, "gap": None},
        {"name": "c"},
    ]
    headers, lines = tables.table(columns, rows)
    assert headers == [*columns]
    assert lines == [["a", "2.0", "3 s", "aa"], ["b", "", "", "bb"], ["c", "", "", "cc"]]


def test_markdown_leaves_out_empty_columns():
    rows = iter([["a", "1", ""], ["b", "3", ""]])
    assert tables.markdown(HEADERS, rows) == (
        "| format | µs |\n| --- | ---: |\n| a | 1 |\n| b | 3 |\n"
    )


def test_a_growing_table_has_its_headers_before_the_first_row():
    table = tables.Growing(HEADERS)
    assert table.add(["a" * 12, "1", ""]) == (
        "format                µs        GB/s\naaaaaaaaaaaa           1\n"
    )
    assert table.add(["b", "1234567890123", "2"]) == "b             1234567890123           2\n"
    table = tables.Growing(HEADERS[:2], is_markdown=True)
    assert table.add(["a", "1"]) == "| format | µs |\n| --- | ---: |\n| a | 1 |\n"
    assert table.add(["b", "2"]) == "| b | 2 |\n"
