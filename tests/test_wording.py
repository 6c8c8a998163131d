"""Numbers and lists inside sentences."""

from __future__ import annotations

from pefll.wording import counted, first_few


def test_one_thing_and_more():
    assert [counted(number, "client") for number in (0, 1, 2, 12_000)] == [
        "0 clients",
        "1 client",
        "2 clients",
        "12,000 clients",
    ]
    assert counted(1, "class") == "1 class"
    assert counted(3, "class") == "3 classes"


def test_the_first_few_names():
    assert first_few([]) == ""
    assert first_few(["ann"]) == "ann"
    assert first_few(["ann", "bob"]) == "ann and bob"
    assert first_few([1, 2, 3]) == "1, 2 and 3"
    assert first_few(range(6)) == "0, 1, 2, 3, 4 and 5"
    assert first_few(range(7)) == "0, 1, 2, 3, 4 and 2 more"
    assert first_few(range(2000), most=2) == "0, 1 and 1,998 more"
