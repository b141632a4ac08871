"""A disk that takes no more: files of this process may not grow any further.

The kernel fails each write beyond a few bytes, in Python and in C++. It says
"File too large" where a full disk says "No space left on device".
"""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(num_bytes=256):
    """Files that are written in the block cannot have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
