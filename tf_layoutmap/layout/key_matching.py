"""Matches variable names with stored patterns, without TensorFlow.

A key is the name of a variable. A pattern is a stored entry of a layout map: a
plain name or a regular expression.
"""

import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from tf_layoutmap._core import checks

# "match" requires a match at the start of the key, as in tf.keras.dtensor.
# "search" accepts a match anywhere in the key, as the documentation of
# keras.distribution describes. "fullmatch" requires that the full key matches,
# as the implementation of keras.distribution does.
MODES = ("match", "search", "fullmatch")


class Match(NamedTuple):
    """The key of a layout map that selects the layout of a variable.

    `LayoutMap.find` returns a match, or None if no key matches.

    Attributes:
      pattern: The selected key of the layout map.
      key: The name of the variable that the pattern matches.
      shadowed: Keys that also match, but do not have precedence.
    """

    pattern: str
    key: str
    shadowed: tuple[str, ...] = ()


class PatternTable:
    """A list of patterns, in the order in which they were added.

    >>> table = PatternTable(["d1.kernel", "d.*"])
    >>> table.find(["d1.kernel"])
    Match(pattern='d1.kernel', key='d1.kernel', shadowed=('d.*',))
    >>> table.find(["d2.bias"])
    Match(pattern='d.*', key='d2.bias', shadowed=())
    >>> table.find(["out.kernel"]) is None
    True
    """

    def __init__(self, patterns: Iterable[str] = (), *, mode: str = "match"):
        """Initializes the table.

        Args:
          patterns: Patterns to add, in this order.
          mode: One of `MODES`.
        """
        self.mode = checks.check_one_of("match", mode, MODES)
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._any: re.Pattern[str] | None = None
        for pattern in patterns:
            self.add(pattern)

    def add(self, pattern: str) -> None:
        """Adds `pattern` after all other patterns.

        Raises:
          TypeError: If `pattern` is not a string.
          ValueError: If `pattern` exists already or is not a valid regular
            expression.
        """
        checks.check_type("key", pattern, str, "a string")
        if pattern in self._compiled:
            raise ValueError(
                checks.message(
                    "key", "new; it already exists in the LayoutMap", pattern
                )
            )
        try:
            self._compiled[pattern] = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                checks.message(
                    "key",
                    "a regular expression; escape a plain name with "
                    f"re.escape ({error})",
                    pattern,
                )
            ) from error
        self._any = None

    def remove(self, pattern: str) -> None:
        """Removes `pattern`; raises `KeyError` if it does not exist."""
        del self._compiled[pattern]
        self._any = None

    def fits(self, pattern: str, key: str) -> bool:
        """Returns whether `pattern` matches `key`."""
        if pattern == key:
            return True
        return self._matcher(self._compiled[pattern])(key) is not None

    def _matcher(self, compiled: re.Pattern[str]) -> Callable[[str], Any]:
        return getattr(compiled, self.mode)

    def _any_pattern(self) -> re.Pattern[str]:
        """Returns a combined pattern, which matches if any pattern matches."""
        if self._any is None:
            # Patterns with groups or flags cannot be combined, because groups
            # would get other numbers, and flags would apply to all patterns.
            plain = not any(
                p.groups or p.flags != re.UNICODE
                for p in self._compiled.values()
            )
            self._any = re.compile(
                "|".join(f"(?:{p})" for p in self._compiled)
                if plain
                else "(?s:.*)"
            )
        return self._any

    def find(
        self, keys: Sequence[str], *, reserved_names: Container[str] = ()
    ) -> Match | None:
        """Returns the pattern that matches a variable with the names `keys`.

        A pattern that is equal to one of the keys has precedence. Otherwise, of
        the patterns that match one of the keys, the pattern that was added
        first is returned.

        >>> table = PatternTable(["emb/embeddings"])
        >>> table.find(["emb/embeddings_scale"],
        ...            reserved_names={"emb/embeddings"}) is None
        True

        Args:
          keys: Names of one variable, the preferred name first.
          reserved_names: Names of other variables. A pattern that is equal to
            one of these names matches only the variable with this name.

        Returns:
          The matching pattern, the key that it matches, and the shadowed
          patterns, which also match but do not have precedence. None if no
          pattern matches.
        """
        exact = next((key for key in keys if key in self._compiled), None)
        # Most variables match no pattern. Therefore, one combined pattern is
        # tried before the separate patterns.
        matches_any = self._matcher(self._any_pattern())
        keys = [key for key in keys if key == exact or matches_any(key)]
        fitting: list[tuple[str, str]] = []
        for pattern in self._compiled:
            if pattern in reserved_names and pattern not in keys:
                continue
            key = next((k for k in keys if self.fits(pattern, k)), None)
            if key is not None:
                fitting.append((pattern, key))
        if not fitting:
            return None
        pattern, key = fitting[0] if exact is None else (exact, exact)
        return Match(
            pattern,
            key,
            tuple(other for other, _ in fitting if other != pattern),
        )


def check_single_match(match: Match) -> None:
    """Raises a `ValueError` if several patterns match the key of `match`.

    If a pattern is equal to the key, no error is raised.
    """
    if match.shadowed and match.pattern != match.key:
        patterns = ", ".join(repr(p) for p in (match.pattern, *match.shadowed))
        raise ValueError(
            "In a strict LayoutMap exactly one pattern must match each key. "
            f"Received: key {match.key!r}, matched by {patterns}. Narrow the "
            "patterns, or use strict=False, which selects the first one."
        )


def check_single_match_as_keras(match: Match) -> None:
    """Raises the error of `keras.distribution.LayoutMap` for two matches."""
    if match.shadowed and match.pattern != match.key:
        raise ValueError(
            f"Path {match.key!r} matches multiple layout specification keys: "
            f"{[match.pattern, *match.shadowed]}. Please make sure each "
            "tensor/variable path only matches at most one layout "
            "specification key in the LayoutMap."
        )
