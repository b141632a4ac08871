"""Simulates a full disk by limiting the file size of this process.

The kernel fails each write beyond the limit, in Python and in C++. The error
message is "File too large" instead of "No space left on device", as on a full
disk.
"""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(num_bytes=256):
    """Limits the size of files that the `with` block writes to `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
