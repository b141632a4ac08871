"""The host engine under a strategy of several processes.

Each process has all tables and an engine for all replicas. Ids and gradients
of a step are gathered over the processes, and each engine is told those of all
replicas, in one order: so all of them make the same update, and the copies of
a table stay equal to the bit. A replica looks up its own samples only.
"""

# DOC-MERGE: What is refused with the number of the process that it comes from.
#
# All processes have the ids of all replicas, so each finds the same error; the
# engine's own message knows the feature and not whose it is.
#
# DOC-MERGE: What all replicas of all processes gather of each other's steps.
# DOC-MERGE: Refuses an embedding that is not the same in all processes of a strategy.
#
# Each process runs its own copy of the program. Where one says something else,
# copies of a table would drift apart, or the last process would be right, and
# none would tell.
#
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.host.engine import HostEngine, OpenLookup
from tf_layoutmap.embedding.replicas import Replicas
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.sharded.routing.checks import known_size


def check_ids(
    spec: config.EmbeddingSpec,
    features: Sequence[embedding_inputs.FeatureIds],
    process: int,
) -> list[tf.Operation]:
    """Returns checks that ids of a process are rows of their tables.

    Those of tables with open vocabularies are keys, and any will do.

    Args:
      spec: Tables and features.
      features: What a replica of that process looks up.
      process: Its number.
    """
    checks = []
    for feature, inputs in zip(spec.features, features):
        if spec.table_of(feature).vocabulary is not None:
            continue
        num_rows = spec.table_of(feature).num_rows
        ids = tf.cast(inputs.ids, tf.int64)
        is_bad = (ids < 0) | (ids >= num_rows)
        # Without a bad id it is the first one, and the sentence is not used.
        first = tf.argmax(tf.concat([is_bad, [True]], 0))
        # There may be no id at all.
        which = tf.gather(tf.concat([ids, [0]], 0), first)
        checks.append(
            tf.debugging.Assert(
                ~tf.reduce_any(is_bad),
                [
                    tf.strings.join(
                        [
                            f"Process {process}: feature {feature.name}, "
                            "sample ",
                            tf.strings.as_string(_sample_of(inputs, first)),
                            ": id ",
                            tf.strings.as_string(which),
                            f" is outside table {spec.table_of(feature).name} "
                            f"with {num_rows} rows",
                        ]
                    )
                ],
            )
        )
    return [one for one in checks if one is not None]


