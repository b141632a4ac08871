"""Tests checkpoints of TensorFlow's TPUEmbeddingV2 in all directions.

Runs in separate processes (tests/emulation), because a process emulates one
TPU. Each process reads the files that the previous processes wrote:

1. Two chips of type v5p, which write a checkpoint with stacked tables.
2. Two cores of type v4, which read it and write checkpoints of V1.
3. Four chips of type v5p, which read all of them.
4. Four chips of type v6e, which also read all of them. They have as many
   SparseCores as the two chips of type v5p, with other rotations of tables.

The host engine runs the same steps, and its tables are the reference.
"""

import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.embedding.checkpoints import restoring

TPU = os.environ.get("TF_LAYOUTMAP_TPU", "v5p")
NUM_CORES = int(os.environ.get("TF_LAYOUTMAP_NUM_CORES", "2"))
EXCHANGE = pathlib.Path(os.environ.get("TF_LAYOUTMAP_EXCHANGE", "/nowhere"))
SETTING = dict(num_cores=NUM_CORES, deadline=5.0, tpu=TPU)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding

if tf.__version__ < "2.21":
    pytest.skip(
        "TPUEmbeddingV2 of TensorFlow 2.20 supports one feature only",
        allow_module_level=True,
    )

on_chips_with_sparse_cores = pytest.mark.skipif(
    TPU == "v4", reason="requires SparseCores"
)
on_v4 = pytest.mark.skipif(TPU != "v4", reason="requires an embedding engine")

CORES_PER_CHIP = {"v4": 0, "v5p": 4, "v6e": 2}[TPU]
# Samples of a step, over all replicas.
NUM_SAMPLES = 32
# The first two tables are stacked. No size is divisible by 8. The padded sizes
# of "ads" are equal for two and for four chips, although its rows are in other
# places. The name of the third table is also the name of its stack.
TABLES = {"ads": (70, 6), "users": (300, 6), "words": (41, 13)}
OPTIMIZERS = {
    "sgd": tpu.SGD(0.1),
    "adagrad": tpu.Adagrad(0.1, initial_accumulator_value=0.3),
    "adagrad_momentum": tpu.AdagradMomentum(
        0.1, momentum=0.9, exponent=3, beta2=0.9, epsilon=1e-3
    ),
    "adam": tpu.Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-3),
    "ftrl": tpu.FTRL(0.1, l1_regularization_strength=0.01, beta=0.3),
}


@pytest.fixture(
    name="kind",
    params=[
        # This optimizer has accumulators and another slot variable.
        "adagrad_momentum",
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in ("sgd", "adagrad", "adam", "ftrl")
        ),
    ],
)
def fixture_kind(request):
    return request.param


def rows_of(name):
    generator = np.random.default_rng(len(name))
    return generator.normal(size=TABLES[name]).astype(np.float32)


