"""Which names a function has made itself: sure, or not said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from txstore.train.in_place import own_names


def constants(given: Any) -> Any:
    first, second = 0, 1
    third = fourth = 0.5
    fifth, sixth, seventh, eighth = 1, 2, 3, 4
    text, numbers = "", [1, 2, 3]
    first += given
    numbers += given
    return first, second, third, fourth, fifth, sixth, seventh, eighth, text, numbers


def literals(given: Any) -> Any:
    empty, both, named, told = [], [*given, given], {"a": given}, f"{given}{given}"
    plain = {}
    few = [given]
    return empty, both, named, told, plain, few


def others(given: Any, other: Any = (), *more: Any) -> Any:
    given += 1
    one = given or []
    two = [] if given else other
    three = other if given else []
    (four, five) = [given, 1]
    six = seven = given
    eight = 0
    eight = given
    nine, ten = given, 0
    (eleven := given).count(0)
    for twelve in (0, 1):
        given.append(twelve)
    with given as thirteen:
        fourteen = [0][0]
    fifteen, *sixteen = given, 0
    sixteen.clear()
    more += (1,)
    eighteen = 0 if given else given
    return (
        one,
        two,
        three,
        four,
        five,
        six,
        seven,
        eight,
        nine,
        ten,
        eleven,
        thirteen,
        fourteen,
        fifteen,
        eighteen,
    )


@pytest.mark.parametrize(
    ("function", "own"),
    [
        (constants, {"first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "text", "numbers"}),
        (literals, {"plain", "few"}),
        (others, set()),
    ],
)
def test_a_name_is_a_function_s_own_if_it_never_holds_anything_else(
    function: Callable[..., Any], own: set[str]
) -> None:
    found = own_names(function.__code__)
    assert found >= own
    unsure = {"empty", "both", "named", "told", "ten", "twelve", "sixteen"}
    assert found - own <= unsure, "sound, though nobody needs to see it"
