"""A checkpoint contains one tensor per table for any number of shards."""

import numpy as np
import pytest
import tensorflow as tf

from tests.sharded.tables import make_table
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded import checkpoint as sharded_checkpoint

TensorFlowsOwn = tf.__internal__.distribute.ShardedVariable


def tensorflow_table(values, sizes):
    return TensorFlowsOwn(make_table(values, sizes).variables)


def one_variable(values, sizes):
    del sizes
    return tf.Variable(values)


def value_of(table):
    if isinstance(table, TensorFlowsOwn):
        return np.concatenate([v.numpy() for v in table.variables])
    return table.numpy()


KINDS = [
    (make_table, [10]),
    (make_table, [4, 3, 3]),
    (make_table, [1, 2, 0, 7]),
    (one_variable, None),
    (tensorflow_table, [5, 5]),
]
kinds = pytest.mark.parametrize(
    "kind", KINDS, ids=["one", "even", "uneven", "variable", "tensorflow's"]
)
into = pytest.mark.parametrize(
    "target", KINDS, ids=["one", "even", "uneven", "variable", "tensorflow's"]
)


@pytest.mark.covering(1)
@kinds
@into
def test_any_table_restores_into_any_other(values, tmp_path, kind, target):
    path = tf.train.Checkpoint(table=kind[0](values, kind[1])).write(
        str(tmp_path / "c")
    )
    restored = target[0](np.zeros_like(values), target[1])
    tf.train.Checkpoint(table=restored).read(path).assert_consumed()
    np.testing.assert_array_equal(value_of(restored), values)


@kinds
def test_the_checkpoint_has_one_tensor_per_table(values, tmp_path, kind):
    path = tf.train.Checkpoint(table=kind[0](values, kind[1])).write(
        str(tmp_path / "c")
    )
    name = "table/.ATTRIBUTES/VARIABLE_VALUE"
    assert dict(tf.train.list_variables(path))[name] == [10, 2]
    np.testing.assert_array_equal(tf.train.load_variable(path, name), values)


def test_a_table_created_after_the_restore_receives_its_value(
    values, sizes, tmp_path
):
    path = tf.train.Checkpoint(table=make_table(values, [4, 6])).write(
        str(tmp_path / "c")
    )
    checkpoint = tf.train.Checkpoint()
    status = checkpoint.read(path)
    checkpoint.table = make_table(np.zeros_like(values), sizes)
    status.assert_consumed()
    np.testing.assert_array_equal(checkpoint.table.numpy(), values)

    root, module = tf.train.Checkpoint(), tf.Module()
    module.table = make_table(values * 2, [4, 6])
    path = tf.train.Checkpoint(module=module).write(str(tmp_path / "m"))
    root.read(path)
    root.module = tf.Module()
    root.module.table = make_table(np.zeros_like(values), sizes)
    np.testing.assert_array_equal(root.module.table.numpy(), values * 2)


def test_a_checkpoint_manager_keeps_and_restores_the_newest(
    values, sizes, tmp_path
):
    table = make_table(values, sizes)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(table=table), str(tmp_path), max_to_keep=2
    )
    for _ in range(3):
        table.assign_add(np.ones((10, 2)))
        manager.save()
    table.assign(np.zeros((10, 2)))
    manager.restore_or_initialize()
    np.testing.assert_array_equal(table.numpy(), values + 3)


def test_async_checkpoints_hold_the_values_at_the_time_of_the_save(
    values, sizes, tmp_path
):
    table = make_table(values, sizes)
    checkpoint = tf.train.Checkpoint(table=table)
    options = tf.train.CheckpointOptions(enable_async=True)
    for factor in (1, 2):
        table.assign(values * factor)
        path = checkpoint.save(str(tmp_path / "c"), options=options)
        table.assign(np.zeros((10, 2)))
        checkpoint.sync()
        np.testing.assert_array_equal(
            tf.train.load_variable(path, "table/.ATTRIBUTES/VARIABLE_VALUE"),
            values * factor,
        )


@pytest.mark.parametrize(
    "other",
    [
        np.ones((9, 2), np.float32),
        np.ones((10, 3), np.float32),
        np.ones((20,), np.float32),
        np.ones((10, 2), np.float64),
    ],
    ids=["rows", "dim", "rank", "dtype"],
)
def test_a_mismatched_shape_or_dtype_raises_and_restores_nothing(
    values, tmp_path, other
):
    path = tf.train.Checkpoint(
        first=tf.Variable(5.0), table=make_table(values, [4, 6])
    ).write(str(tmp_path / "c"))
    first = tf.Variable(0.0)
    table = ShardedVariable.create(other, num_shards=3, name="ads")
    with pytest.raises(
        ValueError,
        match=(
            r"Table 'ads' must be restored from a tensor of shape .*"
            r"Received: shape \[10, 2\], dtype float32 \('table/"
        ),
    ):
        tf.train.Checkpoint(first=first, table=table).read(path)
    np.testing.assert_array_equal(table.numpy(), other)
    assert first.numpy() == 0


