"""The declared state of each cell of the contract.

A row lists only the cells that do not work. All other cells of the columns of a
section must compute the numbers of the host. If a combination begins to work,
delete its line, and run `python -m tests.contract --page`.
"""

import dataclasses

from tests.contract.states import (
    RUNTIMES,
    Absent,
    Impossible,
    NotTried,
    State,
    Works,
)


@dataclasses.dataclass(frozen=True)
class Section:
    """Rows of the contract that use the same interface.

    Attributes:
      title: Heading on the page.
      text: Paragraph below the heading.
      columns: Runtimes of the table.
      rows: Maps each feature to its cells by runtime.
    """

    title: str
    text: str
    columns: tuple[str, ...]
    rows: dict[str, dict[str, State]]

    def state(self, feature: str, runtime: str) -> State:
        """Returns the declared state of a cell."""
        return self.rows[feature].get(runtime, Works())


def row(feature: str, **cells: State) -> tuple[str, dict[str, State]]:
    """Returns a row; cells that are not listed work."""
    unknown = set(cells) - set(RUNTIMES)
    if unknown:
        raise ValueError(f"Unknown runtimes: {sorted(unknown)}.")
    return feature, cells


# Only some sections have the column of SparseCores.
ALL = tuple(one for one in RUNTIMES if one != "sparse_cores")

# Reasons that occur in several rows.

LOCAL_REPLICAS_NEED_GPUS = NotTried(
    "TensorFlow creates several replicas in one process of this strategy only "
    "for several GPUs.",
)
ONE_REPLICA_PER_WORKER = Absent(
    "Each worker of a `ParameterServerStrategy` runs one replica."
)
REFERENCE = Absent(
    "The default strategy has one replica. Its numbers are the reference of "
    "the row."
)
SEVERAL_LOCAL_REPLICAS = row(
    "several local replicas",
    host=REFERENCE,
    replicated=LOCAL_REPLICAS_NEED_GPUS,
    sharded=LOCAL_REPLICAS_NEED_GPUS,
    servers=ONE_REPLICA_PER_WORKER,
)
ONE_ORDER = Absent(
    'Only `over_processes="sharded"` has the argument '
    '`gradient_aggregation="local"`.'
)
NO_KEYS_ON_TPU = Impossible(
    "`vocabularies` must be None if the tables are on a TPU",
    "The rows of a table on a TPU have fixed ids, because the TPU itself looks "
    'them up. Use `engine="host"`.',
)
NO_KEYS_ON_SPARSE_CORES = Impossible(
    "`vocabularies` must be None on SparseCores", NO_KEYS_ON_TPU.reason
)
TF_KERAS_TABLES_ON_MESH = Impossible(
    "is not supported on a mesh, because DTensor cannot run the steps",
    "On a mesh, a `TPUEmbedding` requires Keras 3.",
)
TF_KERAS_ON_MESH = Impossible(
    "tf_keras.ShardedEmbedding is not supported on a mesh; use",
    "On a mesh, a `ShardedEmbedding` requires Keras 3.",
)
SUMS_ON_MESH = Works(
    "Products over a sharded dimension are summed in another order, so that "
    "last bits differ.",
    tolerance=1e-6,
)
ACCUMULATION_OF_TABLES = Works(
    "If the model also has other weights, Keras 3 itself raises an error, "
    "because it accumulates their gradients in a `tf.cond`, in which replicas "
    "cannot wait for each other.",
)
NO_ACCUMULATION_BESIDE_TPU = Impossible(
    "must not accumulate gradients of a table under TPUStrategy",
    "The host applies the gradients of a table after each program of the TPU.",
)
NO_REGULARIZER_BESIDE_TPU = Impossible(
    "`embeddings_regularizer` must be None under TPUStrategy",
    "The number of distinct rows of a batch is unknown during tracing, and a "
    "TPU requires static sizes. Use `optimizer=None`.",
)
NO_BFLOAT16 = Impossible(
    "Variables must not be bfloat16 under MultiWorkerMirroredStrategy",
    "TensorFlow has no collective for bfloat16. Use float16, or the policy "
    '`"mixed_bfloat16"`.',
)
SUMS_OF_REPLICAS = Works(
    "The gradient of a table without a separate optimizer is a sum over "
    "replicas, as for all weights of Keras, so that last bits differ.",
    tolerance=1e-6,
)
NO_ACCUMULATION = Impossible(
    "optimizer must not accumulate gradients of a table",
    "Keras applies accumulated gradients in a `tf.cond`, in which a step of "
    "tables on servers or of a TPU cannot run. On servers, a closed "
    "`ShardedEmbedding` supports gradient accumulation.",
)
NO_SHARDS_IN_LEGACY_FILES = Impossible(
    "sharded over processes is not supported in legacy .h5 files",
    "A legacy `.h5` file can only contain values of `tf.Variable` objects, and "
    "no process has all rows in a variable. Use `.weights.h5`.",
)
STEPS_OF_REPLICAS = Works(
    "The call of each replica is a separate step of the vocabulary. The "
    "numbers of steps therefore differ from the host.",
    "vocabulary_(numbers|last_steps)",
)
ONE_CALL_ON_TPU = Impossible(
    "must be called once in a training step on a TPU",
    "The gradients of a TPU program belong to lookups by their order. Pass the "
    "features of both calls in one call.",
)
ONE_LOOKUP_ON_TPU = Impossible(
    "must call `embedding_lookup` only once",
    "A program of a TPU without SparseCores finds the lookup of gradients by "
    "its order. Look up all features in one call.",
)
NO_PIPELINING_ON_SERVERS = Impossible(
    "must be False under ParameterServerStrategy",
    "Use `prefetch_steps=1` of `tlm.ps.Run`.",
)
FLOAT32_ON_TPU = Impossible(
    "`table_dtypes` must be float32 under TPUStrategy",
    "TensorFlow's TPU embedding stores float32 rows.",
)

