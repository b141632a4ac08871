"""A checkpoint of a table restores into tables with any other sharding.

Values are bitwise identical, and files are read block by block.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import peak_memory
from tests.sharded import restore_program
from tests.sharded.tables import cuts, placed
from tf_layoutmap.sharded import ShardedVariable, checkpoint
from tf_layoutmap.sharded.routing import parts

TensorFlowsOwn = tf.__internal__.distribute.ShardedVariable
DTYPES = (
    np.float32,
    np.float16,
    tf.bfloat16.as_numpy_dtype,
    np.int64,
    np.bool_,
    np.complex64,
    np.bytes_,
)
# TensorFlow cannot read slices of these dtypes, so its ShardedVariable is not
# tested with them.
UNSLICEABLE = (np.float16, np.bytes_)


@st.composite
def makers(draw, shape, dtype):
    """Draws a label and a function that creates a table from values."""
    kinds = ["ours", "ours", "ours", "one", "theirs"]
    kind = draw(st.sampled_from(kinds[:-1] if dtype in UNSLICEABLE else kinds))
    if kind == "ours":
        options = draw(cuts(shape))
        return lambda values: ShardedVariable.create(values, **options)
    if kind == "one":
        return tf.Variable
    sizes = np.diff(
        [
            0,
            *draw(
                st.lists(st.integers(1, shape[0]), max_size=3, unique=True).map(
                    sorted
                )
            ),
            shape[0],
        ]
    )
    bounds = np.cumsum([0, *sizes[sizes > 0]])
    return lambda values: TensorFlowsOwn(
        [tf.Variable(values[a:b]) for a, b in zip(bounds, bounds[1:])]
    )


def as_array(table):
    if isinstance(table, TensorFlowsOwn):
        return np.concatenate([v.numpy() for v in table.variables])
    return table.numpy()


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    values = rng.integers(0, 100, shape).astype(dtype)
    blank = np.zeros_like(values)
    if dtype == np.bytes_:
        values, blank = values.astype(object), values.astype(object)[::-1]
    return (
        values,
        blank,
        draw(makers(shape, dtype)),
        draw(makers(shape, dtype)),
    )


@pytest.mark.exhaustive
@settings(max_examples=200)
@given(case=cases())
def test_any_table_restores_into_any_other(tmp_path_factory, case):
    values, blank, make_saved, make_restored = case
    prefix = str(tmp_path_factory.mktemp("checkpoint") / "c")
    slot = values[::-1].copy()
    # The slot represents an optimizer's slot variable, which is a second table
    # of the same shape.
    path = tf.train.Checkpoint(
        table=make_saved(values), slots=[make_saved(slot)]
    ).write(prefix)
    table = make_restored(blank)
    slots = [make_restored(blank)]
    tf.train.Checkpoint(table=table, slots=slots).read(path).assert_consumed()
    np.testing.assert_array_equal(as_array(table), values)
    np.testing.assert_array_equal(as_array(slots[0]), slot)


@pytest.mark.parametrize("placement", ["div", "mod", "callable", "columns"])
def test_a_checkpoint_stores_rows_in_global_order(tmp_path, placement):
    values = np.arange(60.0).reshape(10, 6)
    path = tf.train.Checkpoint(table=placed(values, placement)).write(
        str(tmp_path / "c")
    )
    np.testing.assert_array_equal(
        tf.train.load_variable(path, "table/.ATTRIBUTES/VARIABLE_VALUE"), values
    )


@pytest.mark.parametrize("placement", ["div", "mod", "callable", "columns"])
def test_a_restore_holds_one_block_at_a_time(
    tmp_path, placement, monkeypatch, new_objects
):
    values = np.arange(64.0 * 8).reshape(64, 8)
    path = tf.train.Checkpoint(table=placed(values, "div", 8)).write(
        str(tmp_path / "c")
    )
    table = placed(np.zeros_like(values), placement, 8)
    held = []
    write = checkpoint.Block.write

    def noting(block, value):
        held.append(value.shape.num_elements())
        # These are all live tensors of this dtype, except the shards.
        alive = [
            t
            for t in new_objects()
            if isinstance(t, tf.Tensor)
            and t.dtype == tf.float64
            and t.shape.num_elements() >= 8
        ]
        sizes = [t.shape.num_elements() for t in alive]
        assert 64 <= sum(sizes) <= 64 + 8 * 8
        return write(block, value)

    monkeypatch.setattr(checkpoint.Block, "write", noting)
    tf.train.Checkpoint(table=table).read(path).assert_consumed()
    assert held == [64] * 8
    np.testing.assert_array_equal(table.numpy(), values)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("placement", ["div", "mod", "callable", "columns"])
def test_a_v1_graph_restores_every_block(tmp_path, placement, dtype):
    values = np.arange(64 * 8).reshape(64, 8).astype(dtype)
    path = tf.train.Checkpoint(table=placed(values, "div", 4)).write(
        str(tmp_path / "c")
    )
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = placed(np.zeros_like(values), placement, 3)
        full = tf.convert_to_tensor(table)
        status = tf.train.Checkpoint(table=table).read(path)
        session.run([shard.initializer for shard in table.variables])
        status.assert_consumed().run_restore_ops(session)
        np.testing.assert_array_equal(session.run(full), values)


@pytest.mark.parametrize(
    ("device", "on_cpu_machine", "on_gpu_machine"),
    [
        ("", True, False),
        ("/cpu:0", True, True),
        ("/gpu:0", False, False),
        ("/job:ps/device:CPU:0", False, False),
    ],
)
def test_a_session_places_a_shard_without_a_device_on_a_gpu(
    monkeypatch, device, on_cpu_machine, on_gpu_machine
):
    gpus = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    assert parts.is_local_cpu(device) == on_cpu_machine
    gpus.append("GPU")
    assert parts.is_local_cpu(device) == on_gpu_machine


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not peak_memory.is_available(), reason="Linux counts it")
@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({"num_shards": 8}, 1),
        ({"num_shards": 8, "placement": "mod"}, 1),
        # If columns are sharded, the restore holds one block while it reads
        # another block.
        ({"num_shards": 8, "axis": 1}, 2),
    ],
    ids=["div", "mod", "columns"],
)
def test_a_restore_allocates_at_most_one_extra_shard(tmp_path, options, held):
    path = tf.train.Checkpoint(
        table=restore_program.make(3.0, num_shards=8)
    ).write(str(tmp_path / "c"))
    extra = float(
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.sharded.restore_program",
                path,
                json.dumps(options),
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    # The table has 64 MiB, and a shard has 8 MiB. TensorFlow itself may use 8
    # MiB more.
    assert extra < held * 8 + 8


def test_training_continues_with_other_shards(tmp_path):
    class Model(tf.Module):
        def __init__(self, placement, num_shards):
            self.table = placed(
                np.zeros((10, 4), np.float32), placement, num_shards
            )
            self.accumulator = placed(
                np.full((10, 4), 0.1, np.float32), placement, num_shards
            )

        def step(self, ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.gather(self.table, ids) - 1.0) ** 2)
            gradient = tape.gradient(loss, self.table)
            self.accumulator.scatter_add(
                tf.IndexedSlices(gradient.values**2, gradient.indices)
            )
            scaled = gradient.values / tf.sqrt(
                tf.gather(self.accumulator, gradient.indices)
            )
            self.table.scatter_sub(
                tf.IndexedSlices(0.1 * scaled, gradient.indices)
            )

    trained = Model("div", 3)
    trained.step([1, 7, 9])
    path = tf.train.Checkpoint(model=trained).write(str(tmp_path / "c"))
    for placement in ("mod", "callable", "columns", "div"):
        again = Model(placement, 2)
        tf.train.Checkpoint(model=again).read(path).assert_consumed()
        trained_on = Model("div", 3)
        tf.train.Checkpoint(model=trained_on).read(path)
        for model in (again, trained_on):
            model.step([7, 0])
        np.testing.assert_array_equal(again.table, trained_on.table)
        np.testing.assert_array_equal(again.accumulator, trained_on.accumulator)
