"""Which stored pattern a key selects: pure string work, no TensorFlow.

A key is the name of a variable. A pattern is what the user stored: a plain
name, or a regular expression.
"""

import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from tf_layoutmap._core import checks, lazy

# "match" starts at the beginning of the key, as tf.keras.dtensor did;
# "search" finds a pattern anywhere in it, as keras.distribution documents;
# "fullmatch" compares the whole key, as keras.distribution does.
MODES = ("match", "search", "fullmatch")


class Match(NamedTuple):
    """The pattern that a key selects, and the shadowed ones that fit too."""

    pattern: str
    key: str
    shadowed: tuple[str, ...] = ()

    losers = lazy.renamed_property("losers", "shadowed")


class PatternTable:
    """Patterns in the order they were added.

    >>> table = PatternTable(["d1.kernel", "d.*"])
    >>> table.find(["d1.kernel"])
    Match(pattern='d1.kernel', key='d1.kernel', shadowed=('d.*',))
    >>> table.find(["d2.bias"])
    Match(pattern='d.*', key='d2.bias', shadowed=())
    >>> table.find(["out.kernel"]) is None
    True
    """

    def __init__(self, patterns: Iterable[str] = (), *, mode: str = "match"):
        """Makes the table.

        Args:
          patterns: What to add, in this order.
          mode: One of `MODES`.
        """
        self.mode = checks.check_one_of("match", mode, MODES)
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._any: re.Pattern[str] | None = None
        for pattern in patterns:
            self.add(pattern)

    def add(self, pattern: str) -> None:
        """Adds `pattern` behind the others.

        Raises:
          TypeError: It is no string.
          ValueError: It is there already, or is no regular expression.
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
        """Removes `pattern`; KeyError when it is not there."""
        del self._compiled[pattern]
        self._any = None

    def fits(self, pattern: str, key: str) -> bool:
        """Whether `pattern` selects `key`."""
        if pattern == key:
            return True
        return self._try(self._compiled[pattern])(key) is not None

    def _try(self, compiled: re.Pattern[str]) -> Callable[[str], Any]:
        return getattr(compiled, self.mode)

    def _all_at_once(self) -> re.Pattern[str]:
        """Returns a pattern that fits whatever any of them fits."""
        if self._any is None:
            # Groups would be numbered anew, and flags reach beyond their own.
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
        self, keys: Sequence[str], *, names_of_others: Container[str] = ()
    ) -> Match | None:
        """Returns the pattern for a variable that has all of `keys`.

        A pattern equal to one of the keys is taken; else the first pattern,
        in the order they were added, that fits one of them.

        >>> table = PatternTable(["emb/embeddings"])
        >>> table.find(["emb/embeddings_scale"],
        ...            names_of_others={"emb/embeddings"}) is None
        True

        Args:
          keys: Names of one variable, the best first.
          names_of_others: Names of other variables. A pattern that is one of
            them means that variable and no other.

        Returns:
          The matching pattern, the key it fits, and the shadowed patterns:
          the others that fit. None when nothing does.
        """
        exact = next((key for key in keys if key in self._compiled), None)
        # Most variables match no pattern: all patterns are tried at once.
        tried = self._try(self._all_at_once())
        keys = [key for key in keys if key == exact or tried(key)]
        fitting: list[tuple[str, str]] = []
        for pattern in self._compiled:
            if pattern in names_of_others and pattern not in keys:
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
    """Raises a ValueError if several patterns match the key of `match`.

    A pattern equal to the key is always taken, whatever else matches.
    """
    if match.shadowed and match.pattern != match.key:
        patterns = ", ".join(repr(p) for p in (match.pattern, *match.shadowed))
        raise ValueError(
            f"A strict LayoutMap gives each key to one pattern. Received: key "
            f"{match.key!r}, matched by {patterns}. Narrow the patterns until "
            "one is left, or use strict=False: then the first one is taken."
        )


def check_single_match_as_keras(match: Match) -> None:
    """Raises the ValueError of `keras.distribution.LayoutMap` for two keys."""
    if match.shadowed and match.pattern != match.key:
        raise ValueError(
            f"Path {match.key!r} matches multiple layout specification keys: "
            f"{[match.pattern, *match.shadowed]}. Please make sure each "
            "tensor/variable path only matches at most one layout "
            "specification key in the LayoutMap."
        )
