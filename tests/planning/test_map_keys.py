"""Tests the keys of planned layout maps."""

import re

import pytest

from tf_layoutmap.planning import map_keys


def block(number, *names):
    return [[f"layers.{number}.{name}.kernel"] for name in names]


def test_repeated_layers_share_the_end_of_their_names():
    names = [*block(0, "up", "down"), *block(1, "up", "down")]
    assert map_keys.keys_of_roles([[0, 2], [1, 3]], names) == {
        0: ".*up.kernel",
        2: ".*up.kernel",
        1: ".*down.kernel",
        3: ".*down.kernel",
    }


def test_a_key_has_more_segments_if_the_end_also_matches_other_weights():
    names = [
        ["encoder.0.up.kernel"],
        ["encoder.1.up.kernel"],
        ["decoder.0.up.kernel"],
        ["decoder.1.up.kernel"],
    ]
    found = map_keys.keys_of_roles([[0, 1], [2, 3]], names)
    assert found == {
        0: r"encoder.\d+.up.kernel",
        1: r"encoder.\d+.up.kernel",
        2: r"decoder.\d+.up.kernel",
        3: r"decoder.\d+.up.kernel",
    }


def test_weights_with_different_ends_have_separate_keys():
    names = [["a.query.kernel"], ["a.key.kernel"], ["b.query.kernel"]]
    names.append(["b.value.kernel"])
    assert map_keys.keys_of_roles([[0, 1, 2]], names) == {
        0: ".*query.kernel",
        2: ".*query.kernel",
        1: "a.key.kernel",
    }


def test_a_single_weight_has_its_name_as_key():
    names = [["words.embeddings"], ["words.embeddings_2"]]
    assert map_keys.keys_of_roles([[0], [1]], names) == {
        0: "words.embeddings",
        1: "words.embeddings_2",
    }


def test_special_characters_are_escaped():
    names = [["a+b(c).kernel"], ["aab.kernel"]]
    (key,) = map_keys.keys_of_roles([[0]], names).values()
    assert key == r"a\+b\(c\)\.kernel$"
    assert re.match(key, names[0][0])


NAMES = {
    "numbers": [f"dense{end}.kernel" for end in ("", "_1", "_2", "_10")],
    "prefixes": ["a.kernel", "ba.kernel", "cba.kernel", "a.kernel_2"],
    "depths": ["kernel", "x.kernel", "x.x.kernel", "y.x.kernel"],
    "blocks": [f"b.{i}.{n}.w" for i in (0, 1, 10) for n in ("q", "k")],
}


@pytest.mark.parametrize("kind", NAMES)
def test_keys_match_their_weights_only(kind):
    names = [[name] for name in NAMES[kind]]
    for split in range(1, len(names)):
        roles = [[*range(split)], [*range(split, len(names))]]
        found = map_keys.keys_of_roles(roles, names)
        assert found.keys() == {*range(len(names))}
        for role in roles:
            keys = {found[weight] for weight in role}
            for weight, (name,) in enumerate(names):
                # A plain name as a key matches a weight with this name only.
                matching = [
                    key
                    for key in keys
                    if key == name
                    or (key not in NAMES[kind] and re.match(key, name))
                ]
                assert bool(matching) == (weight in role), (name, keys)


def test_the_preferred_name_is_unique_and_has_dots():
    names = [["kernel", "m/d/kernel", "d.kernel"], ["kernel", "e/kernel"]]
    assert map_keys.preferred_first(names) == [
        ["d.kernel", "kernel", "m/d/kernel"],
        ["e/kernel", "kernel"],
    ]
    assert map_keys.without_own_name(names) == frozenset()
    assert map_keys.without_own_name([["a"], ["a", "b"]]) == {0}


@pytest.mark.parametrize(
    "names, name",
    [
        ([["words.embeddings"]], "words"),
        ([["b.up.kernel", "b.down.kernel"]], "b"),
        ([["one.kernel", "two.kernel"]], "one.kernel"),
        ([["b_0.up.kernel"], ["b_1.up.kernel"]], "b_*.up"),
        ([["layers.0.w"], ["layers.1.w"]], "layers.*"),
        ([["a.x.w"], ["b.y.z.w"]], "a.x"),
        ([["kernel"]], "kernel"),
    ],
)
def test_names_of_items(names, name):
    assert map_keys.name_of_item(names) == name
