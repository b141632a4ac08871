"""Readable keys of a layout map for groups of weights, without TensorFlow."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

# A number at the end of the name of a layer, or a number as an index.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|(?<=_)\d+\b")


def without_own_name(names: Sequence[Sequence[str]]) -> frozenset[int]:
    """Returns the weights of which every name also belongs to another weight.

    >>> without_own_name([["a.kernel"], ["a.kernel"], ["b.kernel"]])
    frozenset({0, 1})
    """
    count = Counter(name for several in names for name in {*several})
    return frozenset(
        i
        for i, several in enumerate(names)
        if all(count[name] > 1 for name in several)
    )


def preferred_first(
    names: Sequence[Sequence[str]],
) -> list[list[str]]:
    """Returns the names of each weight, with the most readable one first.

    A name that no other weight has is preferred, then a name with dots.

    >>> preferred_first([["query.kernel", "a/query/kernel", "a.query.kernel"],
    ...                  ["query.kernel", "b/query/kernel"]])
    [['a.query.kernel', 'query.kernel', 'a/query/kernel'], \
['b/query/kernel', 'query.kernel']]
    """
    count = Counter(name for several in names for name in {*several})
    ordered: list[list[str]] = []
    for several in names:
        first = min(several, key=lambda name: (count[name] > 1, "/" in name))
        ordered.append([first, *(name for name in several if name != first)])
    return ordered


def keys_of_roles(
    roles: Sequence[Sequence[int]], names: Sequence[Sequence[str]]
) -> dict[int, str]:
    """Returns the key of each weight.

    Args:
      roles: Lists of weights that have the same layout, such as the query
        kernels of all layers.
      names: All names of each weight of the model.

    Returns:
      A dict from the weight to a key. Weights of the same role share a key, if
      there is a short key that matches no other weight.
    """
    keys: dict[int, str] = {}
    for weights in roles:
        keys.update(_keys(weights, names))
    return keys


def _keys(
    weights: Sequence[int], names: Sequence[Sequence[str]]
) -> dict[int, str]:
    if len(weights) > 1:
        pattern = _pattern(weights, names)
        if pattern is not None:
            return dict.fromkeys(weights, pattern)
        for segments in (2, None):
            parts: dict[str, list[int]] = {}
            for weight in weights:
                name = _NUMBER.sub("", names[weight][0])
                end = name.split(".")[-segments if segments else 0 :]
                parts.setdefault(".".join(end), []).append(weight)
            if len(parts) > 1:
                return {
                    weight: key
                    for part in parts.values()
                    for weight, key in _keys(part, names).items()
                }
    return {weight: _own_key(weight, names) for weight in weights}


def _own_key(weight: int, names: Sequence[Sequence[str]]) -> str:
    """Returns a name of a weight that no other weight has.

    A plain name as a key only matches a weight with this name, even if the
    name is also a prefix of other names.
    """
    others = {
        name
        for i, several in enumerate(names)
        if i != weight
        for name in several
    }
    return next(
        (
            name
            for name in names[weight]
            if name not in others and _is_plain(name)
        ),
        re.escape(names[weight][0]) + "$",
    )


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[\w./-]+", name) is not None


def _pattern(
    weights: Sequence[int], names: Sequence[Sequence[str]]
) -> str | None:
    """Returns the shortest pattern that matches exactly these weights."""
    wanted = {*weights}
    split = [names[w][0].split(".") for w in weights]
    candidates: list[str] = []
    # The last segments of the name, if they are the same in all names.
    common = 0
    while all(
        len(segments) > common
        and segments[-1 - common] == split[0][-1 - common]
        for segments in split
    ):
        common += 1
    # The name of a weight alone, such as "kernel", is not a readable key.
    for length in range(min(2, common), common + 1):
        end = ".".join(re.escape(s) for s in split[0][-length:])
        candidates.append(f".*{end}")
        candidates.append(f".*{end}$")
        candidates.append(rf".*\b{end}$")
    # The full name, in which only numbers differ.
    general = {_NUMBER.sub(r"\0", names[w][0]) for w in weights}
    if len(general) == 1:
        parts = [re.escape(p) for p in general.pop().split("\0")]
        joined = r"\d+".join(p.replace(r"\.", ".") for p in parts)
        candidates += [joined, joined + "$"]
    # The end of the name, in which only numbers differ, also if the names of
    # the outer layers differ.
    templates = [_NUMBER.sub("\0", names[w][0]) for w in weights]
    end = _common_end(templates)
    for start in reversed(range(len(end))):
        part = end[start:]
        if (
            part.count(".") + part.count("/") < 1
            or part[0] == "\0"
            or not _starts_word(part, templates)
        ):
            continue
        escaped = r"\d+".join(re.escape(p) for p in part.split("\0"))
        escaped = escaped.replace(r"\.", ".")
        candidates += [f".*{escaped}", f".*{escaped}$"]
    optional = {re.sub(r"_\d+(?=\.)", "", names[w][0]) for w in weights}
    if len(optional) == 1:
        first, _, rest = optional.pop().rpartition(".")
        for pattern in (rf"{re.escape(first)}(_\d+)?.{re.escape(rest)}",):
            candidates += [pattern, pattern + "$"]
    for pattern in candidates:
        if _matches(pattern, names) == wanted:
            return pattern
    return None


def _starts_word(end: str, names: Sequence[str]) -> bool:
    """Returns whether an end of several names does not start inside a word.

    >>> _starts_word("y.kernel", ["query.kernel", "key.kernel"])
    False
    >>> _starts_word("key.kernel", ["a.key.kernel", "key.kernel"])
    True
    """
    return end[0] in "._/" or all(
        len(name) == len(end) or name[-len(end) - 1] in "._/" for name in names
    )


def _common_end(names: Sequence[str]) -> str:
    """Returns the longest common end of several names.

    >>> _common_end(["a_attention.key", "b_attention.key"])
    '_attention.key'
    """
    end = ""
    for characters in zip(*(reversed(name) for name in names)):
        if len({*characters}) > 1:
            break
        end = characters[0] + end
    return end


def _matches(pattern: str, names: Sequence[Sequence[str]]) -> set[int]:
    compiled = re.compile(pattern)
    return {
        i
        for i, several in enumerate(names)
        if any(name == pattern or compiled.match(name) for name in several)
    }


def name_of_item(names: Sequence[Sequence[str]]) -> str:
    """Returns the name of an item from the names of its weights.

    >>> name_of_item([["words.embeddings"]])
    'words'
    >>> name_of_item([["layers.0.mlp.up.kernel", "layers.0.mlp.down.kernel"],
    ...               ["layers.1.mlp.up.kernel", "layers.1.mlp.down.kernel"]])
    'layers.*.mlp'

    Args:
      names: Names of the weights of each of the repeated groups.
    """
    prefixes = [_common([n.split(".")[:-1] for n in group]) for group in names]
    first = prefixes[0]
    if any(len(prefix) != len(first) for prefix in prefixes):
        return ".".join(first) or names[0][0]
    joined = [
        segments[0] if len({*segments}) == 1 else _starred(segments)
        for segments in zip(*prefixes)
    ]
    return ".".join(joined) or names[0][0]


def _starred(segments: Sequence[str]) -> str:
    general = {re.sub(r"_?\d+$", "", s) for s in segments}
    if len(general) == 1:
        stem = general.pop()
        return f"{stem}_*" if stem else "*"
    return "*"


def _common(split: Sequence[Sequence[str]]) -> list[str]:
    common: list[str] = []
    for segments in zip(*split):
        if len({*segments}) > 1:
            break
        common.append(segments[0])
    return common
