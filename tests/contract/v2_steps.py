"""Programs that train a `tlm.TPUEmbeddingV2` in a custom loop.

Each program runs one feature on any runtime and returns numbers by name.
"""

from typing import Any

import tensorflow as tf

import tf_layoutmap as tlm
from tests.contract import steps
from tests.contract.runtimes import BATCH, Array, Runtime

tpu = tf.tpu.experimental.embedding
PROGRAMS: dict[str, steps.Program] = {}


program = steps.registrar(PROGRAMS)


def embedding_of(
    runtime: Runtime,
    cls: Any = tlm.TPUEmbeddingV2,
    optimizer: Any = None,
    initializer: Any = None,
    **options: Any,
) -> Any:
    """Creates an embedding with two tables, which SparseCores stack.

    Args:
      runtime: The runtime.
      cls: Class of the embedding.
      optimizer: Optimizer of both tables; Adagrad by default.
      initializer: Initializer of both tables.
      **options: Arguments of `cls`.
    """
    samples = BATCH // runtime.strategy.num_replicas_in_sync
    tables = {
        name: tpu.TableConfig(
            num_rows,
            4,
            initializer=initializer or steps.initializer,
            combiner="sum",
            name=f"{name}s",
        )
        for name, num_rows in (
            ("item", steps.NUM_ITEMS),
            ("user", steps.NUM_USERS),
        )
    }
    with runtime.scope():
        return cls(
            {
                name: tpu.FeatureConfig(
                    table, name=name, output_shape=[samples]
                )
                for name, table in tables.items()
            },
            optimizer or tpu.Adagrad(0.5),
            **{**runtime.options, **options},
        )


def batches_of(count: int, seed: int = 0) -> list[Any]:
    """Returns batches of `steps.batches_of` for tables with four columns."""
    return [
        (ids, {"item": gradients["item"], "user": gradients["item"][::-1]})
        for ids, gradients in steps.batches_of(count, seed)
    ]


def sums(gradients: Any, activations: Any) -> dict[str, tf.Tensor]:
    """Returns gradients that depend on the rows of the step."""
    return {
        name: gradient + activations[name]
        for name, gradient in gradients.items()
    }


@program("closed table")
def closed_table(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime)
    runtime.train(embedding, batches_of(4))
    return runtime.values(embedding)


@program("`enqueue` and `dequeue`")
def enqueue(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime)

    def replica(ids: Any, gradients: Any) -> None:
        _, preserved = embedding.dequeue(embedding.enqueue(ids))
        embedding.apply_gradients(gradients, preserved)

    runtime.train(embedding, batches_of(4), replica)
    return runtime.values(embedding)


@program("steps that only look up")
def only_lookups(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime)
    for seed in range(2):
        runtime.train(embedding, batches_of(2, seed))
        runtime.train(
            embedding,
            batches_of(2, seed),
            lambda ids, gradients: embedding(ids)[0],
        )
    return runtime.values(embedding)


@program("several lookups in a step, one of them without gradients")
def two_lookups(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime)

    def replica(ids: Any, gradients: Any) -> None:
        _, preserved = embedding(ids)
        activations, _ = embedding(ids)
        embedding.apply_gradients(sums(gradients, activations), preserved)

    runtime.train(embedding, batches_of(4), replica)
    return runtime.values(embedding)


@program("several updates in a step")
def two_updates(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime)

    def replica(ids: Any, gradients: Any) -> None:
        for _ in range(2):
            _, preserved = embedding(ids)
            embedding.apply_gradients(gradients, preserved)

    runtime.train(embedding, batches_of(4), replica)
    return runtime.values(embedding)


