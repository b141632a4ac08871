"""Deltas of tables on servers, compared with one process and checkpoints."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas import cases
from tests.deltas.test_writer import check
from tests.embedding.servers import local
from tests.files import full_disk
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas import parts
from tf_layoutmap.embedding import tables

tpu = tf.tpu.experimental.embedding


def on_servers(num_servers=2, **arguments):
    with local.servers(num_servers):
        return cases.embedding(**arguments)


def test_closed_tables_without_open_tables(tmp_path):
    kinds = tpu.TableConfig(40, 2, combiner="sum", name="kinds")
    with local.servers(3):
        one = tlm.TPUEmbedding(
            {"kind": tpu.FeatureConfig(kinds)}, tpu.Adagrad(0.25)
        )
        one.build()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    one.enqueue({"kind": tf.constant([39, 7, 7])})
    one.dequeue()
    one.apply_gradients({"kind": tf.ones([3, 2])})
    # A forward-only step changes nothing.
    one({"kind": tf.constant([3])})
    delta = writer.write()
    reader = tf.train.load_checkpoint(delta.tensors)
    assert reader.get_tensor("kinds/rows").tolist() == [7, 39]
    check(one, base, tmp_path / "deltas", tmp_path)


def test_a_restarted_program_continues_the_deltas(tmp_path):
    one = on_servers(2, num_shards=2)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path, base=base)
    for step in range(4):
        cases.train(one, step)
        writer.write()
    full = check(one, base, tmp_path, tmp_path)
    # The other number of servers is the restarted cluster.
    again = on_servers(3, num_shards=3)
    tf.train.Checkpoint(embedding=again).restore(full)
    writer = tlm.deltas.DeltaWriter(again, tmp_path, base=base)
    assert len(writer.deltas) == 4
    for step in range(4, 8):
        cases.train(again, step)
    delta = writer.write()
    assert delta.meta.tables["kinds"]["num_rows"] < 15
    check(again, base, tmp_path, tmp_path)


def test_a_new_writer_contains_all_rows_that_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(base_file, "_BLOCK_BYTES", 64)
    one = on_servers(2, num_shards=3, capacity=300)
    base = cases.save(one, tmp_path / "base")
    tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base).write()
    for step in range(3):
        cases.train(one, step)
    # The servers have restarted since then, and no record exists.
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    writer.write()
    check(one, base, tmp_path / "deltas", tmp_path)
    cases.train(one, 3)
    writer.write()
    tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base).write()
    check(one, base, tmp_path / "deltas", tmp_path)


def test_restored_rows_are_compared(tmp_path):
    one = on_servers(2, num_shards=2)
    base = cases.save(one, tmp_path / "base")
    for step in range(2):
        cases.train(one, step)
    other = cases.save(one, tmp_path / "other")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one, 2)
    writer.write()
    tf.train.Checkpoint(embedding=one).restore(other)
    writer.write()
    check(one, base, tmp_path / "deltas", tmp_path)
    kinds = one._variables["kinds"][tables.PARAMETERS]
    kinds.assign(tf.zeros(kinds.shape))
    writer.write(compare=True)
    check(one, base, tmp_path / "deltas", tmp_path)


def test_rows_of_a_failed_write_are_in_the_next_delta(tmp_path):
    one = on_servers(2, num_shards=3)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one, 0)
    with (
        full_disk.full_disk(),
        pytest.raises(OSError, match="File too large"),
    ):
        writer.write()
    assert writer.deltas == []
    cases.train(one, 1)
    writer.write()
    check(one, base, tmp_path / "deltas", tmp_path)


def test_steps_during_a_write_raise_and_no_row_is_lost(tmp_path, monkeypatch):
    one = on_servers(2, num_shards=3)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one, 0)
    changes = one._state.backend._changes
    whole = changes._whole

    def train_during_the_call(table, copied):
        cases.train(one, 1)
        return whole(table, copied)

    monkeypatch.setattr(changes, "_whole", train_during_the_call)
    with pytest.raises(RuntimeError, match="while no step is in flight"):
        writer.write()
    monkeypatch.undo()
    cases.train(one, 2)
    writer.write()
    check(one, base, tmp_path / "deltas", tmp_path)


def test_a_later_writer_replaces_a_writer(tmp_path):
    one = on_servers()
    base = cases.save(one, tmp_path / "base")
    first = tlm.deltas.DeltaWriter(one, tmp_path / "one", base=base)
    tlm.deltas.DeltaWriter(one, tmp_path / "two", base=base)
    with pytest.raises(RuntimeError, match="only the latest watch"):
        first.write()


def test_after_a_resize_the_writer_raises(tmp_path):
    one = on_servers()
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    one.vocabularies["words"].resize(1000)
    with pytest.raises(RuntimeError, match="was resized"):
        writer.write()


def test_an_error_of_a_server_names_the_server(tmp_path):
    one = on_servers(2, num_shards=2)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one, 0)
    writer._watched.take({}, found := {})
    slices = parts.slices_of("rows", found["kinds"].values["parameters"])
    device = slices[0].device
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"CPU:[01] did not write its part"):
        parts._write_part(device, str(tmp_path / "file" / "part"), slices)


@pytest.mark.parametrize(
    "kind", [tf.errors.UnavailableError, tf.errors.AbortedError]
)
def test_the_loss_of_a_server_is_not_an_error_of_files(monkeypatch, kind):
    """`tlm.ps.ServerLostError` of a call is such an error, too."""

    def save(**_):
        raise kind(None, None, "Socket closed")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", save)
    with pytest.raises(kind, match="Socket closed"):
        parts._write_part("CPU:0", "part", [parts.Slice("rows", tf.ones([2]))])


def test_a_missing_part_of_a_server_raises(tmp_path, monkeypatch):
    """A server that has another file system writes elsewhere."""
    one = on_servers(2, num_shards=2)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one, 0)
    write_part = parts._write_part

    def elsewhere(device, prefix, tensors):
        del prefix
        write_part(device, str(tmp_path / "other"), tensors)

    monkeypatch.setattr(parts, "_write_part", elsewhere)
    with pytest.raises(OSError, match="all servers share"):
        writer.write()
    monkeypatch.undo()
    writer.write()
    check(one, base, tmp_path / "deltas", tmp_path)


def test_served_models_apply_deltas(tmp_path):
    one = on_servers(2, num_shards=3)
    for step in range(3):
        cases.train(one, step)
    base = cases.save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    signature = [
        {
            "word": tf.RaggedTensorSpec([None, None], tf.int64),
            "kind": tf.TensorSpec([None], tf.int64),
        }
    ]
    tlm.export(
        one, tmp_path / "model", input_signature=signature, delta_writer=writer
    )
    for step in range(3, 6):
        cases.train(one, step)
        writer.write()
    served = tlm.deltas.ServedModel(str(tmp_path / "model"))
    assert served.apply(str(tmp_path / "deltas")) == 3
    ids = {
        "word": tf.ragged.constant(
            [[int(key)] for key in one.vocabularies["words"].keys()] + [[-9]],
            dtype=tf.int64,
        ),
        "kind": tf.range(40, dtype=tf.int64),
    }
    expected = one(ids)
    for name, rows in served.model.serve(ids).items():
        np.testing.assert_array_equal(rows, expected[name])


def test_the_coordinator_writes_the_weights(tmp_path):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.embedding = on_servers(2)
            with tf.device("CPU:1"):
                self.kernel = tf.Variable([1.0, 2.0])

    one = Model()
    base = tf.train.Checkpoint(model=one).save(str(tmp_path / "base"))
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    cases.train(one.embedding, 1)
    one.kernel.assign([3.0, 4.0])
    delta = writer.write()
    assert delta.meta.weights["model/kernel"]["is_changed"]
    wanted = tf.train.Checkpoint(model=one).save(str(tmp_path / "wanted"))
    full = tlm.deltas.apply(base, tmp_path / "deltas", tmp_path / "full")
    assert cases.tensors(full) == cases.tensors(wanted)