def config(num_replicas=NUM_CORES, sizes=TABLES, **options):
    return {
        name: tpu.FeatureConfig(
            tpu.TableConfig(
                *shape,
                initializer=tf.random_uniform_initializer(seed=1),
                combiner="sum",
                name=name,
            ),
            output_shape=[NUM_SAMPLES // num_replicas],
            **options,
        )
        for name, shape in sizes.items()
    }


class Restoring(restoring.SparseCoreRestore, tpu.TPUEmbeddingV2):
    """TensorFlow's class with the checkpoint methods of this package."""


def on_sparse_cores(kind, cls=tpu.TPUEmbeddingV2, sizes=TABLES):
    with STRATEGY.scope():
        return cls(config(sizes=sizes), OPTIMIZERS[kind])


def on_host(kind, num_shards=1, sizes=TABLES):
    return tlm.TPUEmbedding(
        config(1, sizes),
        OPTIMIZERS[kind],
        engine="host",
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )


def on_v1(kind, cls, build=True):
    tlm.emulation.initialize_tpu_system()
    with STRATEGY.scope():
        embedding = cls(config(), OPTIMIZERS[kind])
        if build:
            embedding.build()
    return embedding


def batches_of(step, num_replicas=NUM_CORES):
    """Returns ids and gradients of each replica; ids of a sample differ."""
    generator = np.random.default_rng(step)
    ids = {
        name: [
            generator.choice(
                num_rows, generator.integers(0, 4), replace=False
            ).tolist()
            for _ in range(NUM_SAMPLES)
        ]
        for name, (num_rows, _) in TABLES.items()
    }
    gradients = {
        name: generator.normal(size=[NUM_SAMPLES, dim]).astype(np.float32)
        for name, (_, dim) in TABLES.items()
    }
    size = NUM_SAMPLES // num_replicas
    for start in range(0, NUM_SAMPLES, size):
        part = slice(start, start + size)
        yield (
            {
                name: tf.ragged.constant(
                    one[part], dtype=tf.int64, ragged_rank=1
                )
                for name, one in ids.items()
            },
            {name: tf.constant(one[part]) for name, one in gradients.items()},
        )


def train_host(embedding, step):
    [(ids, gradients)] = batches_of(step, 1)
    embedding.enqueue(ids)
    embedding.dequeue()
    embedding.apply_gradients(gradients)


def train_v2(embedding, step):
    @tf.function
    def train(batches, gradients):
        def core(features, gradients):
            _, preserved = embedding(features)
            embedding.apply_gradients(gradients, preserved)

        STRATEGY.run(core, (batches, gradients))

    train(*_per_replica(step))


def train_v1(embedding, step):
    ids, gradients = _per_replica(step)

    @tf.function
    def train(batches, gradients):
        embedding.enqueue(batches)

        def core(gradients):
            embedding.dequeue()
            embedding.apply_gradients(gradients)

        STRATEGY.run(core, (gradients,))

    train(ids, gradients)


def _per_replica(step):
    parts = list(batches_of(step))
    return [
        STRATEGY.experimental_distribute_values_from_function(
            lambda context, index=index: parts[
                context.replica_id_in_sync_group
            ][index]
        )
        for index in range(2)
    ]


def values_of_host(embedding):
    found = {
        table.name: rows.numpy()
        for table, rows in embedding.embedding_tables.items()
    }
    for table, slots in embedding.slot_variables.items():
        for name, slot in slots.items():
            found[f"{table.name}/{name}"] = slot.numpy()
    return found


def values_of_v2(embedding):
    """Returns unsharded tables and slot variables, one row at a time."""
    found = {}
    for layout in embedding.embedding_layouts.values():
        num_rows, dim = layout.unsharded_shape
        for name, variable in embedding.variables[
            layout.stacked_table_name
        ].items():
            stack = np.concatenate([one.numpy() for one in variable.values])
            places = [
                (row + layout.sparse_core_shard_rotation)
                % layout.num_sparse_cores
                * layout.total_rows_per_sparse_core_shard
                + layout.sparse_core_shard_row_offset
                + row // layout.num_sparse_cores
                for row in range(num_rows)
            ]
            key = layout.table_name + f"/{name}" * (name != "parameters")
            found[key] = stack[places, :dim]
    return found


def check_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture(scope="module", name="reference")
def fixture_reference():
    """Returns a function of the optimizer: values after 2 and after 3 steps."""
    cache = {}

    def values(kind):
        if kind not in cache:
            embedding = on_host(kind)
            embedding.build()
            for table, rows in embedding.embedding_tables.items():
                rows.assign(rows_of(table.name))
            train_host(embedding, 0)
            train_host(embedding, 1)
            before = values_of_host(embedding)
            train_host(embedding, 2)
            cache[kind] = before, values_of_host(embedding)
        return cache[kind]

    return values


def write(embedding, path):
    dense = tf.Variable([1.0, 2.0])
    return tf.train.Checkpoint(e=embedding, dense=dense).write(str(path))


def restore(embedding, path):
    dense = tf.Variable([0.0, 0.0])
    status = tf.train.Checkpoint(e=embedding, dense=dense).read(str(path))
    np.testing.assert_array_equal(dense.numpy(), [1.0, 2.0])
    return status


def start_on_host(kind, path):
    """Writes a checkpoint of the host engine before the first step."""
    embedding = on_host(kind, num_shards=3)
    embedding.build()
    for table, rows in embedding.embedding_tables.items():
        rows.assign(rows_of(table.name))
    return write(embedding, path)


@pytest.fixture(name="on_chips")
def fixture_on_chips(kind, tmp_path):
    """Returns a checkpoint of TensorFlow's class after two steps."""
    saved = EXCHANGE / f"v2_{kind}"
    # Processes 3 and 4 read the files that process 1 wrote on two chips.
    if NUM_CORES == 4 or pathlib.Path(f"{saved}.index").is_file():
        return str(saved)
    host = start_on_host(kind, tmp_path / "host")
    embedding = on_sparse_cores(kind)
    path = str(tmp_path / "converted")
    tlm.planning.convert_checkpoint(host, path, embedding.embedding_layouts)
    restore(embedding, path)
    embedding.build()
    train_v2(embedding, 0)
    train_v2(embedding, 1)
    path = write(embedding, saved if EXCHANGE.is_dir() else tmp_path / "v2")
    return path


@on_chips_with_sparse_cores
def test_the_tables_are_stacked_and_padded(kind):
    embedding = on_sparse_cores(kind)
    layouts = embedding.embedding_layouts
    assert {one.stacked_table_name for one in layouts.values()} == {
        "ads_users",
        "words",
    }
    assert all(
        tuple(one.unsharded_shape) != tuple(one.unsharded_padded_shape)
        for one in layouts.values()
    )
    assert {one.num_sparse_cores for one in layouts.values()} == {
        CORES_PER_CHIP * NUM_CORES
    }


@on_chips_with_sparse_cores
@pytest.mark.parametrize("built", [False, True])
def test_the_host_engine_restores_stacked_tables(
    kind, built, on_chips, reference
):
    embedding = on_host(kind, num_shards=2)
    if built:
        embedding.build()
    status = restore(embedding, on_chips)
    embedding.build()
    status.assert_consumed()
    check_same(values_of_host(embedding), reference(kind)[0])
    train_host(embedding, 2)
    check_same(values_of_host(embedding), reference(kind)[1])


@on_chips_with_sparse_cores
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("source", ["host", "v2"])
def test_converted_tables_continue_on_chips(
    kind, source, built, on_chips, reference, tmp_path
):
    path = on_chips
    if source == "host":
        host = on_host(kind)
        restore(host, on_chips)
        host.build()
        path = write(host, tmp_path / "host")
    embedding = on_sparse_cores(kind)
    if built:
        embedding.build()
    target = str(tmp_path / "converted")
    tlm.planning.convert_checkpoint(path, target, embedding.embedding_layouts)
    status = restore(embedding, target)
    embedding.build()
    status.assert_consumed()
    check_same(values_of_v2(embedding), reference(kind)[0])
    train_v2(embedding, 2)
    check_same(values_of_v2(embedding), reference(kind)[1])


@on_chips_with_sparse_cores
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("source", ["host", "v2"])
def test_a_class_with_our_methods_restores_each_format(
    kind, source, built, on_chips, reference, tmp_path
):
    path = on_chips
    if source == "host":
        path = str(tmp_path / "host")
        tlm.planning.convert_checkpoint(on_chips, path)
    embedding = on_sparse_cores(kind, Restoring)
    if built:
        embedding.build()
    status = restore(embedding, path)
    embedding.build()
    status.assert_consumed()
    check_same(values_of_v2(embedding), reference(kind)[0])
    train_v2(embedding, 2)
    check_same(values_of_v2(embedding), reference(kind)[1])


@on_chips_with_sparse_cores
def test_an_optimizer_divides_by_no_padding(on_chips, kind, tmp_path):
    """The padded columns of trained rows stay finite."""
    host, target = str(tmp_path / "host"), str(tmp_path / "converted")
    tlm.planning.convert_checkpoint(on_chips, host)
    embedding = on_sparse_cores(kind)
    tlm.planning.convert_checkpoint(host, target, embedding.embedding_layouts)
    restore(embedding, target)
    train_v2(embedding, 2)
    for by_name in embedding.variables.values():
        for variable in by_name.values():
            assert all(
                np.isfinite(one.numpy()).all() for one in variable.values
            )


@on_chips_with_sparse_cores
def test_other_tables_raise_and_change_nothing(kind, on_chips, tmp_path):
    for sizes, message in (
        ({**TABLES, "users": (301, 6)}, r"'users' .*\[301, 6\].*\[300, 6\]"),
        ({"ads": (70, 6), "words": (41, 13)}, "tables of the checkpoint"),
    ):
        for embedding in (
            on_host(kind, sizes=sizes),
            on_sparse_cores(kind, Restoring, sizes),
        ):
            embedding.build()
            values_of = (
                values_of_host
                if isinstance(embedding, tlm.TPUEmbedding)
                else values_of_v2
            )
            before = values_of(embedding)
            with pytest.raises(ValueError, match=message):
                restore(embedding, on_chips)
            check_same(values_of(embedding), before)
        with pytest.raises(ValueError, match=message):
            tlm.planning.convert_checkpoint(
                on_chips, tmp_path / "no", embedding.embedding_layouts
            )
        assert not list(tmp_path.glob("no*"))


@on_chips_with_sparse_cores
@pytest.mark.skipif(NUM_CORES != 4, reason="reads files of other processes")
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_checkpoints_of_v1_continue_on_chips(kind, writer, reference, tmp_path):
    path = str(EXCHANGE / f"v1_{writer}_{kind}")
    embedding = on_sparse_cores(kind)
    target = str(tmp_path / "converted")
    tlm.planning.convert_checkpoint(path, target, embedding.embedding_layouts)
    restore(embedding, target)
    check_same(values_of_v2(embedding), reference(kind)[1])
    restored = on_sparse_cores(kind, Restoring)
    restore(restored, path)
    check_same(values_of_v2(restored), reference(kind)[1])


@on_v4
@pytest.mark.parametrize("built", [False, True])
def test_v1_restores_stacked_tables(kind, built, reference):
    embedding = on_v1(kind, tlm.TPUEmbedding, built)
    status = restore(embedding, EXCHANGE / f"v2_{kind}")
    embedding.build()
    status.assert_consumed()
    train_v1(embedding, 2)
    path = write(embedding, EXCHANGE / f"v1_ours_{kind}")
    host = on_host(kind)
    restore(host, path).assert_existing_objects_matched()
    host.build()
    check_same(values_of_host(host), reference(kind)[1])


@on_v4
def test_tensorflow_s_v1_restores_converted_tables(kind, reference, tmp_path):
    path = str(tmp_path / "converted")
    tlm.planning.convert_checkpoint(EXCHANGE / f"v2_{kind}", path)
    embedding = on_v1(kind, tpu.TPUEmbedding, build=False)
    restore(embedding, path)
    embedding.build()
    train_v1(embedding, 2)
    path = write(embedding, EXCHANGE / f"v1_stock_{kind}")
    host = on_host(kind)
    restore(host, path)
    host.build()
    check_same(values_of_host(host), reference(kind)[1])
