"""Programs that train a `tlm.TPUEmbedding` in a custom loop.

Each program runs one feature on any runtime and returns numbers by name.
"""

import datetime
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.contract.runtimes import BATCH, Array, Batch, Runtime, tensors_in

tpu = tf.tpu.experimental.embedding
Program = Callable[[Runtime], dict[str, Array]]
PROGRAMS: dict[str, Program] = {}

HOUR = datetime.timedelta(hours=1)
NUM_ITEMS, NUM_USERS = 20, 12
CAPACITY = 64


def registrar(
    programs: dict[str, Program],
) -> Callable[[str], Callable[[Program], Program]]:
    """Returns a decorator that adds the program of a feature to `programs`."""

    def program(feature: str) -> Callable[[Program], Program]:
        def register(function: Program) -> Program:
            programs[feature] = function
            return function

        return register

    return program


program = registrar(PROGRAMS)


def initializer(
    shape: Any, dtype: Any = None, shard_info: Any = None
) -> tf.Tensor:
    """Returns multiples of 1/8, or the values of one shard."""
    del dtype
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 8
    if shard_info is None:
        return tf.constant(rows)
    first = shard_info.offset[0]
    return tf.constant(rows[first : first + shard_info.shape[0]])


def embedding_of(
    runtime: Runtime,
    keys: dict[str, Any] | None = None,
    optimizer: Any = None,
    **options: Any,
) -> tlm.TPUEmbedding:
    """Creates an embedding with two tables on a runtime.

    Args:
      runtime: The runtime.
      keys: Settings of the vocabulary of the table "items", which is then open.
      optimizer: Optimizer of both tables; Adagrad by default.
      **options: Arguments of `tlm.TPUEmbedding`.
    """
    # A table with an open vocabulary computes the initial values of single
    # keys, which `initializer` does not support.
    of_keys = tf.random_uniform_initializer(-1.0, 1.0)
    items = tpu.TableConfig(
        NUM_ITEMS if keys is None else CAPACITY,
        4,
        initializer=initializer if keys is None else of_keys,
        combiner="sum",
        name="items",
    )
    users = tpu.TableConfig(
        NUM_USERS, 2, initializer=initializer, combiner="sum", name="users"
    )
    if keys is not None:
        options["vocabularies"] = {
            "items": tlm.vocabulary.OpenVocabulary(CAPACITY, **keys)
        }
    with runtime.scope():
        return tlm.TPUEmbedding(
            {
                "item": tpu.FeatureConfig(items, name="item"),
                "user": tpu.FeatureConfig(users, name="user"),
            },
            optimizer or tpu.Adagrad(0.5),
            **{**runtime.options, **options},
        )