SUMS_OF_TIED_WEIGHTS: dict[str, State] = {
    "mirrored": SUMS_OF_REPLICAS,
    "replicated": SUMS_OF_REPLICAS,
    "sharded": SUMS_OF_REPLICAS,
    "mesh": SUMS_ON_MESH,
    "tpu_host": SUMS_OF_REPLICAS,
}
# Runtimes of sections about `ShardedEmbedding`, whose tables are never on a
# TPU.
WITHOUT_TPU = tuple(one for one in ALL if one != "tpu")

SECTIONS: dict[str, Section] = {}

SECTIONS["loop"] = Section(
    "`tlm.TPUEmbedding` in a custom loop",
    "The programs are in `tests/contract/steps.py`. The tables of a "
    "`tlm.TPUEmbedding` are never on a mesh.",
    tuple(one for one in ALL if one != "mesh"),
    dict(
        [
            row("closed table"),
            row(
                "open vocabulary",
                tpu=NO_KEYS_ON_TPU,
            ),
            row(
                "shared vocabulary",
                tpu=NO_KEYS_ON_TPU,
            ),
            row(
                "`evict`",
                tpu=NO_KEYS_ON_TPU,
            ),
            row(
                "`resize`",
                tpu=NO_KEYS_ON_TPU,
            ),
            row(
                "`on_evict`",
                tpu=NO_KEYS_ON_TPU,
            ),
            row(
                "`tlm.vocabulary.KeyExpiry`",
                tpu=NO_KEYS_ON_TPU,
            ),
            row("deltas"),
            row(
                "deltas, open vocabulary",
                tpu=NO_KEYS_ON_TPU,
            ),
            row("`tlm.export`"),
            row("`tlm.export`, open vocabulary", tpu=NO_KEYS_ON_TPU),
            row("checkpoint"),
            row("checkpoint, open vocabulary", tpu=NO_KEYS_ON_TPU),
            row("asynchronous checkpoint"),
            row("asynchronous checkpoint, open vocabulary", tpu=NO_KEYS_ON_TPU),
            row(
                "pipelining",
                servers=NO_PIPELINING_ON_SERVERS,
            ),
            row(
                "16-bit rows",
                tpu=FLOAT32_ON_TPU,
            ),
            row(
                "gradients that each process sums first",
                **dict.fromkeys(
                    [one for one in ALL if one not in ("mesh", "sharded")],
                    ONE_ORDER,
                ),
            ),
            row("learning rate that is a function"),
            row("reading a table"),
            SEVERAL_LOCAL_REPLICAS,
        ]
    ),
)

