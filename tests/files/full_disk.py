"""Simulates a full disk: files of this process have a size limit.

The kernel fails each write beyond the limit, in Python and in C++. The error
is "File too large", where a full disk reports "No space left on device".
"""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(num_bytes=256):
    """Limits files written inside the `with` block to `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
