"""`export`, which writes a SavedModel with compact tables and fast lookups.

Tables are written block by block. If an export fails, the target folder is
unchanged.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import checks, files, literals, paths, tf_private
from tf_layoutmap.deltas.served import export_state, on_disk, packing, storage
from tf_layoutmap.deltas.writer import DeltaWriter
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.serving import (
    delta_state,
    endpoints,
    several_processes,
    stored_tables,
    subjects,
)
from tf_layoutmap.serving.report import ExportReport
from tf_layoutmap.serving.stored_variable import (
    Blocks,
    MeasuredBlocks,
    StoredVariable,
    merge_parts,
)
from tf_layoutmap.vocabulary import checkpoint_files

if TYPE_CHECKING:
    import keras

    from tf_layoutmap._core.types import (
        AnyEmbedding,
        KerasLayer,
        Nested,
        TableOrLayer,
    )

# A folder with this file is a SavedModel.
_MODEL = export_state.MODEL


def write_saved_model(
    module: tf.Module,
    signatures: Any,
    folder: str,
    variables: Sequence[tuple[StoredVariable, Blocks]],
) -> None:
    """Writes a SavedModel into an empty folder.

    Args:
      module: Module with the variables and functions.
      signatures: Same as for `tf.saved_model.save`.
      folder: The folder to write to.
      variables: Pairs of a variable of `module` and a function that yields its
        blocks of rows.

    Raises:
      OSError: If the SavedModel cannot be written.
    """
    with files.os_errors(folder):
        tf.saved_model.save(module, folder, signatures=signatures)
    prefix = os.path.join(folder, "variables", "variables")
    for variable, blocks in variables:
        variable.write(prefix, blocks)
    with files.os_errors(folder):
        tf_private.write_fingerprint(folder)


@contextlib.contextmanager
def remote_saved_model(
    module: tf.Module,
    signatures: Any,
    path: str,
    variables: Sequence[tuple[StoredVariable, Blocks]],
) -> Iterator[list[str]]:
    """Writes a SavedModel to a file system that is not local.

    The rows of tables are written to a staging folder next to `path`, and all
    other variables first to the local disk. An existing SavedModel is removed
    when all rows are written. `saved_model.pb` is written last, at the end of
    the block.

    Args:
      module: Module with the variables and functions.
      signatures: Same as for `tf.saved_model.save`.
      path: The folder to write to.
      variables: Same as for `write_saved_model`.

    Yields:
      The paths of all files of the SavedModel, to which the block can add its
      files.

    Raises:
      OSError: If the SavedModel cannot be written.
    """
    path = paths.resolve(path)
    with tempfile.TemporaryDirectory() as local, files.staged(path) as staging:
        tf.saved_model.save(module, local, signatures=signatures)
        source = os.path.join(local, export_state.VARIABLES)
        parts = [os.path.join(staging, "others")]
        for file in (*checkpoint_files.files_of(source), f"{source}.index"):
            storage.copy(file, parts[0] + file[len(source) :])
        for number, (variable, blocks) in enumerate(variables):
            parts += variable.write_parts(
                os.path.join(staging, f"table-{number}"), blocks
            )
        with files.replacing_folder(path, _MODEL) as folder:
            prefix = os.path.join(folder, export_state.VARIABLES)
            storage.make_folders(os.path.dirname(prefix))
            merge_parts(parts, prefix)
            written = [*checkpoint_files.files_of(prefix), f"{prefix}.index"]
            for name in storage.files_below(local):
                new = os.path.join(folder, name)
                if name == _MODEL or name.startswith(export_state.VARIABLES):
                    continue
                storage.make_folders(os.path.dirname(new))
                storage.copy(os.path.join(local, name), new)
                written.append(new)
            fingerprint = os.path.join(folder, on_disk.FINGERPRINT)
            storage.write_bytes(
                fingerprint,
                on_disk.updated_fingerprint(
                    storage.read_bytes(
                        os.path.join(local, on_disk.FINGERPRINT)
                    ),
                    storage.read_bytes(f"{prefix}.index"),
                ),
            )
            model = os.path.join(folder, _MODEL)
            written.append(model)
            yield written
            storage.copy(os.path.join(local, _MODEL), f"{model}.partial")


def check_target(path: str) -> None:
    """Checks that an export to `path` does not remove the user's files.

    Raises:
      ValueError: If `path` exists and is neither empty nor a SavedModel.
    """
    if not storage.exists(path):
        return
    if storage.is_folder(path) and (
        storage.is_empty(path)
        or storage.exists(os.path.join(path, _MODEL))
        or storage.is_unfinished(path, _MODEL)
    ):
        return
    raise ValueError(
        "Argument `path` must be a folder that is new, empty or a SavedModel, "
        f"which the export replaces. Received: {path!r}."
    )


def saved_model_bytes(folder: str) -> int:
    """Returns the total size of all files in a folder, in bytes."""
    return sum(
        tf.io.gfile.stat(os.path.join(parent, name)).length
        for parent, _, names in tf.io.gfile.walk(folder)
        for name in names
    )


def export(
    model_or_embedding: KerasLayer | AnyEmbedding,
    path: str | os.PathLike[str],
    row_format: literals.RowFormatName
    | Mapping[TableOrLayer, literals.RowFormatName] = "float32",
    fuse: bool = True,
    *,
    input_signature: Sequence[
        Nested[tf.TypeSpec | keras.KerasTensor | keras.InputSpec]
    ]
    | None = None,
    dataset: Iterable[Iterable[object]] | None = None,
    delta_writer: DeltaWriter | None = None,
) -> ExportReport:
    """Writes a SavedModel that uses only operations of TensorFlow.

    TensorFlow Serving and `tf.saved_model.load` can load the SavedModel without
    this package. Tables are read, packed and written block by block: 16 MB at a
    time, or 1/256 of a table that is larger than 4 GB.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> table = tf.tpu.experimental.embedding.TableConfig(
    ...     3, 4, initializer=tf.ones, combiner="sum", name="words")
    >>> feature = tf.tpu.experimental.embedding.FeatureConfig(table)
    >>> embedding = tlm.TPUEmbedding({"title": feature}, None)
    >>> report = tlm.export(embedding, tempfile.mkdtemp(), row_format="int8")
    >>> report.tables[0].row_format, report.tables[0].largest_error
    ('int8', 0.0)
    >>> served = tf.saved_model.load(report.path)
    >>> ids = tf.ragged.constant([[0, 1], []], dtype=tf.int64)
    >>> served.serve({"title": ids})["title"].numpy().tolist()
    [[2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]

    An `"int8"` row requires one byte per value, and an `"int4"` row requires
    half a byte per value. Each row also requires eight bytes for a scale and
    the lowest value of the row. A lookup gathers packed rows and unpacks only
    these rows. If packing would make the rows of a table larger, the table is
    not packed.

    A model can also read the table of a `ShardedEmbedding` directly, for
    example for tied weights. In the SavedModel, such a read unpacks all rows of
    the table in each call.

    Args:
      model_or_embedding: A built Keras or tf_keras model with layers of
        `tlm.layers`, a layer of `tlm.layers`, or a `tlm.TPUEmbedding`. All
        parts of a model except the tables of these layers are exported in the
        same way as in `model.export`.
      path: Folder of the SavedModel: a new folder, an empty folder, or an
        existing SavedModel. An existing SavedModel is replaced atomically when
        the new SavedModel is complete. If `path` is a link, the target folder
        of the link is replaced and the link remains.
      row_format: Storage type of the rows: `"float32"` (rows are not packed),
        `"float16"`, `"int8"` or `"int4"`; or a dict from tables to storage
        types. A key is a `TableConfig`, a `ShardedEmbedding`, or the name of a
        table or layer. Tables that are not in the dict are not packed.
      fuse: Whether tables with equal storage types and equal numbers of columns
        share a variable. One gather then reads rows from all of these tables.
      input_signature: A structure of `tf.TensorSpec`, `tf.RaggedTensorSpec` and
        `tf.SparseTensorSpec` for each argument of the call. The default for a
        model is the specs of the inputs with which it was built. The default
        for an embedding is ragged int64 ids for each feature, or ragged strings
        if the keys are strings. If the signature of an embedding has a second
        argument, this argument describes the weights.
      dataset: A finite dataset with batches of `(x, y)` or `(x, y,
        sample_weight)`. The metrics of the compiled model are computed on this
        dataset, once with the model and once with the SavedModel.
      delta_writer: A `tlm.deltas.DeltaWriter` of the model, or of tables of the
        model. `tlm.deltas.ServedModel` and `tlm.deltas.update_export` can then
        apply the deltas that the writer writes after the export. If the writer
        does not write some variables of the model, the function issues a
        warning that names them.

    If tables are sharded over processes, or `delta_writer` is a writer of
    several processes, all processes must call the function together with the
    same arguments. The first process writes the SavedModel. All processes read
    the rows block by block, so that no process holds a complete table.

    Returns:
      A report that can be printed. The report contains the bytes and errors of
      each table, and the metrics.

    Raises:
      TypeError: If `model_or_embedding` has an unsupported type.
      ValueError: If an argument is invalid, `row_format` contains an unknown
        table, a row of a packed table is not finite, `dataset` is passed for an
        object without metrics, or `delta_writer` is a writer of other tables.
        `path` is unchanged.
      RuntimeError: If the tables are on a TPU and were not built, or another
        thread writes a delta during the export. `path` is unchanged.
      OSError: If the SavedModel cannot be written. `path` is unchanged. On a
        file system that is not local, an existing SavedModel at `path` may
        already be removed.
    """
    path = os.fspath(path)
    fuse = checks.check_type("fuse", fuse, bool, "a bool")
    if delta_writer is not None:
        checks.check_type(
            "delta_writer",
            delta_writer,
            DeltaWriter,
            "a tlm.deltas.DeltaWriter",
        )
    # The position is read before the tables, so that the next delta contains
    # all changes that the export does not contain.
    position = None if delta_writer is None else delta_writer._position()
    tables = subjects.tables_of(model_or_embedding)
    # Processes that shard a table read its keys together.
    keys = stored_tables.copy_keys(tables)
    group = several_processes.processes_of(tables, delta_writer)
    if group is not None and dataset is not None:
        raise NotImplementedError(
            "Argument `dataset` must be None if several processes export "
            "together, because lookups would need all processes. Received: "
            f"{dataset!r}. Load the SavedModel to evaluate it."
        )
    with (
        contextlib.nullcontext()
        if group is None
        else group.failing_together("tlm.export")
    ):
        kinds = _kinds(row_format, tables)
        if dataset is not None:
            endpoints.check_model_for_metrics(model_or_embedding)
        check_target(path)
        if delta_writer is not None:
            delta_state.check_writer(delta_writer, tables)
        stored = stored_tables.store_tables(tables, kinds, keys, fuse=fuse)
        module, signatures = endpoints.make_endpoints(
            model_or_embedding, input_signature, stored
        )
    blocks = [
        MeasuredBlocks(
            [table.table for table in stored if table.variable is variable],
            variable.form,
        )
        for variable in module.tables
    ]

    def write_state(folder: str) -> None:
        if delta_writer is not None and position is not None:
            delta_writer._check_position(position)
            delta_state.write(folder, delta_writer, position, stored, module)

    def save(blocks: Sequence[Blocks]) -> int:
        variables = list(zip(module.tables, blocks))
        if paths.is_local(path):
            with files.replacing_folder(path, _MODEL) as folder:
                write_saved_model(module, signatures, folder, variables)
                write_state(folder)
            return saved_model_bytes(path)
        with remote_saved_model(module, signatures, path, variables) as written:
            write_state(path)
            if delta_writer is not None:
                written.append(os.path.join(path, export_state.FILE))
        return sum(map(storage.size, written))

    num_bytes = (
        save(blocks)
        if group is None
        else several_processes.write(group, save, module, signatures, blocks)
    )
    reports = {
        report.name: report
        for measured in blocks
        for report in measured.reports()
    }
    report = ExportReport(
        path,
        tuple(reports[table.name] for table in tables),
        len(blocks),
        num_bytes,
    )
    if dataset is None:
        return report
    return endpoints.compared_metrics(report, model_or_embedding, dataset)


def _kinds(row_format: Any, tables: Sequence[TableToExport]) -> list[str]:
    """Returns the storage type of each table.

    Raises:
      ValueError: If a storage type or a table in `row_format` is not known.
    """
    if not isinstance(row_format, Mapping):
        kind = checks.check_one_of("row_format", row_format, packing.KINDS)
        return [kind] * len(tables)
    names = {id(table.alias): table.name for table in tables}
    kind_of = {
        names.get(id(key), key): checks.check_one_of(
            "row_format", kind, packing.KINDS, where=f"of table {key!r}"
        )
        for key, kind in row_format.items()
    }
    known = [table.name for table in tables]
    unknown = [name for name in kind_of if name not in known]
    if unknown:
        raise ValueError(
            f"Argument `row_format` must name tables of {known}. Received: "
            f"{unknown}."
        )
    return [kind_of.get(name, "float32") for name in known]
