"""A damaged checkpoint of a run raises an error that says what to remove."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tf_layoutmap.ps import checkpoints

DATA = ".data-00000-of-00001"


@pytest.fixture
def objects():
    return tf.train.Checkpoint(table=tf.Variable(np.arange(500.0)))


@pytest.fixture
def folder(tmp_path, objects):
    """Returns a folder with two checkpoints."""
    made = checkpoints.CheckpointFolder(tmp_path, max_to_keep=3)
    for num_done in (1, 2):
        made.save(num_done, objects.write)
    return made


def restore(folder, objects):
    newest = folder.newest()
    with folder.naming_damaged(newest):
        checkpoints.check_objects(newest.prefix, objects, False)
        objects.read(newest.prefix)
    return newest.num_done


def change_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("suffix", [".index", DATA])
@pytest.mark.parametrize(
    "damage",
    [
        pathlib.Path.unlink,
        lambda path: cut(path, 0),
        lambda path: cut(path, 40),
        lambda path: cut(path, -1),
        lambda path: change_bit(path, 20),
        lambda path: change_bit(path, -1),
    ],
    ids=["missing", "empty", "short", "one byte", "first bit", "last bit"],
)
def test_the_error_names_the_checkpoint_and_the_one_before(
    damage, suffix, folder, objects
):
    newest = pathlib.Path(folder.newest().prefix)
    damage(newest.with_name(newest.name + suffix))
    with pytest.raises(OSError, match="is damaged") as raised:
        restore(folder, objects)
    assert raised.value.filename == str(newest.parent)
    assert "To continue from 'closure-1', remove the directory" in str(
        raised.value
    )
    for path in newest.parent.iterdir():
        path.unlink()
    newest.parent.rmdir()
    assert restore(folder, objects) == 1


def test_the_only_checkpoint_can_be_removed(tmp_path, objects):
    folder = checkpoints.CheckpointFolder(tmp_path, max_to_keep=3)
    folder.save(1, objects.write)
    pathlib.Path(folder.newest().prefix + ".index").unlink()
    with pytest.raises(OSError, match="To start without a checkpoint, remove"):
        restore(folder, objects)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, "lost"),
        tf.errors.AbortedError(None, None, "restarted"),
        tf.errors.ResourceExhaustedError(None, None, "memory"),
    ],
)
def test_errors_of_servers_are_unchanged(error, folder):
    with pytest.raises(type(error)):
        with folder.naming_damaged(folder.newest()):
            raise error
