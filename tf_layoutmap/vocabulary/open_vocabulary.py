"""`OpenVocabulary`: how a table takes ids as they come.

Pure: numbers and names, checked.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable
from typing import Any, cast

from tf_layoutmap._core import checks
from tf_layoutmap.vocabulary import bucket_layout

ADMISSIONS = ("all", "count", "probability")
EVICTIONS = ("none", "lru", "lfu")
UNKNOWN = ("zeros", "row")
ON_FULL = ("evict", "error")
_INT32_MAX = 2**31 - 1


class _NotSaved:
    """A callable that `dataclasses.asdict` leaves out, which copies deeply.

    What is saved of settings are plain values.
    """

    def __init__(self, call: Callable[[Any], Any]):
        self._call = call

    def __call__(self, evicted: Any) -> Any:
        return self._call(evicted)

    def __repr__(self) -> str:
        return repr(self._call)

    def __deepcopy__(self, memo: Any) -> None:
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class OpenVocabulary:
    """How a table takes ids as they come, instead of rows.

    Ids are keys: any int64 but -2^63, or strings. A key gets a row in the
    training step that has it first, if the vocabulary admits it, and keeps it
    until another key needs it more. Its first values are a function of `seed`,
    the table's name, the key and the column, so that a key which comes back
    starts as it first did. Steps that do not train change nothing.

    >>> import tf_layoutmap as tlm
    >>> words = tlm.OpenVocabulary(
    ...     1000, admission="count", min_count=3, evict="lru")
    >>> words.num_rows
    1025

    A key has 32 places, so that a table takes about three quarters of its
    capacity before the first key finds all of them taken; from then on keys
    give their rows away, by `evict`. Strings are hashed to 63 bits, in
    training and in serving: among a hundred million of them, two have one
    hash with a chance of 5e-4.

    Attributes:
      capacity: How many keys it shall hold, in [1, 2^32 - 4096]; rounded up to
        whole buckets of 8, of large tables to a multiple of 512.
      min_count: With `admission="count"`: how often a key must have been seen
        before it gets a row, in [1, 255]. Ids without a row are counted in a
        sketch, separately in up to 64 segments of the table. Whenever a
        segment has counted a window of ids (as many as it has rows, at least
        128), its counts go down by one. So a key that is seen n times while
        its segment counts N ids has a row if `n - ceil(N / window) >=
        min_count`; if all of them are within a window, one time more than
        `min_count` is always enough. Any key that is seen more than once in
        each window gets a row in the end, whatever `min_count` and
        `capacity`. Keys that share cells of the sketch are counted too often:
        of keys seen once, fewer than one in ten count as seen twice.
      admission: `"all"`: each new key gets a row. `"count"`: once it was seen
        `min_count` times, of which those of one step count together.
        `"probability"`: by a chance of `probability`, anew in each step.
      probability: In [0, 1].
      evict: Whose row a new key gets when its places are taken: `"lru"`: that
        of the key that was used longest ago; `"lfu"`: of the key that was used
        least; `"none"`: nobody's. Rows that a step in flight uses stay.
      half_life_steps: With `"lfu"`: after so many steps without a use, the
        count of a key is halved. None: counts stay.
      ttl_steps: A key that was not used for more steps gives its row away
        first, with every `evict`. None: keys do not expire.
      unknown: What a key without a row looks up: `"zeros"`, or `"row"`, one
        row that all of them share and train.
      on_full: `"evict"`: by `evict`; a key that finds no place is unknown.
        `"error"`: a step with a key that finds no place is refused, and
        changes nothing; `evict` must be `"none"`.
      seed: Of first values and of chance, an integer of 64 bits.
      on_evict: Is given the keys that go, with their rows and slot variables,
        before other keys get these: a callable of `EvictedKeys`, called in
        `enqueue`, `evict`, `evict_expired` and `resize`. If it raises, that
        call raises and changes nothing: `enqueue` leaves no step, keys keep
        their rows. Or a path: each time a record is added to `{path}-00000`,
        a `tf.train.Example` with `table`, `keys`, `rows` (flat) and
        `slot/{name}`; a program that starts again, or whose file could not be
        written, begins the next file. Keras saves a path, and no callable.
      num_rows: Rows of the table: 8 for each bucket, and that of unknown keys.
    """

    capacity: int
    _: dataclasses.KW_ONLY
    min_count: int = 1
    admission: str = "all"
    probability: float = 1.0
    evict: str = "lru"
    half_life_steps: int | None = None
    ttl_steps: int | None = None
    unknown: str = "zeros"
    on_full: str = "evict"
    seed: int = 0
    on_evict: Callable[[Any], Any] | str | os.PathLike[str] | None = None

    def __post_init__(self):
        """Checks the settings.

        Raises:
          TypeError: If a number is none, or `on_evict` neither a callable nor
            a path.
          ValueError: If a setting is outside of what it may be, or does not
            go with another.
        """
        bucket_layout.num_buckets_for(self.capacity)
        checks.check_int("min_count", self.min_count, lowest=1, highest=255)
        checks.check_one_of("admission", self.admission, ADMISSIONS)
        checks.check_one_of("evict", self.evict, EVICTIONS)
        checks.check_one_of("unknown", self.unknown, UNKNOWN)
        checks.check_one_of("on_full", self.on_full, ON_FULL)
        for name in ("half_life_steps", "ttl_steps"):
            if getattr(self, name) is not None:
                checks.check_int(
                    name, getattr(self, name), lowest=1, highest=_INT32_MAX
                )
        checks.check_int("seed", self.seed, lowest=-(2**63), highest=2**63 - 1)
        if (
            isinstance(self.probability, bool)
            or not isinstance(self.probability, numbers.Real)
            or not 0 <= self.probability <= 1
        ):
            raise ValueError(
                checks.message(
                    "probability", "a number in [0, 1]", self.probability
                )
            )
        self._check_pairs()
        on_evict: Any = self.on_evict
        if isinstance(on_evict, os.PathLike):
            on_evict = os.fspath(cast("os.PathLike[str]", on_evict))
        elif callable(on_evict) and not isinstance(on_evict, _NotSaved):
            on_evict = _NotSaved(on_evict)
        elif not (on_evict is None or isinstance(on_evict, str | _NotSaved)):
            raise TypeError(
                checks.message(
                    "on_evict", "a callable, a path or None", on_evict
                )
            )
        object.__setattr__(self, "on_evict", on_evict)

    def _check_pairs(self):
        """Refuses settings that another one makes meaningless."""
        for name, default, needs in (
            ("min_count", 1, ("admission", "count")),
            ("probability", 1.0, ("admission", "probability")),
            ("half_life_steps", None, ("evict", "lfu")),
        ):
            other, wanted = needs
            if getattr(self, name) != default and (
                getattr(self, other) != wanted
            ):
                raise ValueError(
                    checks.message(
                        name,
                        f"left out unless {other}={wanted!r}",
                        getattr(self, name),
                        f"{other}={getattr(self, other)!r}",
                    )
                )
        if self.on_full == "error" and self.evict != "none":
            raise ValueError(
                checks.message(
                    "evict",
                    '"none" with on_full="error", which lets no key go',
                    self.evict,
                )
            )

    @property
    def num_buckets(self) -> int:
        """Buckets of 8 keys."""
        return bucket_layout.num_buckets_for(self.capacity)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return bucket_layout.KEYS_PER_BUCKET * self.num_buckets + 1

    @property
    def has_sketch(self) -> bool:
        """Whether keys without a row are counted."""
        return self.admission == "count"

    def policy(self) -> dict[str, Any]:
        """Returns what the ops are told (docs/ops.md, "Open vocabularies")."""
        return {
            "admission": self.admission,
            "evict": self.evict,
            "policy": [
                self.min_count,
                int(self.probability * 2**32),
                self.half_life_steps or 0,
                self.ttl_steps or 0,
                int(self.on_full == "error"),
                self.seed,
            ],
        }