SECTIONS["v2"] = Section(
    "`tlm.TPUEmbeddingV2` in a custom loop",
    "The programs are in `tests/contract/v2_steps.py`.",
    (*(one for one in ALL if one != "mesh"), "sparse_cores"),
    dict(
        [
            row("closed table"),
            row("`enqueue` and `dequeue`"),
            row("steps that only look up"),
            row(
                "several lookups in a step, one of them without gradients",
                tpu=ONE_LOOKUP_ON_TPU,
                tpu_host=ONE_LOOKUP_ON_TPU,
            ),
            row(
                "several updates in a step",
                tpu=ONE_LOOKUP_ON_TPU,
                tpu_host=ONE_LOOKUP_ON_TPU,
            ),
            row(
                "open vocabulary",
                mirrored=STEPS_OF_REPLICAS,
                replicated=STEPS_OF_REPLICAS,
                sharded=STEPS_OF_REPLICAS,
                tpu=NO_KEYS_ON_TPU,
                sparse_cores=NO_KEYS_ON_SPARSE_CORES,
            ),
            row("checkpoint"),
            row("checkpoint of a `tlm.TPUEmbedding`"),
            row("asynchronous checkpoint"),
            row(
                "deltas",
                sparse_cores=Impossible(
                    "does not support tables on SparseCores",
                    'Use `engine="host"`.',
                ),
            ),
            row("`tlm.export`"),
            row("pipelining", servers=NO_PIPELINING_ON_SERVERS),
            row(
                "16-bit rows",
                tpu=FLOAT32_ON_TPU,
                sparse_cores=Impossible(
                    "`table_dtypes` must be None on SparseCores",
                    FLOAT32_ON_TPU.reason,
                ),
            ),
            row(
                "clipping of gradients",
                sparse_cores=Impossible(
                    "`clip_gradient_min` of SGD must be None on SparseCores",
                    "The operations of SparseCores do not clip.",
                ),
            ),
            row("learning rate that is a function"),
            row("reading a table"),
            SEVERAL_LOCAL_REPLICAS,
        ]
    ),
)

SECTIONS["sharded"] = Section(
    "`tlm.layers.ShardedEmbedding` in `fit` of Keras 3",
    "The programs are in `tests/contract/sharded_layer.py`. The tables "
    "of a `ShardedEmbedding` are never on a TPU.",
    WITHOUT_TPU,
    dict(
        [
            row("`fit`, closed table"),
            row("`fit`, table that follows the model's optimizer"),
            row("`fit`, table without a separate optimizer"),
            row(
                "`fit`, open vocabulary",
            ),
            row(
                "`evict`",
            ),
            row(
                "`resize`",
            ),
            row(
                "`on_evict`",
            ),
            row(
                "`tlm.vocabulary.KeyExpiry`",
            ),
            row("`tlm.export`"),
            row(
                "`tlm.export`, open vocabulary",
            ),
            row("`.keras` file"),
            row(
                "`.keras` file, open vocabulary",
            ),
            row("`.weights.h5` file"),
            row("checkpoint"),
            row(
                "16-bit variables",
                replicated=NO_BFLOAT16,
                sharded=NO_BFLOAT16,
            ),
            row(
                "optimizer with gradient accumulation",
                mirrored=ACCUMULATION_OF_TABLES,
                replicated=ACCUMULATION_OF_TABLES,
                sharded=ACCUMULATION_OF_TABLES,
                tpu_host=NO_ACCUMULATION_BESIDE_TPU,
            ),
            row("constraint"),
            row("regularizer", tpu_host=NO_REGULARIZER_BESIDE_TPU),
            row("several calls of the layer in a step"),
            SEVERAL_LOCAL_REPLICAS,
            row("`EarlyStopping(restore_best_weights=True)`"),
            row(
                "`EarlyStopping(restore_best_weights=True)`, open vocabulary",
            ),
            row("reading a table"),
            row("tied weights", **SUMS_OF_TIED_WEIGHTS),
            row("tied weights in `tlm.export`", **SUMS_OF_TIED_WEIGHTS),
        ]
    ),
)

