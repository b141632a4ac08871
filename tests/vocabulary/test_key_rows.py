"""Rows are written, read, exported and imported by key."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests import strategies
from tests.embedding.host import open_table_cases as cases
from tests.reference import vocabulary as reference
from tf_layoutmap._core import ops
from tf_layoutmap.vocabulary import key_rows, key_tensors

tpu = tf.tpu.experimental.embedding


def make(capacity=64, optimizer=None, *, dim=3, num_shards=1, **arguments):
    options = {
        name: arguments.pop(name)
        for name in ("table_dtypes", "pipeline_execution_with_tensor_core")
        if name in arguments
    }
    one, config = cases.embedding(
        tlm.vocabulary.OpenVocabulary(capacity, **arguments),
        optimizer or tpu.Adagrad(0.1, initial_accumulator_value=0.5),
        dim=dim,
        num_shards=num_shards,
        **options,
    )
    one.build()
    return one, config


def contents(vocabulary, block_size=key_rows.BLOCK_SIZE):
    """Returns (row, slots, count, last step) by key."""
    found = {}
    for block in vocabulary.blocks(block_size):
        assert block.rows.dtype == np.float32
        slots = [block.slots[name] for name in sorted(block.slots)]
        for i, key in enumerate(block.keys.tolist()):
            assert key not in found
            found[key] = (
                block.rows[i].tolist(),
                [slot[i].tolist() for slot in slots],
                int(block.counts[i]),
                int(block.last_steps[i]),
            )
    return found


def train(one, keys, dim=3):
    one.enqueue({"ids": tf.constant(keys)})
    one.dequeue()
    one.apply_gradients({"ids": tf.ones([len(keys), dim])})


def test_written_rows_are_looked_up_and_trained():
    one, config = make(num_shards=3)
    vocabulary = one.vocabularies["words"]
    keys = np.array([5, -7, 2**62])
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    written = vocabulary.write(
        keys, rows, {"accumulators": np.full([3, 3], 4.0)}
    )
    assert (written.num_written, written.num_new) == (3, 3)
    assert written.without_row.tolist() == []
    np.testing.assert_array_equal(one({"ids": keys})["ids"], rows)
    assert contents(vocabulary)[5] == ([0.0, 1.0, 2.0], [[4.0] * 3], 1, 0)
    train(one, [5])
    # An Adagrad update with the gradient 1 and the accumulator 4 + 1.
    np.testing.assert_allclose(
        one({"ids": tf.constant([5])})["ids"][0],
        rows[0] - 0.1 / np.sqrt(5.0),
        rtol=1e-6,
    )
    again = vocabulary.write(keys[:1], rows[2:])
    assert (again.num_written, again.num_new) == (1, 0)
    assert contents(vocabulary)[5] == ([6.0, 7.0, 8.0], [[5.0] * 3], 2, 1)


def test_new_keys_get_initial_values_for_missing_arguments():
    one, _ = make()
    trained, _ = make()
    one.vocabularies["words"].write([3, 4])
    trained.enqueue({"ids": tf.constant([3, 4])})
    np.testing.assert_array_equal(
        one({"ids": tf.constant([3, 4])})["ids"], trained.dequeue()["ids"]
    )
    assert contents(one.vocabularies["words"])[3][1] == [[0.5] * 3]
    before = contents(one.vocabularies["words"])
    assert one.vocabularies["words"].write([3, 4]).num_new == 0
    assert contents(one.vocabularies["words"]) == before


def test_a_write_bypasses_admission_and_reports_keys_without_a_place():
    one, _ = make(8, admission="count", min_count=200)
    vocabulary = one.vocabularies["words"]
    train(one, [1, 2])
    assert not vocabulary.stats()["num_keys"]
    written = vocabulary.write(np.arange(10, 21), np.ones([11, 3]))
    assert (written.num_written, written.num_new) == (8, 8)
    assert written.without_row.tolist() == [18, 19, 20]
    stats = vocabulary.stats()
    assert (stats["num_keys"], stats["num_admitted"]) == (8, 8)
    assert (stats["num_full"], stats["num_evicted"]) == (3, 0)
    vocabulary.evict([10])
    assert vocabulary.write([19], np.ones([1, 3])).num_written == 1


def test_strings_are_written_and_reported_as_strings():
    one, _ = make(8)
    vocabulary = one.vocabularies["words"]
    names = [f"word {i}" for i in range(10)]
    written = vocabulary.write(names, np.ones([10, 3]))
    assert written.without_row.tolist() == [b"word 8", b"word 9"]
    assert vocabulary.contains(names).numpy().sum() == 8
    (block,) = vocabulary.blocks()
    assert block.key_type == "strings"
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be strings"):
        vocabulary.write([1], np.ones([1, 3]))


def test_counts_and_last_steps_are_written():
    one, _ = make(evict="lfu")
    vocabulary = one.vocabularies["words"]
    for _ in range(5):
        train(one, [1])
    vocabulary.write([1, 2], counts=[7, 9], last_steps=[2, 3])
    found = contents(vocabulary)
    # The last step of a known key does not decrease.
    assert [found[key][2:] for key in (1, 2)] == [(7, 5), (9, 3)]
    with pytest.raises(ValueError, match=r"`last_steps` must be in \[0, 5\]"):
        vocabulary.write([2], last_steps=[6])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rows_are_rounded_and_read_exactly(dtype):
    one, _ = make(table_dtypes=dtype)
    vocabulary = one.vocabularies["words"]
    rows = np.array([[1.0, 1 / 3, -2e-5]], np.float32)
    vocabulary.write([1], rows)
    expected = tf.cast(tf.cast(rows, dtype), tf.float32).numpy()
    (block,) = vocabulary.blocks()
    np.testing.assert_array_equal(block.rows, expected)
    vocabulary.write([2], block.rows)
    assert contents(vocabulary)[2][0] == expected[0].tolist()
    if dtype == "float16":
        with pytest.raises(ValueError, match="`rows` must be in the range of"):
            vocabulary.write([3], [[0.0, 1e5, 0.0]])
        assert not vocabulary.contains(3)


def test_invalid_arguments_raise_and_write_nothing():
    one, _ = make()
    vocabulary = one.vocabularies["words"]
    vocabulary.write([1], np.ones([1, 3]))
    before = contents(vocabulary)
    rows = np.zeros([2, 3])
    for arguments, message in (
        (([1, 1], rows), r"`keys` must be without duplicates.*1 at the ind"),
        (([1, -(2**63)], rows), r"`keys` must be different from -2\^63"),
        (([[1, 2]], rows), r"`keys` must be of shape \[num_keys\]"),
        (([1, 2], rows[:1]), r"`rows` must be of shape \(2, 3\)"),
        (([1, 2], rows, {"momenta": rows}), r"names from \['accumulators'\]"),
        (([1, 2], rows, {"accumulators": rows[:, :1]}), r"slots\['accumulat"),
    ):
        with pytest.raises(ValueError, match=message):
            vocabulary.write(*arguments)
    for wrong, message in (
        (rows.astype(str), "`rows` must be of real numbers"),
        (rows + 1j, "`rows` must be of real numbers"),
        (rows + 1e39, "`rows` must be in the range of float32"),
    ):
        with pytest.raises(ValueError, match=message):
            vocabulary.write([1, 2], wrong)
    with pytest.raises(ValueError, match=r"slots\['accumulators'\]` must be"):
        vocabulary.write([1, 2], slots={"accumulators": rows - 1e300})
    with pytest.raises(ValueError, match="`counts` must be integers of shape"):
        vocabulary.write([1, 2], rows, counts=[1.5, 2.0])
    with pytest.raises(ValueError, match=r"`counts` must be in \[0, 2147"):
        vocabulary.write([1, 2], rows, counts=[1, -2])
    with pytest.raises(TypeError, match="`keys` must be integers that int64"):
        vocabulary.write([1.5], rows[:1])
    assert contents(vocabulary) == before
    for call in (
        lambda: vocabulary.write([1]),
        vocabulary.blocks,
        lambda: vocabulary.export("/nowhere"),
    ):
        with pytest.raises(RuntimeError, match="outside tf.function"):
            tf.function(call)()
    with pytest.raises(ValueError, match="`block_size` must be"):
        vocabulary.blocks(7)
    with pytest.raises(ValueError, match="`format` must be one of"):
        vocabulary.export("/nowhere", format="csv")


def test_a_pending_update_is_applied_before_rows_are_written_or_read():
    one, _ = make(pipeline_execution_with_tensor_core=True)
    vocabulary = one.vocabularies["words"]
    train(one, [1, 2])
    vocabulary.write([1], np.full([1, 3], 9.0))
    assert contents(vocabulary)[1][0] == [9.0] * 3
    train(one, [2])
    read = contents(vocabulary)[2]
    one.flush()
    assert contents(vocabulary)[2] == read


def test_rows_are_written_and_read_after_a_resize():
    one, _ = make(8)
    vocabulary = one.vocabularies["words"]
    vocabulary.write(np.arange(8), np.ones([8, 3]))
    assert vocabulary.write([8], np.ones([1, 3])).without_row.tolist() == [8]
    vocabulary.resize(100)
    assert vocabulary.write([8], np.full([1, 3], 2.0)).num_new == 1
    found = contents(vocabulary)
    assert sorted(found) == list(range(9))
    assert found[8][0] == [2.0] * 3 and found[7][0] == [1.0] * 3


def test_the_last_row_of_unknown_keys_is_not_exported():
    one, _ = make(8, tpu.SGD(0.1), oov_embedding="trainable")
    vocabulary = one.vocabularies["words"]
    vocabulary.write(np.arange(8))
    assert sorted(contents(vocabulary)) == list(range(8))
    (block,) = vocabulary.blocks()
    assert block.rows.shape == (8, 3)


def test_a_step_in_flight_keeps_its_rows():
    one, _ = make(8, tpu.SGD(1.0), dim=1)
    vocabulary = one.vocabularies["words"]
    one.enqueue({"ids": tf.constant(np.arange(8))})
    one.dequeue()
    # An earlier last step must not allow another key to evict the key.
    vocabulary.write([3], [[100.0]], last_steps=[0])
    one.enqueue({"ids": tf.constant([50])})
    assert vocabulary.contains(3) and not vocabulary.contains(50)
    one.apply_gradients({"ids": tf.ones([8, 1])})
    assert contents(vocabulary)[3][0] == [99.0]


def test_a_write_under_replicas_changes_the_table_once():
    with strategies.mirrored(2).scope():
        one, _ = make(num_shards=2)
    vocabulary = one.vocabularies["words"]
    vocabulary.write([1, 2], np.ones([2, 3]))
    assert contents(vocabulary)[2][0] == [1.0] * 3


def test_the_next_delta_contains_written_rows(tmp_path):
    one, _ = make(num_shards=2)
    vocabulary = one.vocabularies["words"]
    train(one, [1, 2])
    checkpoint = tf.train.Checkpoint(embedding=one)
    base = checkpoint.save(tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    vocabulary.write([2, 3], np.ones([2, 3]))
    assert writer.write().meta.tables["words"]["num_rows"] == 2
    expected = contents(vocabulary)
    full = tlm.deltas.apply(base, tmp_path / "deltas")
    other, _ = make()
    tf.train.Checkpoint(embedding=other).restore(full)
    assert contents(other.vocabularies["words"]) == expected


def test_blocks_during_training_contain_the_rows_of_their_keys():
    """All rows keep their initial values, which depend on the key."""
    one, _ = make(256, tpu.SGD(0.0), dim=5, num_shards=3)
    vocabulary = one.vocabularies["words"]
    is_done = threading.Event()

    def train_on_new_keys():
        for step in range(60):
            train(one, np.arange(200) + 100 * step, 5)
        is_done.set()

    thread = threading.Thread(target=train_on_new_keys)
    thread.start()
    values = one._state.spec.tables[0].vocabulary.first_values
    num_blocks = 0
    while not is_done.is_set():
        for block in vocabulary.blocks(64):
            num_blocks += 1
            np.testing.assert_array_equal(
                block.rows,
                ops.first_rows(
                    keys=block.keys,
                    kind=values.kind,
                    limits=values.limits,
                    seed=values.seed,
                    dim=5,
                ),
            )
    thread.join()
    assert num_blocks > 20
    assert vocabulary.stats()["num_evicted"] > 1000


@given(
    capacity=st.integers(1, 90),
    num_shards=st.integers(1, 5),
    block_size=st.integers(8, 80),
    program=st.lists(
        st.tuples(
            st.sampled_from(["train", "write", "write_all", "evict"]),
            st.lists(
                st.one_of(st.integers(-5, 120), st.integers(-(2**60), 2**60)),
                min_size=1,
                max_size=40,
            ),
        ),
        max_size=6,
    ),
    keep_strings=st.booleans(),
)
@settings(max_examples=20)
def test_random_programs_match_the_reference(
    capacity, num_shards, block_size, program, keep_strings
):
    """Each row is the number of the call that wrote it last."""
    one, _ = make(
        capacity,
        tpu.SGD(0.0),
        dim=1,
        num_shards=num_shards,
        keep_strings=keep_strings,
    )
    vocabulary = one.vocabularies["words"]
    model = reference.Vocabulary(capacity)
    strings = reference.Strings(model)
    rows: dict[int, float] = {}
    step = 0
    for number, (kind, ids) in enumerate(program, 1):
        if keep_strings:
            ids = [str(one).encode() for one in ids]
            keys = key_tensors.hash_strings(tf.constant(ids)).numpy().tolist()
        else:
            keys = ids
        unique = list(dict.fromkeys(keys))
        unique_ids = list(dict.fromkeys(ids))
        if kind == "train":
            step += 1
            train(one, ids, 1)
            model.admit(keys, step, step)
            strings.keep(keys, ids)
        elif kind == "evict":
            vocabulary.evict(unique_ids)
            model.evict(unique, step + 1)
        else:
            values = [
                [(7 * number + i) % (step + 1) for i in range(len(unique))],
                [number + i for i in range(len(unique))],
            ]
            if kind == "write":
                values = [None, None]
            written = vocabulary.write(
                unique_ids,
                np.full([len(unique), 1], number),
                last_steps=values[0],
                counts=values[1],
            )
            expected, new = model.write(unique, step, *values)
            strings.keep(unique, unique_ids)
            assert written.num_new == len(new)
            assert written.without_row.tolist() == [
                one for one, row in zip(unique_ids, expected) if row < 0
            ]
            rows.update(
                (key, float(number))
                for key, row in zip(unique, expected)
                if row >= 0
            )
        found = {
            (key, last_step, count)
            for key, (_, _, count, last_step) in contents(
                vocabulary, block_size
            ).items()
        }
        assert found == {
            (key, last_step, count)
            for key, _, last_step, count in model.export()
        }
        rows = {key: row for key, row in rows.items() if key in model.known}
        for key, (row, *_) in contents(vocabulary, block_size).items():
            if key in rows:
                assert row == [rows[key]]
        if keep_strings:
            assert vocabulary.keys().numpy().tolist() == strings.names()
            names = [
                name
                for block in vocabulary.blocks(block_size)
                for name in block.strings
            ]
            assert names == strings.names()
            assert vocabulary.stats()["num_collisions"] == 0


def test_stored_keys_are_written():
    one, _ = make()
    vocabulary = one.vocabularies["words"]
    stored = tlm.ops.StoredKeys(tf.constant([5, 7], tf.int64))
    with pytest.raises(ValueError, match="'words' has no keys yet.*a kind"):
        vocabulary.write(stored)
    train(one, [7])
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    written = vocabulary.write(stored, rows)
    assert (written.num_written, written.num_new) == (2, 1)
    np.testing.assert_array_equal(
        one({"ids": tf.constant([5, 7])})["ids"], rows
    )
    sampled = tlm.ops.sample_keys(vocabulary, 1, distribution="uniform")
    assert vocabulary.write(sampled.ids([9])).num_new == 1
    assert vocabulary.stats()["key_type"] == "integers"
    with pytest.raises(tf.errors.InvalidArgumentError, match="be integers"):
        vocabulary.write(["text"])


def test_stored_keys_of_strings_are_written():
    one, _ = make(8)
    vocabulary = one.vocabularies["words"]
    vocabulary.write(["a"])
    keys = vocabulary.keys()
    stored = tlm.ops.StoredKeys(keys, key_tensors.STRINGS)
    assert vocabulary.write(stored, np.ones([1, 3])).num_new == 0
    assert vocabulary.stats()["key_type"] == "strings"
    many = tlm.ops.StoredKeys(tf.range(10, dtype=tf.int64))
    written = vocabulary.write(many)
    assert (written.num_written, len(written.without_row)) == (7, 3)
    assert written.without_row.tolist() == [7, 8, 9]
    with pytest.raises(TypeError, match="`Vocabulary.write` accepts Stored"):
        tlm.vocabulary.import_rows(np.ones([1, 3]), vocabulary, keys=stored)
