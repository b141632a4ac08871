"""Arguments of engine ops for open-vocabulary tables.

`OpenTables` creates the arguments of the engine's ops for these tables, and
calls `on_evict` with the evicted keys.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import tables
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.host import step_strings
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.vocabulary import (
    evicted,
    kept_strings,
    key_tensors,
    parts,
    stored_keys,
)

Array = np.ndarray[Any, Any]


class OpenTables:
    """The tables with open vocabularies of one embedding."""

    def __init__(
        self,
        spec: config.EmbeddingSpec,
        variables: dict[str, dict[str, Any]],
        *,
        reports_evicted: bool = True,
        in_processes: bool = False,
        strings: Mapping[str, kept_strings.KeptStrings] | None = None,
    ):
        """Prepares the arguments of ops for the open tables of `spec`.

        Args:
          spec: Tables and features.
          variables: Variables that `tables.create_tables` created, by table
            name.
          reports_evicted: Whether the engine calls `on_evict` with evicted
            keys.
          in_processes: Whether other processes run the same steps.
          strings: The strings of vocabularies that keep strings, by the name
            of the table that owns the vocabulary.
        """
        self._spec = spec
        self._strings = strings or {}
        self._in_processes = in_processes
        open_tables = [
            (number, table)
            for number, table in enumerate(spec.tables)
            if table.vocabulary is not None
        ]
        self._numbers = [number for number, _ in open_tables]
        self._state, self._shards, self._slots = [], [], []
        for number, table in open_tables:
            by_name = variables[table.name]
            if open_specs.owner_of(spec, number) == number:
                self._state.extend(
                    parts.in_order_of_ops(
                        {
                            name: tables.shards_of(variable)
                            for name, variable in by_name.items()
                        }
                    )
                )
            self._shards.extend(tables.shards_of(by_name[tables.PARAMETERS]))
            for slot in table.slots:
                self._slots.extend(tables.shards_of(by_name[slot.name]))
        self._attrs = {
            "open_tables": self._numbers,
            "vocabulary_of": [
                self._numbers.index(open_specs.owner_of(spec, number))
                for number in self._numbers
            ],
            **vocabulary_attrs([table for _, table in open_tables]),
        }
        self._dtypes = {
            number: row_dtypes(table) for number, table in open_tables
        }
        self._reporters = (
            reporters_of(spec, self._strings) if reports_evicted else {}
        )
        self._attrs.update(
            telling=[self._numbers.index(number) for number in self._reporters],
            Tevicted=[
                dtype
                for number in self._reporters
                for dtype in (tf.int64, *self._dtypes[number])
            ],
        )

    def arguments(
        self,
        inputs: Sequence[embedding_inputs.FeatureIds],
    ) -> dict[str, Any]:
        """Returns the arguments of a step's op, except for the batch.

        Args:
          inputs: Inputs of all features for replica 0, then for replica 1, and
            so on.

        Raises:
          ValueError: If one feature of a table has integers and another feature
            has strings.
        """
        return {
            **self._handles(),
            "key_kinds": [
                kind_of_keys(self._spec, number, inputs)
                for number in self._numbers
            ],
            **self._attrs,
        }

    def _handles(self) -> dict[str, list[tf.Tensor]]:
        """Returns the variables of all open tables, as arguments of ops."""
        # The handles are read at each call, so that traced functions capture
        # them.
        return {
            "state": tables.handles(self._state),
            "shards": tables.handles(self._shards),
            "slots": tables.handles(self._slots),
        }

    def keep_strings(
        self, inputs: Sequence[embedding_inputs.FeatureIds], training: Any
    ) -> None:
        """Stores the strings of a step whose keys have got rows.

        The method must be called after `report_evicted`, because it removes
        strings of evicted keys.

        Args:
          inputs: Same as for `arguments`.
          training: Whether the step trains.
        """
        step_strings.keep(self._spec, self._strings, inputs, training)

    def report_evicted(
        self, engine: tf.Tensor, values: Sequence[tf.Tensor]
    ) -> None:
        """Calls `on_evict` with the keys that a step has evicted.

        If `on_evict` raises an error, the engine discards the step, and the
        evicted keys get their rows back.

        Args:
          engine: Handle of the engine.
          values: Output `evicted` of the step's op.
        """
        if not self._reporters:
            return

        def report_all(*arrays: Any) -> None:
            first = 0
            for number, reporter in self._reporters.items():
                size = 1 + len(self._dtypes[number])
                reporter(*arrays[first : first + size])
                first += size

        report_or_undo(
            report_all,
            values,
            engine,
            "The step was not enqueued",
            in_processes=self._in_processes,
            **self._handles(),
        )

    def report_table(self, table: int, values: Sequence[Any]) -> None:
        """Calls `on_evict` of one table.

        Args:
          table: Index of the table.
          values: Arrays with the evicted keys, their rows and the values of
            their slot variables.
        """
        if table in self._reporters:
            self._reporters[table](*values)


def report_or_undo(
    report: Callable[..., None],
    values: Sequence[tf.Tensor],
    engine: tf.Tensor,
    outcome: str,
    *,
    in_processes: bool,
    **variables: Sequence[tf.Tensor],
) -> None:
    """Calls `report`, and undoes the engine's last op if `report` raises.

    Args:
      report: Function that takes NumPy arrays.
      values: Arguments of `report`, as tensors.
      engine: Handle of the engine.
      outcome: Sentence for the error message that states the result of the
        undo.
      in_processes: Whether the op has also run in other processes, which do not
        undo it.
      **variables: Handles `state`, `shards` and `slots` that were passed to the
        op.
    """

    def undo(why: Any, *, raises: bool) -> None:
        ops.take_back_keys(
            engine=engine,
            why=why,
            raises=raises,
            in_processes=in_processes,
            **variables,
        )

    if tf.executing_eagerly():
        try:
            report(*(value.numpy() for value in values))
        except BaseException as error:
            undo(_failed(error), raises=False)
            raise
        return

    # The ops of the engine run in program order, so a later `dequeue` runs
    # after the undo.
    undo(error_of_report(report, values, outcome), raises=True)


def error_of_report(
    report: Callable[..., None], values: Sequence[tf.Tensor], outcome: str
) -> tf.Tensor:
    """Calls `report`, and returns its error message or an empty string.

    Args:
      report: Function that takes NumPy arrays.
      values: Arguments of `report`, as tensors.
      outcome: Sentence for the error message.
    """

    def call(*tensors: tf.Tensor) -> str:
        try:
            report(*(tensor.numpy() for tensor in tensors))
        except BaseException as error:
            return f"{_failed(error)}. {outcome}.\n" + "".join(
                traceback.format_exception(error)
            )
        return ""

    return tf.py_function(
        tf_private.kept_by_graphs(call), list(values), tf.string
    )


def reporters_of(
    spec: config.EmbeddingSpec,
    strings: Mapping[str, kept_strings.KeptStrings],
) -> dict[int, Callable[..., None]]:
    """Returns functions that call `on_evict`, by index of the table.

    Args:
      spec: Tables and features.
      strings: The strings of vocabularies that keep strings, by the name of the
        table that owns the vocabulary.
    """
    return {
        number: evicted.teller(
            table.vocabulary.settings.on_evict,
            table.name,
            [slot.name for slot in table.slots],
            step_strings.store_of(spec, number, strings),
        )
        for number, table in enumerate(spec.tables)
        if table.vocabulary is not None
        and table.vocabulary.settings.on_evict is not None
    }


def vocabulary_attrs(specs: Sequence[config.TableSpec]) -> dict[str, list[Any]]:
    """Returns op attributes that describe the vocabularies of open tables."""
    settings = [spec.vocabulary.settings for spec in specs]
    values = [spec.vocabulary.first_values for spec in specs]
    policies = [setting.policy() for setting in settings]
    return {
        "has_unknown_row": [
            setting.oov_embedding == "trainable" for setting in settings
        ],
        "admissions": [policy["admission"] for policy in policies],
        "evictions": [policy["evict"] for policy in policies],
        "policies": [
            number for policy in policies for number in policy["policy"]
        ],
        "first_values": [value.kind for value in values],
        "first_limits": [limit for value in values for limit in value.limits],
        "first_seeds": [value.seed for value in values],
        "slot_values": [
            slot.initial_value for spec in specs for slot in spec.slots
        ],
    }


def kind_of_keys(
    spec: config.EmbeddingSpec,
    table: int,
    inputs: Sequence[embedding_inputs.FeatureIds],
) -> int | tf.Tensor:
    """Returns whether a table's keys in a batch are integers or strings.

    If a batch is packed, its kind is known only when the step runs. The result
    is then a tensor, and its operation raises an `InvalidArgumentError` if the
    features have different kinds.

    Args:
      spec: Tables and features.
      table: Index of the table. All tables with the same vocabulary must have
        keys of the same kind.
      inputs: Inputs of all features for replica 0, then for replica 1, and so
        on.

    Raises:
      ValueError: If one feature of the table has integers and another feature
        has strings, or if the table keeps strings and an input has none.
    """
    if spec.tables[table].vocabulary.settings.keep_strings:
        step_strings.check_inputs(spec, table, inputs)
    features = spec.features
    sharing = open_specs.sharing(spec, table)
    named = [
        (feature_ids.kind, features[number % len(features)].name)
        for number, feature_ids in enumerate(inputs)
        if features[number % len(features)].table in sharing
    ]
    if any(tf.is_tensor(kind) for kind, _ in named):
        return _kind_at_run_time(spec.tables[table].name, named)
    kinds = dict(named)
    if len(kinds) > 1:
        # Keys that were read from the vocabulary have the kind of the others.
        kinds.pop(stored_keys.ANY, None)
    if len(kinds) > 1:
        raise ValueError(
            "Features of one open vocabulary must all have integers or all "
            f"have strings. Received: {key_tensors.KINDS[1]} for "
            f"{kinds[1]!r}, {key_tensors.KINDS[2]} for {kinds[2]!r} (table "
            f"{spec.tables[table].name!r})."
        )
    return next(iter(kinds))


def _kind_at_run_time(
    table: str, named: Sequence[tuple[Any, str]]
) -> tf.Tensor:
    """Returns the kind of keys of which some are from packed batches."""
    kinds = tf.stack([tf.cast(kind, tf.int32) for kind, _ in named])
    highest = tf.reduce_max(kinds)
    is_same = tf.reduce_all((kinds == highest) | (kinds == 0))
    checks = assertions.require(
        is_same,
        f"Features of one open table must all have integers or all have "
        f"strings. Received: a batch in which some of the features "
        f"{[name for _, name in named]} have integers and some have strings "
        f"(table {table!r}).",
    )
    with tf.control_dependencies(checks):
        return tf.identity(highest)


def row_dtypes(table: config.TableSpec) -> list[tf.DType]:
    """Returns the dtypes of the rows and of the slot variables."""
    slots = table.slots
    return [tf.as_dtype(table.dtype), *(tf.float32 for _ in slots)]


def _failed(error: BaseException) -> str:
    return f"`on_evict` raised {type(error).__name__}: {error}"