def batches_of(
    count: int, seed: int = 0, keys: int | None = None
) -> list[Batch]:
    """Returns global batches with repeated ids and integer gradients.

    Args:
      count: Number of batches.
      seed: Seed of the batches.
      keys: Number of different keys of the feature "item", or None for rows.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        items = random.integers(0, keys or NUM_ITEMS, [BATCH])
        ids = {
            # Keys are larger than the number of rows.
            "item": items if keys is None else items * 1_000_003 - 7,
            "user": random.integers(0, NUM_USERS, [BATCH]),
        }
        gradients = {
            name: random.integers(-4, 5, [BATCH, dim]).astype(np.float32)
            for name, dim in (("item", 4), ("user", 2))
        }
        found.append((ids, gradients))
    return found


def keys_of(found: tlm.TPUEmbedding) -> Array:
    """Returns the keys of the open vocabulary in ascending order."""
    return np.sort(found.vocabularies["items"].keys().numpy())


@program("closed table")
def closed_table(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime)
    runtime.train(one, batches_of(4))
    return runtime.values(one)


@program("open vocabulary")
def open_vocabulary(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime, {})
    runtime.train(one, batches_of(4, keys=30))
    return {**runtime.values(one), "sorted keys": keys_of(one)}


@program("shared vocabulary")
def shared_vocabulary(runtime: Runtime) -> dict[str, Array]:
    deep, wide = (
        tpu.TableConfig(
            CAPACITY,
            dim,
            initializer=tf.random_uniform_initializer(-1.0, 1.0),
            combiner="sum",
            name=name,
        )
        for name, dim in (("deep", 4), ("wide", 2))
    )
    with runtime.scope():
        one = tlm.TPUEmbedding(
            {
                "item": tpu.FeatureConfig(deep, name="item"),
                "user": tpu.FeatureConfig(wide, name="user"),
            },
            tpu.Adagrad(0.5),
            vocabularies={
                "deep": tlm.vocabulary.OpenVocabulary(CAPACITY),
                "wide": "deep",
            },
            **runtime.options,
        )
    runtime.train(one, batches_of(4, keys=30))
    return runtime.values(one)


@program("`evict`")
def evict(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime, {})
    runtime.train(one, batches_of(2, keys=30))
    gone = one.vocabularies["items"].evict(keys_of(one)[::3])
    runtime.train(one, batches_of(2, seed=1, keys=30))
    return {**runtime.values(one), "evicted": np.sort(gone)}


@program("`resize`")
def resize(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime, {})
    runtime.train(one, batches_of(2, keys=30))
    one.vocabularies["items"].resize(4 * CAPACITY)
    runtime.train(one, batches_of(2, seed=1, keys=90))
    return {**runtime.values(one), "sorted keys": keys_of(one)}


@program("`on_evict`")
def on_evict(runtime: Runtime) -> dict[str, Array]:
    gone: list[tlm.EvictedKeys] = []
    one = embedding_of(runtime, {"ttl_steps": 2, "on_evict": gone.append})
    runtime.train(one, batches_of(4, keys=30))
    one.vocabularies["items"].evict_expired()
    runtime.train(one, batches_of(2, seed=1, keys=30))
    values = runtime.values(one)
    if not runtime.is_first:  # Only the first process calls `on_evict`.
        return values
    keys = np.concatenate([part.keys for part in gone])
    order = np.argsort(keys)
    return {
        **values,
        "evicted": keys[order],
        "rows": np.concatenate([part.rows for part in gone])[order],
        "accumulators": np.concatenate(
            [part.slots["accumulators"] for part in gone]
        )[order],
    }


@program("`tlm.vocabulary.KeyExpiry`")
def key_expiry(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime, {})
    expiry = tlm.vocabulary.KeyExpiry(
        one.vocabularies["items"], unused_for=HOUR
    )
    gone: list[Array] = []
    for hour in range(4):
        runtime.train(one, batches_of(1, seed=hour, keys=30))
        # The clock of another process is two hours ahead.
        seconds = 3600 * (hour if runtime.is_first else hour + 2)
        gone.append(np.sort(expiry.evict(now=seconds)))
    return {
        **runtime.values(one),
        "num_evicted": np.array([len(part) for part in gone]),
        "evicted": np.concatenate(gone),
    }


@program("deltas")
def deltas(runtime: Runtime) -> dict[str, Array]:
    return rows_with_deltas(runtime, embedding_of(runtime), None)


@program("deltas, open vocabulary")
def deltas_open(runtime: Runtime) -> dict[str, Array]:
    return rows_with_deltas(runtime, embedding_of(runtime, {}), 30)


def rows_with_deltas(
    runtime: Runtime,
    one: Any,
    keys: int | None,
    batches: Callable[..., list[Batch]] | None = None,
) -> dict[str, Array]:
    """Returns a checkpoint that consists of a base and two deltas."""
    batches = batches or functools.partial(batches_of, keys=keys)
    runtime.train(one, batches(2))
    base = shared_path(runtime, runtime.write(one, "base"))
    folder = shared_path(runtime, "deltas")
    writer = tlm.deltas.DeltaWriter(one, folder, base=base)
    for seed in (1, 2):
        runtime.train(one, batches(1, seed=seed))
        writer.write()
    if not runtime.is_first:
        return {}
    return tensors_in(str(tlm.deltas.apply(base, folder, runtime.path("full"))))


def served_rows(path: str, ids: dict[str, Array]) -> dict[str, Array]:
    """Returns the activations of an exported embedding."""
    served = tf.saved_model.load(path)
    found = served.serve({name: tf.constant(one) for name, one in ids.items()})
    return {name: one.numpy() for name, one in found.items()}


@program("`tlm.export`")
def export(runtime: Runtime) -> dict[str, Array]:
    return exported_rows(runtime, embedding_of(runtime), None)


@program("`tlm.export`, open vocabulary")
def export_open(runtime: Runtime) -> dict[str, Array]:
    return exported_rows(runtime, embedding_of(runtime, {}), 30)


def exported_rows(
    runtime: Runtime,
    one: Any,
    keys: int | None,
    batches: Callable[..., list[Batch]] | None = None,
) -> dict[str, Array]:
    """Returns lookups of an export, also of keys without rows."""
    batches = batches or functools.partial(batches_of, keys=keys)
    runtime.train(one, batches(2))
    path = runtime.path("exported")
    tlm.export(
        one,
        path,
        input_signature=[
            {name: tf.TensorSpec([None], tf.int64) for name in ("item", "user")}
        ],
    )
    ids, _ = batches_of(1, seed=1, keys=keys)[0]
    return served_rows(shared_path(runtime, path), ids)


@program("checkpoint")
def checkpoint(runtime: Runtime) -> dict[str, Array]:
    return restored_values(runtime, None, None)


@program("checkpoint, open vocabulary")
def checkpoint_open(runtime: Runtime) -> dict[str, Array]:
    return restored_values(runtime, {}, 30)


def restored_values(
    runtime: Runtime, settings: dict[str, Any] | None, keys: int | None
) -> dict[str, Array]:
    """Continues a checkpoint on the same runtime."""
    one = embedding_of(runtime, settings)
    runtime.train(one, batches_of(2, keys=keys))
    path = shared_path(runtime, runtime.write(one))
    runtime.restart()
    again = embedding_of(runtime, settings)
    # Tables on a TPU are created by the first step.
    runtime.train(again, batches_of(1, seed=3, keys=keys))
    tf.train.Checkpoint(it=again).read(path).assert_existing_objects_matched()
    runtime.train(again, batches_of(2, seed=1, keys=keys))
    return runtime.values(again)


def shared_path(runtime: Runtime, path: str) -> str:
    """Returns the path of the first process for a path of this process.

    All processes must call the function after they have written their files.
    """
    runtime.wait_for_all()
    return str(runtime.folder / pathlib.Path(path).name)


@program("asynchronous checkpoint")
def asynchronous_checkpoint(runtime: Runtime) -> dict[str, Array]:
    return asynchronously_saved(runtime, embedding_of(runtime), None)


@program("asynchronous checkpoint, open vocabulary")
def asynchronous_checkpoint_open(runtime: Runtime) -> dict[str, Array]:
    return asynchronously_saved(runtime, embedding_of(runtime, {}), 30)


def asynchronously_saved(
    runtime: Runtime, one: tlm.TPUEmbedding, keys: int | None
) -> dict[str, Array]:
    """Returns the contents of an asynchronous checkpoint."""
    runtime.train(one, batches_of(2, keys=keys))
    saved = tf.train.Checkpoint(it=one)
    path = saved.save(
        runtime.path("asynchronous"),
        tf.train.CheckpointOptions(enable_async=True),
    )
    # These steps run while the checkpoint is written.
    runtime.train(one, batches_of(2, seed=1, keys=keys))
    saved.sync()
    return tensors_in(path) if runtime.is_first else {}


@program("pipelining")
def pipelining(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime, pipeline_execution_with_tensor_core=True)
    runtime.train(one, batches_of(4))
    return runtime.values(one)


@program("16-bit rows")
def rows_of_16_bits(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime, table_dtypes="bfloat16", rounding_seed=5)
    runtime.train(one, batches_of(4))
    return {
        name: np.asarray(value, np.float32)
        for name, value in runtime.values(one).items()
    }


@program("gradients that each process sums first")
def folded(runtime: Runtime) -> dict[str, Array]:
    options = (
        {"gradient_aggregation": "local"} if runtime.name == "sharded" else {}
    )
    # Sums of integers do not depend on their order.
    one = embedding_of(runtime, {}, **options)
    runtime.train(one, batches_of(4, keys=30))
    return runtime.values(one)


@program("learning rate that is a function")
def dynamic_rate(runtime: Runtime) -> dict[str, Array]:
    rate = tf.constant(0.25)
    one = embedding_of(runtime, optimizer=tpu.SGD(lambda: rate))
    runtime.train(one, batches_of(3))
    return runtime.values(one)


@program("reading a table")
def reading(runtime: Runtime) -> dict[str, Array]:
    one = embedding_of(runtime)
    runtime.train(one, batches_of(2))
    return {
        config.name: rows.numpy()
        for config, rows in one.embedding_tables.items()
    }


@program("several local replicas")
def several_replicas(runtime: Runtime) -> dict[str, Array]:
    """Trains with two replicas per process, where a runtime has them."""
    check_has_replicas(runtime)
    return closed_table(runtime)


def check_has_replicas(runtime: Runtime) -> None:
    """Raises ValueError if a process of the runtime has one replica.

    The host is the reference of the row.
    """
    if runtime.name in ("host", "mesh"):
        return
    num_local = len(runtime.strategy.extended.worker_devices)
    if num_local < 2:
        raise ValueError(
            "The runtime must have several replicas in this process. "
            f"Received: {num_local}."
        )