def check_modes(
    modes: Sequence[tf.Tensor],
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all replicas train, or none does.

    The engine sees the batches of all replicas as one where tables have open
    vocabularies.

    Args:
      modes: Of each replica, whether gradients follow.
      num_local: Replicas of each process.
    """
    values = tf.stack(modes)
    other = tf.argmax(values != values[0])
    check = tf.debugging.Assert(
        ~tf.reduce_any(values != values[0]),
        [
            tf.strings.join(
                [
                    "All replicas must enqueue a step with the same "
                    "`training`. Process 0 has ",
                    tf.strings.as_string(values[0]),
                    ", process ",
                    tf.strings.as_string(other // num_local),
                    " ",
                    tf.strings.as_string(tf.gather(values, other)),
                    ".",
                ]
            )
        ],
    )
    return [] if check is None else [check]


def _sample_of(
    inputs: embedding_inputs.FeatureIds, index: tf.Tensor
) -> tf.Tensor:
    """Returns the sample of an id, by its position among the ids."""
    splits = tf.cast(inputs.splits, tf.int64)
    if splits.shape.rank == 2:  # Indices of a sparse tensor.
        return tf.gather(tf.concat([splits[:, 0], [0]], 0), index)
    if splits.shape[0] == 0:  # Dense.
        num_ids = tf.maximum(tf.size(inputs.ids, tf.int64), 1)
        return index * tf.cast(inputs.num_samples, tf.int64) // num_ids
    return (
        tf.searchsorted(
            splits, index[tf.newaxis], side="right", out_type=tf.int64
        )[0]
        - 1
    )


class RestoreCounter:
    """How often the tables of this process were restored.

    A process that restores alone has other rows than the others from then on.
    """

    def __init__(self):
        with tf.init_scope(), tf.device(tables.HOST):
            # One of this process, whatever the strategy.
            self._count = tf_private.ResourceVariable(
                0, dtype=tf.int64, trainable=False, name="num_restores"
            )

    def add_one(self):
        """Counts a restore."""
        self._count.assign_add(1)

    def value(self) -> tf.Tensor:
        """Returns the count, as a step reads it."""
        return self._count.read_value()


def check_restores(
    counts: tf.Tensor,
    num_local: int,
) -> list[tf.Operation]:
    """Returns a check that all replicas tell the same number of restores.

    Args:
      counts: `[num_replicas]` int64.
      num_local: Replicas of each process.
    """
    is_other = counts != counts[0]
    other = tf.argmax(is_other)
    text = tf.strings.as_string
    check = tf.debugging.Assert(
        ~tf.reduce_any(is_other),
        [
            tf.strings.join(
                [
                    "A checkpoint must be restored in all processes, or their "
                    "tables differ. Process 0 has restored ",
                    text(counts[0]),
                    " times, process ",
                    text(other // num_local),
                    " ",
                    text(tf.gather(counts, other)),
                    " times.",
                ]
            )
        ],
    )
    return [] if check is None else [check]


# How long a process waits for the others, which may be writing a checkpoint.
# One that died is noticed earlier, by its connection.
TIMEOUT_SECONDS = 600

# What a process says of each feature: its form (the rank of its splits, 0 if
# it is dense), what its ids are made of, ids, splits, weights and samples.
_NUM_SIZES = 6


def collective_options() -> tf.distribute.experimental.CommunicationOptions:
    """Returns how long collective operations wait."""
    return tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=TIMEOUT_SECONDS
    )


def all_gather(values: tf.Tensor) -> tf.Tensor:
    """The vectors, or rows, of all replicas after each other."""
    context = tf.distribute.get_replica_context()
    return context.all_gather(values, axis=0, options=collective_options())


def _size(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64)


def _form(feature: embedding_inputs.FeatureIds) -> int:
    if feature.splits.shape.rank == 2:
        return 2
    return 0 if feature.splits.shape[0] == 0 else 1


def gather_inputs(features, training, restores, num_replicas: int):
    """`(training, features)` and restores of each replica, on all replicas."""
    sizes = [tf.cast(training, tf.int64), restores]
    for one in features:
        sizes += [
            tf.constant(_form(one), tf.int64),
            tf.constant(one.kind, tf.int64),
            _size(one.ids),
            _size(one.splits),
            _size(one.weights),
            tf.cast(one.num_samples, tf.int64),
        ]
    sizes = tf.ensure_shape(
        all_gather(tf.stack(sizes)[tf.newaxis]),
        [num_replicas, 2 + _NUM_SIZES * len(features)],
    )
    whole = [
        tf.reshape(tf.cast(part, tf.int64), [-1])
        for one in features
        for part in (one.ids, one.splits)
    ]
    whole = _Reader(all_gather(tf.concat(whole, 0)))
    # Whether there are weights is part of the program, which is one.
    has_weights = any(one.weights.shape[0] != 0 for one in features)
    weights = _Reader(
        all_gather(tf.concat([one.weights for one in features], 0))
        if has_weights
        else tf.zeros([0])
    )
    found = []
    for replica in range(num_replicas):
        inputs = []
        for index, one in enumerate(features):
            first = 2 + _NUM_SIZES * index
            (form, kind, num_ids, num_splits, num_weights, num_samples) = (
                tf.unstack(sizes[replica, first : first + _NUM_SIZES])
            )
            checks = [
                tf.debugging.assert_equal(
                    form,
                    tf.constant(_form(one), tf.int64),
                    f"Feature {index} must have the same form, dense, sparse "
                    "or ragged, in all processes.",
                ),
                tf.debugging.assert_equal(
                    kind,
                    tf.constant(one.kind, tf.int64),
                    f"Feature {index} must have integers in all processes, or "
                    "strings in all.",
                ),
            ]
            with tf.control_dependencies(
                [check for check in checks if check is not None]
            ):
                ids = whole.take(num_ids)
            splits = whole.take(num_splits)
            if _form(one) == 2:
                splits = tf.reshape(splits, [-1, 2])
            elif _form(one) == 0:
                splits = tf.zeros([0], tf.int64)
            inputs.append(
                embedding_inputs.FeatureIds(
                    ids,
                    splits,
                    num_samples,
                    weights.take(num_weights),
                    kind=one.kind,
                )
            )
        found.append((tf.cast(sizes[replica, 0], tf.bool), inputs))
    return found, sizes[:, 1]


def gather_gradients(gradients, hyperparameters, num_replicas: int):
    """`(gradients, hyperparameters)` of each replica, on all replicas."""
    rows = all_gather(
        tf.stack([tf.shape(one, tf.int64)[0] for one in gradients])[tf.newaxis]
    )
    values = _Reader(
        all_gather(
            tf.concat(
                [
                    tf.reshape(one, [-1])
                    for one in [*gradients, *hyperparameters]
                ],
                0,
            )
        )
    )
    found = []
    for replica in range(num_replicas):
        of_replica = [
            tf.reshape(
                values.take(
                    rows[replica, index] * int(one.shape[1:].num_elements())
                ),
                [-1, *one.shape[1:]],
            )
            for index, one in enumerate(gradients)
        ]
        found.append(
            (
                of_replica,
                [
                    tf.ensure_shape(values.take(int(one.shape[0])), one.shape)
                    for one in hyperparameters
                ],
            )
        )
    return found


class _Reader:
    """Takes one piece after the other from a vector."""

    def __init__(self, values: tf.Tensor):
        self._values = values
        self._next = tf.constant(0, tf.int64)

    def take(self, size: tf.Tensor | int) -> tf.Tensor:
        """Returns the next `size` values."""
        size = tf.cast(size, tf.int64)
        piece = self._values[self._next : self._next + size]
        self._next += size
        return piece


# Values of a table that are made equal at a time.
_CHUNK = 2**22


class WorkerEngine(HostEngine):
    """A `HostEngine` whose steps are those of all processes."""

    def __init__(
        self,
        spec: Any,
        variables: Any,
        strategy_replicas: Replicas,
        **options: Any,
    ):
        """Creates the engine; see `HostEngine`."""
        super().__init__(
            spec,
            variables,
            num_replicas=strategy_replicas.num_replicas,
            # All processes see the same keys go; one tells it.
            tells_evicted=strategy_replicas.is_first_process,
            in_processes=True,
            **options,
        )
        self._replicas = strategy_replicas
        self._num_local = len(
            strategy_replicas.strategy.extended.worker_devices
        )
        self._checks_ids = options.get("out_of_range", "error") == "error"
        self.restores = RestoreCounter()

    def enqueue(
        self,
        replica: int,
        training: Any,
        features: Sequence[embedding_inputs.FeatureIds],
    ):
        """Hands over this replica's ids, and those of other processes."""
        gathered, checks = self._gather_checked(training, features)
        if self._spec.has_open_tables:
            modes = [mode for mode, _ in gathered]
            # Once all is gathered: an error ends what others still gather.
            with tf.control_dependencies(
                [
                    tensor
                    for _, inputs in gathered
                    for one in inputs
                    for tensor in (one.ids, one.weights)
                ]
            ):
                checks += check_modes(modes, self._num_local)
            # The first replica of a process hands the step of all over: which
            # rows new keys get depends on the order of all batches.
            if replica % self._num_local == 0:
                with tf.control_dependencies(checks):
                    self.enqueue_keys(modes[0], [one for _, one in gathered])
            return
        with tf.control_dependencies(checks):
            for other in self._replicas.handled_by(replica):
                super().enqueue(other, *gathered[other])

    def _gather_checked(self, training, features):
        """`(training, features)` of each replica, and what must be right."""
        gathered, restores = gather_inputs(
            features,
            tf.convert_to_tensor(training, tf.bool),
            self.restores.value(),
            self._replicas.num_replicas,
        )
        checks = check_restores(restores, self._num_local)
        for number, (_, inputs) in enumerate(gathered):
            if self._checks_ids:
                checks += check_ids(
                    self._spec, inputs, number // self._num_local
                )
        return gathered, checks

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        activations = super().dequeue(replica)
        for other in self._replicas.handled_by(replica):
            if other == replica:
                continue
            with tf.device(self._handle.device):
                ops.pass_step(engine=self._handle, replica=other)
        return activations

    def apply(
        self,
        replica: int,
        gradients: Sequence[tf.Tensor],
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies this replica's gradients, and those of other processes.

        The hyperparameters of the last replica count, in all processes.
        """
        gathered = gather_gradients(
            gradients, hyperparameters, self._replicas.num_replicas
        )
        _, last = gathered[-1]
        for other in self._replicas.handled_by(replica):
            super().apply(other, gathered[other][0], last)

    def open(
        self,
        replica: int,
        features: Sequence[embedding_inputs.FeatureIds],
    ) -> OpenLookup:
        """Opens this replica's lookup, and those of other processes.

        Raises:
          NotImplementedError: If tables have open vocabularies, and this
            process several replicas.
        """
        if self._spec.has_open_tables and self._num_local > 1:
            # They would open the lookups in another order than in other
            # processes, and keys get other rows.
            raise NotImplementedError(
                "A layer with an open vocabulary must have one replica in each "
                "process of a MultiWorkerMirroredStrategy. Received: "
                f"{self._num_local} replicas in this process."
            )
        gathered, checks = self._gather_checked(True, features)
        with tf.control_dependencies(checks):
            opened = [
                super(WorkerEngine, self).open(other, gathered[other][1])
                for other in self._replicas.handled_by(replica)
            ]
        tokens = {
            other: token
            for one in opened
            for other, token in one.tokens.items()
        }
        return OpenLookup(opened[0].engine, tokens)

    def follow(
        self,
        replica: int,
        lookup: OpenLookup,
        gradients: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Keeps this replica's gradients, and those of other processes."""
        gathered = gather_gradients(gradients, [], self._replicas.num_replicas)
        marks = {
            other: super(WorkerEngine, self).follow(
                other, lookup, gathered[other][0]
            )
            for other in lookup.tokens
        }
        # In order, and none left out: the others' marks come from there.
        with tf.control_dependencies(list(marks.values())):
            return tf.identity(marks[replica])

    def apply_followed(
        self,
        replica: int,
        marks: tf.Tensor,
        hyperparameters: Sequence[tf.Tensor],
    ):
        """Applies what the marks of the replicas of all processes stand for.

        The hyperparameters of the last replica count, in all processes.
        """
        gathered = gather_gradients(
            [marks], hyperparameters, self._replicas.num_replicas
        )
        _, last = gathered[-1]
        for other in self._replicas.handled_by(replica):
            super().apply_followed(other, gathered[other][0][0], last)


def agree_on_first_values(
    variables: dict[str, dict[str, Any]],
    strategy: tf.distribute.Strategy,
):
    """Gives the variables of all processes the values of the first one.

    Initializers without a seed give other rows in each process.
    """

    @tf.function
    def broadcast(part: tf.Tensor) -> tf.Tensor:
        def of_replica():
            context = tf.distribute.get_replica_context()
            is_first = context.replica_id_in_sync_group == 0
            return context.all_reduce(
                tf.distribute.ReduceOp.SUM,
                tf.where(is_first, part, tf.zeros_like(part)),
                options=collective_options(),
            )

        return strategy.experimental_local_results(strategy.run(of_replica))[0]

    for by_name in variables.values():
        for variable in tables.shards_of(by_name[tables.PARAMETERS]):
            rows_at_once = max(1, _CHUNK // known_size(variable, 1))
            for first in range(0, known_size(variable), rows_at_once):
                part = variable[first : first + rows_at_once]
                variable[first : first + rows_at_once].assign(
                    tf.cast(
                        broadcast(tf.cast(part, tf.float32)), variable.dtype
                    )
                )


# Of a table: what may be another in each process. One of them tells which keys
# go. Where each has a copy, the first rows are those of the first process.
_OWN = ("initializer", "on_evict", "first_values")


def describe_settings(
    spec: config.EmbeddingSpec, arguments: dict[str, Any]
) -> list[tuple[str, str]]:
    """Returns what must be the same, in order: what it is, and its value.

    Args:
      spec: Tables and features.
      arguments: Other arguments of `TPUEmbedding`, by name; `over_processes`
        among them.
    """
    found = [
        (f"argument `{name}`", _text(value))
        for name, value in arguments.items()
    ]
    found.append(("tables", _text([one.name for one in spec.tables])))
    found.append(("features", _text([one.name for one in spec.features])))
    for table in spec.tables:
        found += _fields(f"of table {table.name!r}", table)
        if arguments["over_processes"] == "divided":
            # Each process draws its own part.
            found.append(
                (
                    f"`initializer` of table {table.name!r}",
                    _initializer(table.initializer),
                )
            )
    for feature in spec.features:
        where = f"of feature {feature.name!r}"
        found += [
            (f"`table` {where}", spec.table_of(feature).name),
            (
                f"`max_sequence_length` {where}",
                _text(feature.max_sequence_length),
            ),
        ]
    return found


def check_agreed_settings(
    strategy: tf.distribute.Strategy, settings: Sequence[tuple[str, str]]
) -> None:
    """Compares the settings of all processes, which all call it.

    Args:
      strategy: A `MultiWorkerMirroredStrategy`, outside of its replicas.
      settings: What `describe` returned.

    Raises:
      ValueError: In all processes, if one has others.
    """
    texts = _gather(strategy, json.dumps(settings))
    first, *others = [dict(json.loads(one)) for one in texts]
    for number, other in enumerate(others, start=1):
        for what in (*first, *other):
            if first.get(what) != other.get(what):
                raise ValueError(
                    "A TPUEmbedding must be the same in all processes of a "
                    f"MultiWorkerMirroredStrategy. Received: {what}: "
                    f"{first.get(what, 'none')} in process 0, "
                    f"{other.get(what, 'none')} in process {number}."
                )


def _fields(where: str, value: Any) -> list[tuple[str, str]]:
    found = []
    for one in dataclasses.fields(value):
        field = getattr(value, one.name)
        if one.name in _OWN:
            continue
        if dataclasses.is_dataclass(field):
            found += _fields(f"of the {one.name} {where}", field)
        else:
            found.append((f"`{one.name}` {where}", _text(field)))
    return found


def _initializer(value: Any) -> str:
    """Returns kind and settings; Keras draws the seed that is left out."""
    settings = getattr(value, "get_config", dict)()
    settings.pop("seed", None)
    return f"{type(value).__name__} {_text(sorted(settings.items()))}"


def _text(value: Any) -> str:
    """Returns a text that is the same in another process."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    if callable(value):
        return "a function"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _gather(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    # Collectives take no bytes.
    values = np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    @tf.function
    def told() -> Any:
        def of_replica():
            return [
                all_gather(tf.constant(one)) for one in ([len(values)], values)
            ]

        return [
            strategy.experimental_local_results(one)[0]
            for one in strategy.run(of_replica)
        ]

    sizes, values_of_all = (one.numpy() for one in told())
    texts = np.split(values_of_all.astype(np.uint8), np.cumsum(sizes)[:-1])
    # All replicas of a process say the same.
    num_local = len(strategy.extended.worker_devices)
    return [one.tobytes().decode() for one in texts[::num_local]]
