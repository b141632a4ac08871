"""`KeyExpiry`: evicts keys that were not used for a period of time."""

from __future__ import annotations

import datetime
import json
import math
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks
from tf_layoutmap.vocabulary import bucket_layout, parts, state

Array = np.ndarray[Any, Any]

_MICROSECOND = datetime.timedelta(microseconds=1)
# Minimum distance of two recorded times, as a fraction of the period. It limits
# the number of recorded times.
_MAX_RECORDED = 1000


class KeyExpiry(tf.train.experimental.PythonState):
    """Evicts the keys of a vocabulary that were not used for a period of time.

    A vocabulary stores the step of the last use of each key, but no time. Each
    call of `evict` records the time and the step, and evicts the keys whose
    last use was before the last recorded time that is at least `unused_for`
    ago. A key is therefore evicted after it was not used for a time between
    `unused_for` and `unused_for` plus the interval between two calls. Call
    `evict` at regular intervals, for example once per hour or epoch.

    >>> import datetime
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> words = tlm.layers.ShardedEmbedding(
    ...     tlm.vocabulary.OpenVocabulary(100), 8,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> _ = words(np.array([[0]]))
    >>> expiry = tlm.vocabulary.KeyExpiry(
    ...     words.vocabulary, unused_for=datetime.timedelta(days=30))
    >>> _ = words.vocabulary.write([5, 7])
    >>> day = 24 * 3600
    >>> expiry.evict(now=0 * day).numpy()
    array([], dtype=int64)
    >>> sorted(expiry.evict(now=30 * day).numpy().tolist())
    [5, 7]

    Save and restore the object together with the vocabulary, for example with
    `tf.train.Checkpoint(model=model, expiry=expiry)`, because the recorded
    steps are steps of this vocabulary. If a program restarts without the
    recorded times, no key expires before `unused_for` has passed again.

    Steps do not evict keys because of their time. The setting `ttl_steps` of
    `tlm.vocabulary.OpenVocabulary` can be used in addition.
    """

    def __init__(
        self, vocabulary: state.Vocabulary, unused_for: datetime.timedelta
    ):
        """Records nothing before the first call of `evict`.

        Args:
          vocabulary: Vocabulary of a table: an element of
            `TPUEmbedding.vocabularies`, or the attribute `vocabulary` of a
            built `ShardedEmbedding`. If tables share a vocabulary, any of them.
          unused_for: Time without use after which a key expires.

        Raises:
          TypeError: If an argument has another type.
          ValueError: If `unused_for` is not positive.
        """
        checks.check_type(
            "vocabulary",
            vocabulary,
            state.Vocabulary,
            "an element of `TPUEmbedding.vocabularies`, or the attribute "
            "`vocabulary` of a built ShardedEmbedding",
        )
        checks.check_type(
            "unused_for",
            unused_for,
            datetime.timedelta,
            "a datetime.timedelta",
        )
        if unused_for <= datetime.timedelta(0):
            raise ValueError(
                checks.message("unused_for", "positive", unused_for)
            )
        self.vocabulary = vocabulary
        self.unused_for = unused_for
        # Times in microseconds since the epoch, and the number of steps at this
        # time, in ascending order.
        self._recorded: list[tuple[int, int]] = []

    def evict(self, now: float | None = None) -> tf.Tensor:
        """Records the time, and evicts all expired keys.

        Evicted keys are passed to `on_evict`, and are counted by
        `stats()["num_evicted"]`. All processes of a strategy must call the
        method together; the time of the first process applies. No step should
        run during the call.

        Args:
          now: Current time in seconds since the epoch, as from `time.time()`.
            Programs that train on recorded data can pass the time of the newest
            example. None: the time of the system.

        Returns:
          The evicted keys, `[num_evicted]` int64. With `keep_strings=True`,
          their strings, as from `Vocabulary.evict_expired`.

        Raises:
          TypeError: If `now` is not a number.
          ValueError: If `now` is not finite, or is before the time of an
            earlier call.
          RuntimeError: If the method is called inside a `tf.function`.
          tf.errors.FailedPreconditionError: If a step in flight uses the row
            of an expired key. No key is evicted.
        """
        if not tf.executing_eagerly():
            raise RuntimeError("`evict` must be called outside tf.function.")
        if now is not None:
            _check_time(now)
        rows = self.vocabulary._rows
        # A pending pipelined update is applied first.
        rows.before_read()
        time_now = rows.of_first_process(
            round((time.time() if now is None else now) * 1e6)
        )
        step = self.vocabulary._step()
        # If an earlier checkpoint of the vocabulary was restored, later steps
        # do not exist any more.
        recorded = [record for record in self._recorded if record[1] <= step]
        if recorded and time_now < recorded[-1][0]:
            if now is not None:
                raise ValueError(
                    checks.message(
                        "now",
                        "at least the time of the last recorded call, "
                        f"{recorded[-1][0] / 1e6}",
                        now,
                        f"table {self.vocabulary.name!r}",
                    )
                )
            # The clock of the system was set back.
            time_now = recorded[-1][0]
        period = self.unused_for // _MICROSECOND
        past = [record for record in recorded if record[0] <= time_now - period]
        self._recorded = recorded[max(len(past) - 1, 0) :]
        if not self._recorded or (
            step > self._recorded[-1][1]
            and time_now - self._recorded[-1][0] >= period / _MAX_RECORDED
        ):
            self._recorded.append((time_now, step))
        keys = (
            _keys_used_until(self.vocabulary, past[-1][1])
            if past
            else np.zeros([0], np.int64)
        )
        return self.vocabulary._named(
            self.vocabulary._evict_keys(
                tf.constant(keys, tf.int64), expired=False
            )
        )

    # `tf.train.Checkpoint` calls these methods.

    def serialize(self) -> str:
        """Returns the recorded times, for a checkpoint."""
        return json.dumps(self._recorded)

    def deserialize(self, string_value: str | bytes) -> None:
        """Replaces the recorded times with the result of `serialize`."""
        self._recorded = [
            (int(when), int(step)) for when, step in json.loads(string_value)
        ]


def _check_time(now: Any) -> None:
    """Raises an error if a time is not a finite number."""
    if isinstance(now, bool) or not isinstance(
        now, int | float | np.integer | np.floating
    ):
        raise TypeError(
            checks.message("now", "a number of seconds since the epoch", now)
        )
    if not math.isfinite(now):
        raise ValueError(checks.message("now", "finite", now))


def _keys_used_until(vocabulary: state.Vocabulary, step: int) -> Array:
    """Returns the keys whose last use was in or before a step.

    The shards are read one after the other.
    """

    def used(part: parts.Part) -> list[Array]:
        keys_of_shards, steps_of_shards, _ = part.key_variables()
        sent = []
        for keys, steps in zip(keys_of_shards, steps_of_shards, strict=True):
            keys, steps = keys.numpy().ravel(), steps.numpy().ravel()
            is_used = keys != bucket_layout.EMPTY_KEY
            sent.append(keys[is_used & (steps <= step)])
        return [np.concatenate(sent)]

    return np.concatenate([keys for (keys,) in vocabulary._each("evict", used)])
