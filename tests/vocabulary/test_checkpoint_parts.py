"""Checkpoints are written one tensor at a time and replaced atomically."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.files import full_disk
from tf_layoutmap.vocabulary import checkpoint_files


def tensors(number, count):
    return {
        f"tensor_{index}": np.full([index], number) for index in range(count)
    }


def check(prefix, wanted):
    reader = tf.train.load_checkpoint(str(prefix))
    assert reader.get_variable_to_shape_map().keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)


def test_a_new_checkpoint_uses_different_data_file_names(tmp_path):
    target = tmp_path / "ck"
    found = []
    for number in range(4):
        wanted = {**tensors(number, 5), "word": np.array(b"abc")}
        checkpoint_files.write_checkpoint(str(target), wanted.items())
        check(target, wanted)
        counts = {*checkpoint_files.data_files(str(target)).values()}
        assert len(os.listdir(tmp_path)) == 1 + sum(counts)
        found.extend(counts)
    assert found == [6, 5, 6, 5]


@pytest.mark.parametrize("count", [1, 2, 130])
def test_an_index_stores_the_number_of_data_files(count, tmp_path):
    target = str(tmp_path / "ck")
    checkpoint_files.write_checkpoint(target, tensors(0, count).items())
    assert checkpoint_files._num_data_files(f"{target}.index") == count


def test_a_checkpoint_of_tensorflow_is_replaced(tmp_path):
    target = str(tmp_path / "ck")
    checkpoint = tf.train.Checkpoint(one=tf.Variable(1.0))
    checkpoint.write(target)
    assert checkpoint_files._num_data_files(f"{target}.index") == 1
    wanted = tensors(0, 2)
    checkpoint_files.write_checkpoint(target, wanted.items())
    check(target, wanted)
    assert len(os.listdir(tmp_path)) == 3


def test_files_of_another_checkpoint_are_kept(tmp_path):
    others = [f"{tmp_path}/ck{one}" for one in ("2", "-1", ".data")]
    for other in others:
        checkpoint_files.write_checkpoint(other, tensors(1, 2).items())
    for number in range(3):
        checkpoint_files.write_checkpoint(
            str(tmp_path / "ck"), tensors(number, 2).items()
        )
    for other in others:
        check(other, tensors(1, 2))


def test_a_tensor_does_not_replace_another_tensor(tmp_path):
    target = str(tmp_path / "ck")
    checkpoint_files.write_checkpoint(target, tensors(0, 1).items())
    with pytest.raises(OSError, match="Remove the checkpoint at .*ck' first"):
        checkpoint_files.write_checkpoint(target, tensors(1, 1).items())
    check(target, tensors(0, 1))
    assert len(os.listdir(tmp_path)) == 2


def test_an_error_while_writing_leaves_no_files(tmp_path):
    def values():
        yield "one", np.zeros([3])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpoint_files.write_checkpoint(str(tmp_path / "ck"), values())
    with pytest.raises(OSError, match="File too large"):
        with full_disk.full_disk():
            checkpoint_files.write_checkpoint(
                str(tmp_path / "ck"), [("one", np.zeros([300]))]
            )
    assert not os.listdir(tmp_path)


def test_a_folder_path_uses_the_newest_checkpoint(tmp_path):
    checkpoint = tf.train.Checkpoint(one=tf.Variable(1.0))
    paths = [checkpoint.save(tmp_path / "ck") for _ in range(2)]
    assert checkpoint_files.is_same_checkpoint(str(tmp_path), paths[1])
    assert not checkpoint_files.is_same_checkpoint(str(tmp_path), paths[0])
    assert not checkpoint_files.is_same_checkpoint(paths[0], paths[1])
