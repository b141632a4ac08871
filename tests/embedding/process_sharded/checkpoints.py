"""Checkpoints of programs that run in several processes."""

import tensorflow as tf


def path_of(folder, name, worker):
    """Returns the path of a checkpoint of one process.

    The files of the first process are complete. The files that other processes
    write are temporary.
    """
    return str(folder / (f"temporary_{worker}/{name}" if worker else name))


def restored(embedding, folder, worker):
    """Restores the checkpoint `restart` of a folder, if there is one.

    Returns:
      A function that writes a checkpoint with a given name.
    """
    checkpoint = tf.train.Checkpoint(embedding=embedding)
    if (folder / "restart.index").exists():
        checkpoint.read(str(folder / "restart")).assert_consumed()
    return lambda name: checkpoint.write(path_of(folder, name, worker))
