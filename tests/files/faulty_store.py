"""The file system `faulty://` of `cc/testing/faulty_store.cc`.

The file system is in memory, and its write operations can fail. `Store`
controls it. The tests that use it are marked as slow, because Bazel builds the
library.
"""

import ctypes
import functools
import os

import tensorflow as tf

from tests.accelerators import fake_gpu

TARGET = "cc/testing/faulty_store.so"


class Store:
    """Controls the file system; see the functions at the end of the source."""

    def __init__(self, path: str):
        tf.load_library(path)
        self._library = ctypes.CDLL(path)
        self._library.faulty_store_num_writes.restype = ctypes.c_int64

    def reset(self) -> None:
        """Removes all files. No operation fails until `fail_at` is called."""
        self._library.faulty_store_reset()

    def save(self) -> None:
        """Saves all files for `restore`."""
        self._library.faulty_store_save()

    def restore(self) -> None:
        """Replaces all files by the saved files."""
        self._library.faulty_store_restore()

    def fail_at(self, number: int, *, once=False, halves=False) -> None:
        """Lets a write operation fail.

        Args:
          number: Number of the operation from now on; -1 for none.
          once: Whether later operations succeed. Otherwise all of them fail, as
            after the end of the writer.
          halves: Whether a rename that fails writes half of the file.
        """
        self._library.faulty_store_fail_at(
            ctypes.c_int64(number), int(once), int(halves)
        )

    def set_delay(self, delay: int) -> None:
        """Sets the number of write operations by which lists are late."""
        self._library.faulty_store_set_delay(ctypes.c_int64(delay))

    @property
    def num_writes(self) -> int:
        """Number of all write operations."""
        return self._library.faulty_store_num_writes()


@functools.cache
def load() -> Store:
    """Builds the library, and adds the file system to this process."""
    path = os.environ.get("TF_LAYOUTMAP_FAULTY_STORE_LIBRARY")
    return Store(path or str(fake_gpu.library(TARGET)))