SECTIONS["tpu"] = Section(
    "`tlm.layers.TPUEmbedding` in `fit` of Keras 3",
    "The programs are in `tests/contract/tpu_layer.py`.",
    (*ALL, "sparse_cores"),
    dict(
        [
            row("`fit`, closed table"),
            row(
                "`fit`, open vocabulary",
                mirrored=STEPS_OF_REPLICAS,
                replicated=STEPS_OF_REPLICAS,
                sharded=STEPS_OF_REPLICAS,
                tpu=NO_KEYS_ON_TPU,
                sparse_cores=NO_KEYS_ON_SPARSE_CORES,
            ),
            row(
                "`tlm.export`",
            ),
            row(
                "`.keras` file",
                sparse_cores=Impossible(
                    "must have 4 samples, which",
                    "The file contains the number of samples of a replica, "
                    "which SparseCores require as `output_shape`. The model "
                    "can only be loaded where replicas have the same number.",
                ),
            ),
            row("`.weights.h5` file"),
            row("checkpoint"),
            row(
                "optimizer with gradient accumulation",
                mirrored=ACCUMULATION_OF_TABLES,
                replicated=ACCUMULATION_OF_TABLES,
                sharded=ACCUMULATION_OF_TABLES,
                servers=NO_ACCUMULATION,
                mesh=NO_ACCUMULATION,
                tpu=NO_ACCUMULATION,
                tpu_host=NO_ACCUMULATION,
                sparse_cores=NO_ACCUMULATION,
            ),
            row(
                "several calls of the layer in a step",
                tpu=ONE_CALL_ON_TPU,
                tpu_host=ONE_CALL_ON_TPU,
                sparse_cores=Impossible(
                    ONE_CALL_ON_TPU.error,
                    "Pass the features of both calls in one call.",
                ),
            ),
            row(
                "`EarlyStopping(restore_best_weights=True)`",
            ),
        ]
    ),
)

SECTIONS["tf_keras sharded"] = Section(
    "`tlm.layers.tf_keras.ShardedEmbedding` in `fit` of tf_keras",
    "The programs are in `tests/contract/tf_keras_layers.py`. The tables "
    "of a `ShardedEmbedding` are never on a TPU.",
    WITHOUT_TPU,
    dict(
        [
            row("`fit`, closed table", mesh=TF_KERAS_ON_MESH),
            row(
                "`fit`, open vocabulary",
                mesh=TF_KERAS_ON_MESH,
            ),
            row("`.keras` file", mesh=TF_KERAS_ON_MESH),
            row(
                "`.h5` file",
                mesh=TF_KERAS_ON_MESH,
            ),
            row(
                "several calls of the layer in a step",
                mesh=TF_KERAS_ON_MESH,
            ),
            row(
                "`EarlyStopping(restore_best_weights=True)`, open vocabulary",
                mesh=TF_KERAS_ON_MESH,
            ),
        ]
    ),
)

SECTIONS["tf_keras tpu"] = Section(
    "`tlm.layers.tf_keras.TPUEmbedding` in `fit` of tf_keras",
    "The programs are in `tests/contract/tpu_layer.py`.",
    ALL,
    dict(
        [
            row(
                "`fit`, closed table",
                mesh=TF_KERAS_TABLES_ON_MESH,
            ),
            row(
                "`fit`, open vocabulary",
                mirrored=STEPS_OF_REPLICAS,
                replicated=STEPS_OF_REPLICAS,
                sharded=STEPS_OF_REPLICAS,
                mesh=TF_KERAS_TABLES_ON_MESH,
                tpu=NO_KEYS_ON_TPU,
            ),
            row(
                "`tlm.export`",
                mesh=TF_KERAS_TABLES_ON_MESH,
            ),
            row(
                "`.keras` file",
                mesh=TF_KERAS_TABLES_ON_MESH,
            ),
            row(
                "`.weights.h5` file",
                mesh=TF_KERAS_TABLES_ON_MESH,
            ),
            row(
                "`.h5` file",
                sharded=NO_SHARDS_IN_LEGACY_FILES,
                mesh=TF_KERAS_TABLES_ON_MESH,
                tpu=Impossible(
                    "A table on a TPU is not supported in legacy .h5 files",
                    "The rows are on the TPU and are not weights. Use "
                    "`.weights.h5`.",
                ),
            ),
            row("checkpoint", mesh=TF_KERAS_TABLES_ON_MESH),
            row(
                "several calls of the layer in a step",
                mesh=TF_KERAS_TABLES_ON_MESH,
                tpu=ONE_CALL_ON_TPU,
                tpu_host=ONE_CALL_ON_TPU,
            ),
            row(
                "`EarlyStopping(restore_best_weights=True)`",
                mesh=TF_KERAS_TABLES_ON_MESH,
            ),
        ]
    ),
)