@program("open vocabulary")
def open_vocabulary(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(
        runtime,
        initializer=tf.random_uniform_initializer(-1.0, 1.0, seed=3),
        vocabularies={"users": tlm.vocabulary.OpenVocabulary(steps.NUM_USERS)},
    )
    runtime.train(embedding, batches_of(4))
    return runtime.values(embedding)


@program("checkpoint")
def checkpoint(runtime: Runtime) -> dict[str, Array]:
    return restored_values(runtime, tlm.TPUEmbeddingV2)


@program("checkpoint of a `tlm.TPUEmbedding`")
def checkpoint_of_v1(runtime: Runtime) -> dict[str, Array]:
    """Continues a checkpoint of the host."""
    return restored_values(runtime, tlm.TPUEmbedding)


def restored_values(runtime: Runtime, cls: Any) -> dict[str, Array]:
    """Continues a checkpoint of an embedding of the class."""
    if cls is tlm.TPUEmbedding:
        source = Runtime()
        source.start(runtime.folder / f"host_{runtime.is_first}")
        # The embedding is on the host of each process.
        before = embedding_of(source, cls)
        source.train(before, batches_of(2))
        path = source.write(before)
    else:
        before = embedding_of(runtime)
        runtime.train(before, batches_of(2))
        path = steps.shared_path(runtime, runtime.write(before))
    runtime.restart()
    embedding = embedding_of(runtime)
    # Tables on a TPU are created by the first step.
    runtime.train(embedding, batches_of(1, seed=3))
    tf.train.Checkpoint(it=embedding).read(path).expect_partial()
    runtime.train(embedding, batches_of(2, seed=1))
    return runtime.values(embedding)


@program("asynchronous checkpoint")
def asynchronous_checkpoint(runtime: Runtime) -> dict[str, Array]:
    """Restores an asynchronous checkpoint, which does not have later steps."""
    embedding = embedding_of(runtime)
    runtime.train(embedding, batches_of(2))
    saved = tf.train.Checkpoint(it=embedding)
    path = saved.save(
        runtime.path("asynchronous"),
        tf.train.CheckpointOptions(enable_async=True),
    )
    runtime.train(embedding, batches_of(2, seed=1))
    saved.sync()
    path = steps.shared_path(runtime, path)
    saved.read(path).expect_partial()
    return runtime.values(embedding)


@program("deltas")
def deltas(runtime: Runtime) -> dict[str, Array]:
    return steps.rows_with_deltas(
        runtime, embedding_of(runtime), None, batches_of
    )


@program("`tlm.export`")
def export(runtime: Runtime) -> dict[str, Array]:
    return steps.exported_rows(runtime, embedding_of(runtime), None, batches_of)


@program("pipelining")
def pipelining(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime, pipeline_execution_with_tensor_core=True)

    def replica(ids: Any, gradients: Any) -> None:
        activations, preserved = embedding(ids)
        embedding.apply_gradients(sums(gradients, activations), preserved)

    runtime.train(embedding, batches_of(4), replica)
    return runtime.values(embedding)


@program("16-bit rows")
def rows_of_16_bits(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime, table_dtypes="float16")
    runtime.train(embedding, batches_of(4))
    return runtime.values(embedding)


@program("clipping of gradients")
def clipping(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime, optimizer=tpu.SGD(0.5, clipvalue=1.0))
    runtime.train(embedding, batches_of(4))
    return runtime.values(embedding)


@program("learning rate that is a function")
def dynamic_rate(runtime: Runtime) -> dict[str, Array]:
    rate = tf.constant(0.25)
    embedding = embedding_of(runtime, optimizer=tpu.SGD(lambda: rate))
    runtime.train(embedding, batches_of(3))
    return runtime.values(embedding)


@program("reading a table")
def reading(runtime: Runtime) -> dict[str, Array]:
    embedding = embedding_of(runtime)
    runtime.train(embedding, batches_of(2))
    return {
        name: rows.numpy()
        for name, rows in embedding.get_embedding_tables().items()
    }


@program("several local replicas")
def several_replicas(runtime: Runtime) -> dict[str, Array]:
    """Trains with two replicas per process, where a runtime has them."""
    steps.check_has_replicas(runtime)
    return closed_table(runtime)
