"""`OpenVocabulary`, a class for the settings of an open vocabulary."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tf_layoutmap._core import checks, literals
from tf_layoutmap.vocabulary import bucket_layout

if TYPE_CHECKING:
    from tf_layoutmap.vocabulary.evicted import EvictedKeys

ADMISSIONS = ("all", "count", "probability")
EVICTIONS = ("none", "lru", "lfu")
OOV_EMBEDDINGS = ("zeros", "trainable")
ON_FULL = ("evict", "error")
_INT32_MAX = 2**31 - 1


class _NotSaved:
    """Wraps a callable so that `dataclasses.asdict` replaces it by None.

    `asdict` makes a deep copy of each value, and the deep copy of this object
    is None. Saved settings therefore contain only plain values.
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
    """Settings of a table that accepts arbitrary ids as keys.

    A key is a string, or any int64 except -2^63. A key gets a row in the first
    training step that contains the key, if the vocabulary admits the key. The
    key keeps the row until the key is evicted. The initial values of the row
    are a function of `seed`, the table's name, the key and the column. If a key
    is evicted and later gets a row again, the row therefore has the same
    initial values. Steps without training do not change the vocabulary.

    >>> import tf_layoutmap as tlm
    >>> words = tlm.vocabulary.OpenVocabulary(
    ...     1000, admission="count", min_count=3, evict="lru")
    >>> words.num_rows
    1025

    Each key has 32 possible places. Until a table is about three quarters full,
    each new key has at least one empty place. If all places of a new key are
    occupied, `evict` determines which key loses its row. Strings are hashed to
    63 bits, both in training and in serving. The probability that two of a
    hundred million strings have the same hash is 5e-4.

    Attributes:
      capacity: Number of keys, in [1, 2^32 - 4096]. The capacity is rounded up
        to complete buckets of 8 keys. For large tables, the capacity is rounded
        up to a multiple of 512.
      min_count: Number of occurrences after which a key gets a row, in [1,
        255]. Used only if `admission` is `"count"`. Ids without a row are
        counted in a sketch. The table has up to 64 segments, which count
        separately. A window is a number of counted ids: the number of rows in a
        segment, but at least 128. After each window, all counts of the segment
        decrease by one. A key that occurs n times while its segment counts N
        ids has a row if `n - ceil(N / window) >= min_count`. If all occurrences
        of a key are within one window, `min_count + 1` occurrences are always
        sufficient. A key that occurs more than once in each window eventually
        gets a row, for all values of `min_count` and `capacity`. If keys share
        cells of the sketch, their counts can be too high. Fewer than one in ten
        of the keys that occurred once have the count 2.
      admission: `"all"`: each new key gets a row. `"count"`: a key gets a row
        after `min_count` occurrences. If a key occurs several times in a step,
        all occurrences count. `"probability"`: in each step that contains the
        key, the key gets a row with the probability `probability`.
      probability: Admission probability, in [0, 1].
      evict: Rule for evictions when all places of a new key are occupied.
        `"lru"` evicts the least recently used key, `"lfu"` the least frequently
        used key, and `"none"` no key. Rows that a step in flight uses are not
        evicted.
      half_life_steps: Number of steps after which the count of a key is halved
        if the key is not used. Requires `evict="lfu"`. None: counts do not
        decay.
      ttl_steps: Number of steps without use after which a key expires. For all
        values of `evict`, expired keys are evicted before other keys. None:
        keys do not expire.
      oov_embedding: Lookup result for a key without a row, which is out of the
        vocabulary (OOV). `"zeros"`: zeros. `"trainable"`: one trainable row,
        which all unknown keys share.
      on_full: `"evict"`: keys are evicted according to `evict`, and a key that
        gets no place remains unknown. `"error"`: if a key gets no place, the
        step raises an error and does not change the vocabulary. This value
        requires `evict="none"`.
      seed: Seed of initial values and of random admission, a 64-bit integer.
      on_evict: A callable, a path or None. Evicted keys are passed to the
        callable or written to a file, with their rows and slot variables,
        before other keys get these rows. A callable must take one `EvictedKeys`
        argument. The methods `enqueue`, `evict`, `evict_expired` and `resize`
        call the callable. If the callable raises an error, these methods also
        raise the error, `enqueue` adds no step, and all keys keep their rows.
        On parameter servers, the callable receives keys later, and evicted keys
        do not keep their rows: see `Vocabulary.report_evicted`.
        If `on_evict` is a path, each eviction adds a record to the file
        `{path}-00000`. A record is a `tf.train.Example` with `table`, `keys`,
        `rows` (flat) and `slot/{name}`, and with `keep_strings` also
        `strings` and `has_string`. When a program restarts, or if a record
        could not be written, later records are written to a file with the next
        number. Keras saves a path, but not a callable.
      keep_strings: Whether the strings of all keys that have a row are stored.
        The ids must then be strings. `Vocabulary.keys`, `evict` and
        `evict_expired` return strings, and the results of `blocks` and `export`
        and the argument of `on_evict` contain strings. `stats` reports strings
        that have the same hash.
        Checkpoints and Keras files contain the strings. Not supported under
        `MultiWorkerMirroredStrategy` and `ParameterServerStrategy`, and for
        batches of `tlm.pack`, which contain only hashes.
      num_rows: Number of rows of the table: 8 rows per bucket, and one row for
        unknown keys.
    """

    capacity: int
    _: dataclasses.KW_ONLY
    min_count: int = 1
    admission: literals.Admission = "all"
    probability: float = 1.0
    evict: literals.Eviction = "lru"
    half_life_steps: int | None = None
    ttl_steps: int | None = None
    oov_embedding: literals.OovEmbedding = "zeros"
    on_full: str = "evict"
    seed: int = 0
    on_evict: (
        Callable[[EvictedKeys], object] | str | os.PathLike[str] | None
    ) = None
    keep_strings: bool = False

    def __post_init__(self):
        """Checks the settings.

        Raises:
          TypeError: If a numeric setting is not a number, `keep_strings` is not
            a bool, or `on_evict` is neither a callable nor a path.
          ValueError: If a setting is out of range, or is not compatible with
            another setting.
        """
        bucket_layout.num_buckets_for(self.capacity)
        checks.check_int("min_count", self.min_count, lowest=1, highest=255)
        checks.check_one_of("admission", self.admission, ADMISSIONS)
        checks.check_one_of("evict", self.evict, EVICTIONS)
        checks.check_one_of("oov_embedding", self.oov_embedding, OOV_EMBEDDINGS)
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
        keep_strings: Any = self.keep_strings
        if not isinstance(keep_strings, bool):
            raise TypeError(
                checks.message("keep_strings", "a bool", keep_strings)
            )
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
        """Checks that no setting disables the effect of another setting.

        Raises:
          ValueError: If a setting has no effect because of another setting.
        """
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
                    '"none" with on_full="error", which evicts no key',
                    self.evict,
                )
            )

    @property
    def num_buckets(self) -> int:
        """Number of buckets of 8 keys."""
        return bucket_layout.num_buckets_for(self.capacity)

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""
        return bucket_layout.KEYS_PER_BUCKET * self.num_buckets + 1

    @property
    def has_sketch(self) -> bool:
        """Whether a sketch counts keys without a row."""
        return self.admission == "count"

    def policy(self) -> dict[str, object]:
        """Returns the attributes of ops (docs/ops.md, "Open vocabularies")."""
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
