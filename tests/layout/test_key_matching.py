import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_layoutmap.layout.key_matching import (
    MODES,
    Match,
    PatternTable,
    check_single_match,
    check_single_match_as_keras,
)


def test_equal_pattern_precedes_an_earlier_match():
    table = PatternTable(["d.*", "d1.kernel"])
    assert table.find(["d1.kernel"]) == Match(
        "d1.kernel", "d1.kernel", ("d.*",)
    )


def test_first_added_pattern_precedes_later_patterns():
    table = PatternTable([".*kernel", "d.*"])
    assert table.find(["d1.kernel"]).pattern == ".*kernel"
    assert table.find(["d1.kernel"]).shadowed == ("d.*",)


def test_match_is_anchored_at_the_start_and_search_is_not():
    key = "my_model/dense_1/kernel"
    assert PatternTable(["dense.*kernel"], mode="match").find([key]) is None
    assert PatternTable(["dense.*kernel"], mode="search").find([key])


# The second pattern contains a group, which a separate code path handles.
@pytest.mark.parametrize("pattern", ["dense.*kernel", "dense.*(kernel|bias)"])
def test_fullmatch_matches_the_full_key(pattern):
    table = PatternTable([pattern], mode="fullmatch")
    assert table.find(["dense_1/kernel"]).pattern == pattern
    assert table.find(["my_model/dense_1/kernel"]) is None
    assert table.find(["dense_1/kernel_norm"]) is None


def test_pattern_may_match_any_name_of_a_variable():
    table = PatternTable(["seq/d/kernel", "d.kernel"])
    assert table.find(["d.kernel", "m/d/kernel"]).key == "d.kernel"


def test_equal_pattern_of_a_later_name_precedes_matches():
    table = PatternTable(["d.*", "m/d/kernel"])
    assert table.find(["d.kernel", "m/d/kernel"]).pattern == "m/d/kernel"


def test_removed_pattern_does_not_match():
    table = PatternTable(["a", "b"])
    table.remove("a")
    assert table.find(["a"]) is None
    with pytest.raises(KeyError):
        table.remove("a")


def test_two_matches_raise_and_name_both_patterns():
    table = PatternTable([".*kernel", "d.*"])
    with pytest.raises(
        ValueError,
        match=r"'d1.kernel', matched by "
        r"'\.\*kernel', 'd\.\*'",
    ):
        check_single_match(table.find(["d1.kernel"]))


def test_two_matches_raise_with_the_message_of_keras():
    table = PatternTable([".*kernel", "d.*"])
    with pytest.raises(
        ValueError,
        match=(
            r"Path 'd1.kernel' matches multiple layout specification keys: "
            r"\['\.\*kernel', 'd\.\*'\]"
        ),
    ):
        check_single_match_as_keras(table.find(["d1.kernel"]))


def test_equal_pattern_is_not_a_second_match():
    match = PatternTable(["d.*", "d1"]).find(["d1"])
    check_single_match(match)
    check_single_match_as_keras(match)


@pytest.mark.parametrize(
    ("pattern", "kind", "words"),
    [
        ("a(", ValueError, "re.escape"),
        (3, TypeError, "must be a string"),
        ("taken", ValueError, "already exists"),
    ],
)
def test_invalid_pattern_raises(pattern, kind, words):
    table = PatternTable(["taken"])
    with pytest.raises(kind, match=words):
        table.add(pattern)


def test_unknown_mode_raises():
    with pytest.raises(ValueError, match="match"):
        PatternTable(mode="exactly")


@given(
    patterns=st.lists(
        st.from_regex(r"[ab.*]{1,4}", fullmatch=True).filter(
            lambda p: not p.startswith("*") and "**" not in p
        ),
        unique=True,
        max_size=5,
    ),
    key=st.text("ab", min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
)
def test_find_returns_the_first_match(patterns, key, mode):
    expected = (
        key
        if key in patterns
        else next((p for p in patterns if getattr(re, mode)(p, key)), None)
    )
    found = PatternTable(patterns, mode=mode).find([key])
    assert (found and found.pattern) == expected
