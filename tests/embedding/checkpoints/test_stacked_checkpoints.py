"""Checkpoints with stacked tables, written by `convert_checkpoint`.

`tests/emulation/programs/sparse_core_checkpoints.py` contains the tests with
TensorFlow's class.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.checkpoints import stacks
from tests.embedding.servers import local
from tf_layoutmap.vocabulary import checkpoint_files

tpu = tf.tpu.experimental.embedding

TABLES = {"ads": (70, 6), "users": (33, 6), "a/b.c": (9, 3)}
# A table that is alone in its stack has the name of its stack.
STACKS = {
    "ads_users": {name: TABLES[name] for name in ("ads", "users")},
    "a/b.c": {"a/b.c": TABLES["a/b.c"]},
}


def features(sizes=TABLES):
    return {
        name: tpu.FeatureConfig(
            tpu.TableConfig(
                *shape,
                initializer=tf.random_uniform_initializer(seed=1),
                combiner="sum",
                name=name,
            )
        )
        for name, shape in sizes.items()
    }


def embedding_of(optimizer, sizes=TABLES, num_shards=1, **options):
    return tlm.TPUEmbedding(
        features(sizes),
        optimizer,
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        **options,
    )


def trained(optimizer=None, num_shards=2, sizes=TABLES):
    """Returns an embedding whose rows and slot variables all differ."""
    embedding = embedding_of(
        optimizer or tpu.Adam(0.1), sizes, num_shards=num_shards
    )
    embedding.build()
    generator = np.random.default_rng(0)
    for variable in [
        *embedding.embedding_tables.values(),
        *(
            slot
            for slots in embedding.slot_variables.values()
            for slot in slots.values()
        ),
    ]:
        variable.assign(generator.uniform(0.1, 1.0, variable.shape))
    return embedding


def values_of(embedding):
    found = {
        table.name: rows.numpy()
        for table, rows in embedding.embedding_tables.items()
    }
    for table, slots in embedding.slot_variables.items():
        for name, slot in slots.items():
            found[f"{table.name}/{name}"] = slot.numpy()
    return found


def check_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def stacked(embedding, path, num_cores=2, **others):
    """Writes a checkpoint of SparseCores; returns its prefix."""
    source = tf.train.Checkpoint(
        model=tf.train.Checkpoint(e=embedding), **others
    )
    source = source.write(str(path / f"host_{num_cores}"))
    target = str(path / f"cores_{num_cores}")
    tlm.planning.convert_checkpoint(
        source, target, stacks.layouts_of(STACKS, num_cores)
    )
    return target


def restore(embedding, path, **others):
    return tf.train.Checkpoint(
        model=tf.train.Checkpoint(e=embedding), **others
    ).read(path)


@pytest.mark.parametrize(
    "optimizer",
    [
        tpu.SGD(0.1),
        tpu.Adagrad(0.1),
        tpu.AdagradMomentum(0.1, momentum=0.5),
        tpu.Adam(0.1),
        tpu.FTRL(0.1),
        # These have slot variables with one number per row.
        tlm.optimizers.LAMB(0.1),
        tlm.optimizers.RowwiseAdagrad(0.1),
    ],
    ids=lambda one: type(one).__name__,
)
def test_rows_and_slots_survive_other_numbers_of_cores(optimizer, tmp_path):
    embedding = trained(optimizer)
    wanted = values_of(embedding)
    on_two = stacked(embedding, tmp_path, 2)
    four, two, host = (str(tmp_path / name) for name in ("4", "2", "host"))
    tlm.planning.convert_checkpoint(on_two, four, stacks.layouts_of(STACKS, 4))
    tlm.planning.convert_checkpoint(four, two, stacks.layouts_of(STACKS, 2))
    tlm.planning.convert_checkpoint(two, host)
    for path in (on_two, four, two, host):
        found = embedding_of(optimizer)
        found.build()
        restore(found, path).assert_consumed()
        check_same(values_of(found), wanted)
    [before, after] = (tf.train.load_checkpoint(one) for one in (on_two, two))
    assert (
        before.get_variable_to_shape_map() == after.get_variable_to_shape_map()
    )


def test_tables_with_one_column_are_stacked_with_others(tmp_path):
    """Only the other table shows that a variable has one number per row."""
    sizes = {"ads": (5, 1), "users": (9, 3)}
    for name, layouts in (
        ("together", stacks.layouts_of({"s": sizes}, 2)),
        (
            "alone",
            stacks.layouts_of({name: {name: sizes[name]} for name in sizes}, 2),
        ),
    ):
        embedding = trained(tlm.optimizers.LAMB(0.1), sizes=sizes)
        source = tf.train.Checkpoint(e=embedding).write(
            str(tmp_path / f"host_{name}")
        )
        paths = [str(tmp_path / f"{name}_{end}") for end in ("cores", "host")]
        tlm.planning.convert_checkpoint(source, paths[0], layouts)
        tlm.planning.convert_checkpoint(paths[0], paths[1])
        for path in paths:
            found = embedding_of(tlm.optimizers.LAMB(0.1), sizes)
            found.build()
            tf.train.Checkpoint(e=found).read(path).assert_consumed()
            check_same(values_of(found), values_of(embedding))


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_stacked_tables_restore_into_shards(built, num_shards, tmp_path):
    embedding, dense = trained(), tf.Variable([1.0, 2.0])
    path = stacked(embedding, tmp_path, dense=dense)
    found = embedding_of(tpu.Adam(0.1), num_shards=num_shards)
    restored = tf.Variable([0.0, 0.0])
    if built:
        found.build()
    status = restore(found, path, dense=restored)
    found.build()
    status.assert_consumed()
    check_same(values_of(found), values_of(embedding))
    assert restored.numpy().tolist() == [1.0, 2.0]


def test_tables_on_servers_restore_stacked_tables(tmp_path):
    embedding = trained()
    path = stacked(embedding, tmp_path)
    with local.servers(2):
        found = tlm.TPUEmbedding(features(), tpu.Adam(0.1))
    found.build()
    restore(found, path).assert_consumed()
    check_same(values_of(found), values_of(embedding))


def test_other_stacks_restore(tmp_path):
    """Each table has a stack of its own name, with other padding."""
    embedding = trained()
    source = stacked(embedding, tmp_path)
    target = str(tmp_path / "unstacked")
    alone = {name: {name: shape} for name, shape in TABLES.items()}
    tlm.planning.convert_checkpoint(source, target, stacks.layouts_of(alone, 4))
    for built in (False, True):
        found = embedding_of(tpu.Adam(0.1))
        if built:
            found.build()
        status = restore(found, target)
        found.build()
        status.assert_consumed()
        check_same(values_of(found), values_of(embedding))


def test_the_newest_restore_before_build_is_applied(tmp_path):
    old, new = trained(), trained()
    for table in new.embedding_tables.values():
        table.assign(tf.ones_like(table))
    old_files = [stacked(old, tmp_path), str(tmp_path / "host_2")]
    (tmp_path / "new").mkdir()
    new_files = [stacked(new, tmp_path / "new"), str(tmp_path / "new/host_2")]
    for first in old_files:
        for second in new_files:
            found = embedding_of(tpu.Adam(0.1))
            restore(found, first).expect_partial()
            restore(found, second).expect_partial()
            found.build()
            check_same(values_of(found), values_of(new))


def test_tables_for_serving_need_no_slots(tmp_path):
    embedding = trained()
    path = stacked(embedding, tmp_path)
    found = embedding_of(None)
    restore(found, path).expect_partial()
    found.build()
    wanted = values_of(embedding)
    check_same(values_of(found), {name: wanted[name] for name in TABLES})


@pytest.mark.parametrize(
    "sizes, optimizer, message",
    [
        (
            {**TABLES, "users": (34, 6)},
            tpu.Adam(0.1),
            r"'users' .* shape \[34, 6\]\. Received: shape \[33, 6\]",
        ),
        (
            {**TABLES, "users": (33, 5)},
            tpu.Adam(0.1),
            r"'users' .* shape \[33, 5\]\. Received: shape \[33, 6\]",
        ),
        (
            {**TABLES, "more": (3, 6)},
            tpu.Adam(0.1),
            r"tables of the checkpoint, \['a/b.c', 'ads', 'users'\]",
        ),
        ({"ads": (70, 6)}, tpu.Adam(0.1), r"Received: \['ads'\]"),
        (TABLES, tpu.FTRL(0.1), r"without \['accumulators', 'linears'\]"),
    ],
)
def test_tables_that_do_not_match_change_nothing(
    sizes, optimizer, message, tmp_path
):
    path = stacked(trained(), tmp_path, dense=tf.Variable(1.0))
    found, dense = embedding_of(optimizer, sizes), tf.Variable(0.0)
    with pytest.raises(ValueError, match=message):
        restore(found, path, dense=dense)
    found.build()
    wanted = values_of(found)
    with pytest.raises(ValueError, match=message):
        restore(found, path, dense=dense)
    check_same(values_of(found), wanted)
    assert dense.numpy() == 0.0


def test_another_shape_of_a_slot_variable_changes_nothing(tmp_path):
    """The slot variables of two optimizers can have the same names."""
    path = stacked(trained(tpu.Adagrad(0.1)), tmp_path)
    found = embedding_of(tlm.optimizers.RowwiseAdagrad(0.1))
    found.build()
    before = values_of(found)
    with pytest.raises(
        ValueError,
        match=r"'accumulators' of table .* \[128, 1\]\. Received: .*, 8\]",
    ):
        restore(found, path)
    check_same(values_of(found), before)


def test_tables_that_sparse_cores_do_not_have_raise(tmp_path):
    path = stacked(trained(), tmp_path)
    for options, message in (
        ({"table_dtypes": "bfloat16"}, "bfloat16 rows"),
        (
            {"vocabularies": {"ads": tlm.vocabulary.OpenVocabulary(70)}},
            "open vocabulary",
        ),
    ):
        found = embedding_of(tpu.Adam(0.1), **options)
        found.build()
        with pytest.raises(ValueError, match=message):
            restore(found, path)


def test_a_damaged_file_changes_nothing(tmp_path):
    embedding = trained()
    path = stacked(embedding, tmp_path)
    damaged = values_of(embedding)["users"][-1].tobytes()
    for data in tmp_path.glob("cores_2.data-*"):
        content = bytearray(data.read_bytes())
        if damaged in content:
            content[content.index(damaged)] ^= 1
            data.write_bytes(content)
            break
    else:
        raise AssertionError("The rows must be in a file.")
    found = embedding_of(tpu.Adam(0.1))
    found.build()
    before = values_of(found)
    with pytest.raises(tf.errors.DataLossError):
        restore(found, path)
    check_same(values_of(found), before)
    with pytest.raises(ValueError, match="truncated or corrupted"):
        tlm.planning.convert_checkpoint(path, tmp_path / "target")
    assert not list(tmp_path.glob("target*"))


def test_enqueued_steps_prevent_a_restore(tmp_path):
    embedding = trained()
    path = stacked(embedding, tmp_path)
    embedding.enqueue({name: tf.constant([1]) for name in TABLES})
    before = values_of(embedding)
    with pytest.raises(RuntimeError, match="reset"):
        restore(embedding, path)
    check_same(values_of(embedding), before)


def test_stacks_that_contradict_their_layouts_raise(tmp_path):
    path = stacked(trained(), tmp_path)
    reader = tf.train.load_checkpoint(path)
    tensors = {
        key: reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
    }
    [key] = [
        key
        for key in tensors
        if key.endswith("ads_users/.ATTRIBUTES/VARIABLE_VALUE")
    ]
    tensors[key] = tensors[key][:-8]
    target = str(tmp_path / "target")
    checkpoint_files.write_checkpoint(target, tensors.items())
    with pytest.raises(ValueError, match=r"'ads' .* shape \[128, 8\]"):
        restore(embedding_of(tpu.Adam(0.1)), target)


def test_a_layer_restores_stacked_tables_and_saves_keras_files(tmp_path):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.tables = tlm.layers.TPUEmbedding(features(), tpu.Adam(0.1))
            self({name: tf.constant([[1]]) for name in TABLES})

        def call(self, ids):
            return self.tables(ids)

    embedding = trained()
    path = stacked(embedding, tmp_path)
    first, second = Model(), Model()
    restore(first.tables.embedding, path).assert_consumed()
    first.save_weights(tmp_path / "first.weights.h5")
    second.load_weights(tmp_path / "first.weights.h5")
    check_same(values_of(second.tables.embedding), values_of(embedding))
    again = stacked(second.tables.embedding, tmp_path, 4)
    found = embedding_of(tpu.Adam(0.1))
    restore(found, again)
    found.build()
    check_same(values_of(found), values_of(embedding))


@pytest.fixture(name="two")
def fixture_two(tmp_path):
    """Returns a checkpoint of two embeddings, and the embeddings."""
    one, other = trained(), trained()
    for table in other.embedding_tables.values():
        table.assign(tf.ones_like(table))
    return (
        one,
        other,
        tf.train.Checkpoint(one=one, other=other).write(
            str(tmp_path / "source")
        ),
    )


def test_one_of_several_embeddings_is_converted(two, tmp_path):
    one, other, path = two
    with pytest.raises(ValueError, match=r"one of \['one', 'other'\].*=None"):
        tlm.planning.convert_checkpoint(path, tmp_path / "x", {})
    paths = [path, *(str(tmp_path / name) for name in ("first", "second"))]
    for name, source, target in zip(("other", "one"), paths, paths[1:]):
        tlm.planning.convert_checkpoint(
            source, target, stacks.layouts_of(STACKS, 2), embedding=name
        )
    for path in paths:
        found = [embedding_of(tpu.Adam(0.1)) for _ in range(2)]
        status = tf.train.Checkpoint(one=found[0], other=found[1]).read(path)
        for embedding in found:
            embedding.build()
        status.assert_consumed()
        check_same(values_of(found[0]), values_of(one))
        check_same(values_of(found[1]), values_of(other))


def test_invalid_arguments_raise(tmp_path):
    embedding = trained()
    path = stacked(embedding, tmp_path)
    host = str(tmp_path / "host_2")
    layouts = stacks.layouts_of(STACKS, 2)
    target = tmp_path / "target"
    with pytest.raises(ValueError, match="another prefix than `source`"):
        tlm.planning.convert_checkpoint(path, path)
    with pytest.raises(ValueError, match="must be the prefix of a checkpoint"):
        tlm.planning.convert_checkpoint(tmp_path / "no", target)
    with pytest.raises(TypeError, match="`embedding_layouts` of a"):
        tlm.planning.convert_checkpoint(path, target, embedding)
    with pytest.raises(TypeError, match="`embedding_layouts` of a"):
        tlm.planning.convert_checkpoint(path, target, {"ads": (70, 6)})
    with pytest.raises(ValueError, match="are not stacked"):
        tlm.planning.convert_checkpoint(host, target)
    with pytest.raises(ValueError, match=r"one of \['model/e'\]"):
        tlm.planning.convert_checkpoint(path, target, layouts, embedding="e")
    other = stacks.layouts_of({"s": {**TABLES, "ads": (71, 6)}}, 2)
    with pytest.raises(ValueError, match=r"'ads' .*\[71, 6\]"):
        tlm.planning.convert_checkpoint(host, target, other)
    mixed = tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(*shape, name=name, optimizer=optimizer)
            )
            for (name, shape), optimizer in zip(
                TABLES.items(), [tpu.Adam(0.1), tpu.SGD(0.1), tpu.SGD(0.1)]
            )
        },
        None,
    )
    mixed.build()
    source = tf.train.Checkpoint(e=mixed).write(str(tmp_path / "mixed"))
    with pytest.raises(ValueError, match=r"'users' .*'velocities'.* without"):
        tlm.planning.convert_checkpoint(source, target, layouts)
    assert not list(tmp_path.glob("target*"))


def test_open_vocabularies_are_not_converted(tmp_path):
    embedding = embedding_of(
        tpu.SGD(0.1),
        vocabularies={"ads": tlm.vocabulary.OpenVocabulary(70)},
    )
    embedding.build()
    source = tf.train.Checkpoint(e=embedding).write(str(tmp_path / "source"))
    with pytest.raises(ValueError, match="'ads' must have ids"):
        tlm.planning.convert_checkpoint(
            source, tmp_path / "target", stacks.layouts_of(STACKS, 2)
        )


def test_rows_of_16_bits_become_float32(tmp_path):
    embedding = embedding_of(tpu.Adagrad(0.1), table_dtypes="bfloat16")
    embedding.build()
    path = stacked(embedding, tmp_path)
    found = embedding_of(tpu.Adagrad(0.1))
    restore(found, path)
    found.build()
    wanted = values_of(embedding)
    check_same(
        values_of(found),
        {name: value.astype(np.float32) for name, value in wanted.items()},
    )
