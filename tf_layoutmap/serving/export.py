"""`export`: a SavedModel whose tables are small and quickly looked up."""

# DOC-MERGE: Writes a SavedModel whose tables are written block by block, or nothing.
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks, files, tf_private
from tf_layoutmap.serving import endpoints, packing, stored_tables, subjects
from tf_layoutmap.serving import report as serving_report
from tf_layoutmap.serving.report import ExportReport
from tf_layoutmap.serving.stored_tables import StoredTable
from tf_layoutmap.serving.stored_variable import (
    Blocks,
    MeasuredBlocks,
    StoredVariable,
)

# What `tf.saved_model.load` looks for.
_MODEL = "saved_model.pb"


def write_saved_model(
    module: tf.Module,
    signatures: Any,
    folder: str,
    variables: Sequence[tuple[StoredVariable, Blocks]],
) -> None:
    """Writes a SavedModel into an empty folder.

    Args:
      module: Has the variables and functions.
      signatures: As of `tf.saved_model.save`.
      folder: Where to.
      variables: Those whose values come in blocks, attributes of `module`.

    Raises:
      OSError: If it cannot be written.
    """
    with files.os_errors(folder):
        tf.saved_model.save(module, folder, signatures=signatures)
    prefix = os.path.join(folder, "variables", "variables")
    for variable, blocks in variables:
        variable.write(prefix, blocks)
    with files.os_errors(folder):
        tf_private.write_fingerprint(folder)


def check_target(path: str) -> None:
    """Refuses a folder whose files an export would remove.

    Raises:
      ValueError: If there is something that is no SavedModel.
    """
    if not tf.io.gfile.exists(path):
        return
    if tf.io.gfile.isdir(path) and (
        not tf.io.gfile.listdir(path)
        or tf.io.gfile.exists(os.path.join(path, _MODEL))
    ):
        return
    raise ValueError(
        "Argument `path` must be a folder that is new, empty or a SavedModel, "
        f"which is replaced. Received: {path!r}."
    )


def saved_model_bytes(folder: str) -> int:
    """Returns the size of all files in a folder."""
    return sum(
        tf.io.gfile.stat(os.path.join(parent, name)).length
        for parent, _, names in tf.io.gfile.walk(folder)
        for name in names
    )