def test_a_truncated_checkpoint_raises(values, tmp_path):
    path = tf.train.Checkpoint(table=make_table(values, [4, 6])).write(
        str(tmp_path / "c")
    )
    (data,) = tmp_path.glob("c.data*")
    data.write_bytes(data.read_bytes()[:-20])
    table = make_table(np.zeros_like(values), [5, 5])
    with pytest.raises((tf.errors.OpError, IndexError), match="less bytes"):
        tf.train.Checkpoint(table=table).read(path)
    np.testing.assert_array_equal(table.numpy(), 0)


def damage(path, values):
    """Flips one bit of a file, in the middle of the bytes of `values`."""
    with open(path + ".data-00000-of-00001", "r+b") as file:
        content = file.read()
        found = np.ascontiguousarray(values).tobytes()
        assert content.count(found) == 1
        at = content.index(found) + len(found) // 2
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))


SHIFTS = {"first": 100, "plain": 200, "last": 300}


def written(values, tmp_path, kind):
    """Writes a checkpoint of two tables and a variable; all values differ."""
    make, sizes = kind
    return tf.train.Checkpoint(
        **{
            name: (one_variable if name == "plain" else make)(
                values + shift, sizes
            )
            for name, shift in SHIFTS.items()
        }
    ).write(str(tmp_path / "c"))


@pytest.mark.covering(2)
@pytest.mark.parametrize("part", ["first", "plain", "last"])
@pytest.mark.parametrize("late", [False, True])
@kinds
@pytest.mark.parametrize(
    "mine",
    [{"num_shards": 3}, {"placement": "mod", "num_shards": 3}, {"axis": 1}, {}],
    ids=str,
)
def test_a_corrupted_checkpoint_raises_and_restores_nothing(
    values, tmp_path, kind, mine, late, part
):
    path = written(values, tmp_path, kind)
    # The damage is not in the first rows.
    damage(path, (values + SHIFTS[part])[8:])
    objects = {
        "first": ShardedVariable.create(values, **mine),
        "plain": tf.Variable(values),
        "last": ShardedVariable.create(values, **mine),
    }
    if late:
        # If the restore is deferred, values are checked when the objects are
        # created.
        root = tf.train.Checkpoint()
        status = root.read(path)
        for name, table in objects.items():
            if name != part:
                setattr(root, name, table)
                np.testing.assert_array_equal(
                    table.numpy(), values + SHIFTS[name]
                )
        with pytest.raises(tf.errors.DataLossError):
            setattr(root, part, objects[part])
        del status
        objects = {part: objects[part]}
    else:
        with pytest.raises(tf.errors.DataLossError):
            tf.train.Checkpoint(**objects).read(path)
    for table in objects.values():
        np.testing.assert_array_equal(table.numpy(), values)


def test_a_graph_that_restores_a_corrupted_checkpoint_writes_nothing(tmp_path):
    values = np.arange(20, dtype=np.float32).reshape(10, 2)
    path = tf.train.Checkpoint(table=make_table(values, [3, 3, 4])).write(
        str(tmp_path / "c")
    )
    table = make_table(np.zeros_like(values), [4, 6])

    @tf.function
    def restore():
        found = sharded_checkpoint.saveables(
            table._own_shards, "table/.ATTRIBUTES/VARIABLE_VALUE"
        )
        sharded_checkpoint.fetch_in_turn(found, path)
        found[0].restore([tf.zeros([1, 1])], None)

    restore()
    np.testing.assert_array_equal(table.numpy(), values)
    damage(path, values[6:])
    table.assign(np.zeros_like(values))
    with pytest.raises(tf.errors.DataLossError):
        restore()
    np.testing.assert_array_equal(table.numpy(), 0)


@pytest.mark.parametrize("shape", [(0, 2), (5, 0), (0,)])
@pytest.mark.parametrize("options", [{"num_shards": 3}, {"placement": "mod"}])
def test_a_table_without_elements_is_saved_and_restored(
    tmp_path, shape, options
):
    values = np.zeros(shape, np.float32)
    table = ShardedVariable.create(values, **options)
    path = tf.train.Checkpoint(table=table).write(tmp_path / "empty")
    for target in (
        table,
        tf.Variable(values),
        ShardedVariable.create(values, num_shards=2),
    ):
        tf.train.Checkpoint(table=target).read(path).assert_consumed()
        assert value_of(target).shape == shape
