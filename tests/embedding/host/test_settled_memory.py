"""Restored tables are moved to huge pages while training continues."""

import ctypes
import mmap
import pathlib
import time

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding
ROWS, DIM = 40_000, 64
SIZE = ROWS * DIM * 4
LARGE_PAGE = 2**21
IDS = np.arange(0, ROWS, 500)


def large_pages(address: int) -> int:
    """Returns the bytes in 2 MiB pages of the mapping that holds `address`."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        start, dash, end = first.partition("-")
        if dash and not first.endswith(":"):
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    return 0


def moves_memory() -> bool:
    """Returns whether the system can now move memory to a large page.

    This requires Linux 6.1 and free memory in blocks of the size of a large
    page.
    """
    madv_collapse = 25
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 2 * LARGE_PAGE, flags=flags) as memory:
        memory.write(b"\1" * len(memory))
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        aligned = -(-ctypes.addressof(buffer) // LARGE_PAGE) * LARGE_PAGE
        libc = ctypes.CDLL(None)
        result = libc.madvise(
            ctypes.c_void_p(aligned), ctypes.c_size_t(LARGE_PAGE), madv_collapse
        )
        del buffer  # Otherwise, the memory cannot be released.
    return result == 0


def is_moved(address: int, before: int) -> bool:
    """Returns whether the bytes in large pages exceed `before` after a while.

    The system can refuse to move single pages, for example if a page is in use
    by the kernel.
    """
    until = time.monotonic() + 3
    while large_pages(address) <= before:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def embedding_of(initializer):
    embedding = tlm.TPUEmbedding(
        [tpu.FeatureConfig(tpu.TableConfig(ROWS, DIM, initializer, name="t"))],
        tpu.SGD(0.5),
    )
    embedding.build(per_replica_batch_size=len(IDS))
    return embedding


def train(embedding, num_steps):
    for _ in range(num_steps):
        embedding.enqueue([tf.constant(IDS)], training=True)
        [found] = embedding.dequeue()
        embedding.apply_gradients([tf.ones_like(found)])


def test_a_table_moved_to_large_pages_trains_equally(tmp_path):
    embedding = embedding_of(tf.random_uniform_initializer(seed=1))
    path = tf.train.Checkpoint(embedding=embedding).write(str(tmp_path / "c"))
    [unmoved] = embedding.embedding_tables.values()
    train(embedding, 12)
    # The engine tries to move a table only once. The system refuses if it then
    # has no free large page.
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not moves_memory():
            pytest.skip("This system cannot move memory to a large page now.")
        restored = embedding_of(tf.zeros_initializer())
        tf.train.Checkpoint(embedding=restored).read(path).assert_consumed()
        [table] = restored.embedding_tables.values()
        # This is a view of the variable's memory, not a copy.
        address = np.asarray(memoryview(table.read_value())).ctypes.data
        before = large_pages(address)
        train(restored, 12)
        np.testing.assert_array_equal(table, unmoved)
        if before >= SIZE - 2 * LARGE_PAGE:
            pytest.skip("This system allocates all memory in large pages.")
        if is_moved(address, before):
            break
    assert is_moved(address, before)
    np.testing.assert_array_equal(table, unmoved)