def export(
    model_or_embedding: Any,
    path: Any,
    rows: str | Mapping[Any, str] = "float32",
    fuse: bool = True,
    *,
    input_signature: Sequence[Any] | None = None,
    dataset: Any = None,
) -> ExportReport:
    """Writes a SavedModel of TensorFlow's own operations only.

    It is served by TensorFlow Serving or `tf.saved_model.load`, where this
    package need not be installed. Tables are read, packed and written block by
    block: 16 MB at a time, or a 256th of a table beyond 4 GB.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> table = tf.tpu.experimental.embedding.TableConfig(
    ...     3, 4, initializer=tf.ones, combiner="sum", name="words")
    >>> feature = tf.tpu.experimental.embedding.FeatureConfig(table)
    >>> embedding = tlm.TPUEmbedding({"title": feature}, None)
    >>> report = tlm.export(embedding, tempfile.mkdtemp(), rows="int8")
    >>> report.tables[0].rows, report.tables[0].largest_error
    ('int8', 0.0)
    >>> served = tf.saved_model.load(report.path)
    >>> ids = tf.ragged.constant([[0, 1], []], dtype=tf.int64)
    >>> served.serve({"title": ids})["title"].numpy().tolist()
    [[2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]

    Rows of `"int8"` are one byte a value, of `"int4"` half of one, with a
    scale and a lowest value of each row, which take eight bytes. A lookup
    gathers rows as they are stored, and unpacks only those. Tables whose rows
    would get bigger stay as they are.

    Args:
      model_or_embedding: A built Keras or tf_keras model with layers of
        `tlm.layers`, such a layer, or a `tlm.TPUEmbedding`. What is not a
        table of these is exported as `model.export` does it.
      path: Folder of the SavedModel: new, empty, or a SavedModel to replace,
        in one operation of the file system once the new one is complete. Of a
        link, the folder that it points to; the link stays.
      rows: How rows are stored: `"float32"` (as they are), `"float16"`,
        `"int8"` or `"int4"`; or one of them by table: the name of a
        `TableConfig` or of a `ShardedEmbedding`, or these themselves. Tables
        it does not name stay as they are.
      fuse: Whether tables with as many columns share a variable, so that one
        gather reads all of a `TPUEmbedding`.
      input_signature: A structure of `tf.TensorSpec`, `tf.RaggedTensorSpec`
        and `tf.SparseTensorSpec` for each argument of the call. Of a model,
        what it was built with unless told; of an embedding, ragged int64 ids
        for each feature, or strings where keys are. A second argument of an
        embedding is weights.
      dataset: Batches of `(x, y)` or `(x, y, sample_weight)`, finite. The
        metrics of a compiled model are computed with the model and with what
        was exported, which is loaded for it.

    Returns:
      Bytes and errors of each table, and the metrics. `print` shows it.

    Raises:
      TypeError: If `model_or_embedding` is nothing that has tables.
      ValueError: If an argument is invalid, a table is not known, a row is
        not finite and its table would be packed, or `dataset` is given for
        what has no metrics. `path` is as it was then.
      RuntimeError: If the tables are on a TPU.
      OSError: If it cannot be written. `path` is as it was then.
    """
    path = os.fspath(path)
    fuse = checks.check_type("fuse", fuse, bool, "a bool")
    holders = subjects.holders_of(model_or_embedding)
    kinds = _kinds(rows, holders)
    sources = [source for holder in holders for source in holder.sources]
    placed = stored_tables.make_plan(
        [
            (packing.choose(kind, source.dtype, source.dim), source.num_rows)
            for kind, source in zip(kinds, sources)
        ],
        fuse=fuse,
    )
    if dataset is not None:
        endpoints.check_model_for_metrics(model_or_embedding)
    check_target(path)

    variables = [
        StoredVariable(f"tables_{index}", num_rows, form)
        for index, (form, num_rows) in enumerate(
            zip(placed.formats, placed.num_rows)
        )
    ]
    blocks = [
        MeasuredBlocks(
            [sources[table] for table in placed.tables_of(index)], variable.form
        )
        for index, variable in enumerate(variables)
    ]
    stored = iter(
        [
            StoredTable(variables[place.variable], place.start, source.num_rows)
            for place, source in zip(placed.places, sources)
        ]
    )
    replaced: list[serving_report.Placeholder] = [
        (
            holder.owner,
            holder.make_lookup([next(stored) for _ in holder.sources]),
        )
        for holder in holders
    ]

    module, signatures = endpoints.make(
        model_or_embedding, input_signature, replaced, sources
    )
    module.tables = variables
    module.keys = [one.variable for holder in holders for one in holder.keys]
    module.variables_of_model = subjects.other_variables(
        model_or_embedding, holders
    )
    module.resources = subjects.resources_of(model_or_embedding)
    with files.replacing_folder(path) as folder:
        write_saved_model(
            module, signatures, folder, list(zip(variables, blocks))
        )
    reports = {}
    for index, measured in enumerate(blocks):
        reports.update(zip(placed.tables_of(index), measured.reports()))
    report = ExportReport(
        path,
        tuple(reports[table] for table in range(len(sources))),
        len(variables),
        saved_model_bytes(path),
    )
    if dataset is None:
        return report
    return endpoints.compared_metrics(report, model_or_embedding, dataset)


def _kinds(rows: Any, holders: Sequence[subjects.Holder]) -> list[str]:
    """What each table is to be stored as."""
    sources = [source for holder in holders for source in holder.sources]
    if not isinstance(rows, Mapping):
        kind = checks.check_one_of("rows", rows, packing.KINDS)
        return [kind] * len(sources)
    names = {
        id(alias): source.name
        for holder in holders
        for source in holder.sources
        for alias in source.aliases
    }
    wanted = {
        names.get(id(key), key): checks.check_one_of(
            "rows", kind, packing.KINDS, where=f"of table {key!r}"
        )
        for key, kind in rows.items()
    }
    unknown = [
        key for key in wanted if key not in [source.name for source in sources]
    ]
    if unknown:
        raise ValueError(
            "Argument `rows` must name tables, which are "
            f"{[source.name for source in sources]}. Received: {unknown}."
        )
    return [wanted.get(source.name, "float32") for source in sources]
