"""Keys of the collectives of `MirroredStrategy` in a process with a mesh.

TensorFlow identifies a group of devices that run collectives together by an
integer. DTensor and each `MirroredStrategy` count these integers from 1. If a
process uses both, two groups have the same key, and TensorFlow aborts all later
collectives of the process. The functions of this module add `OFFSET` to the
keys of strategies that are created after the first mesh, and raise an error
before another strategy and a mesh run collectives in the same process.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

from tf_layoutmap._core import tf_private

# The keys of DTensor are far below this number.
OFFSET = 1_000_000


def new_group_key(
    original: Callable[..., int], keys: Any, devices: Sequence[str]
) -> int:
    """Returns the key of a new group of devices, which no mesh uses.

    Groups of several processes are unchanged, because all processes must use
    the same key.
    """
    if _are_local(devices) and keys._group_key < OFFSET:
        keys._group_key += OFFSET
    return original(keys, devices)


def new_instance_key(
    original: Callable[..., int], keys: Any, group_key: int, device: str
) -> int:
    """Returns the key of a collective.

    Raises:
      RuntimeError: If the strategy was created before the first mesh.
    """
    if _shares_key_with_mesh(group_key, keys._instance_key_table[group_key]):
        raise RuntimeError(
            "A MirroredStrategy that was created before the first mesh of the "
            "process must not be used after it, because DTensor uses the same "
            "keys for its collectives, and TensorFlow would abort all later "
            "collectives of the process. Create the mesh before the strategy."
        )
    return original(keys, group_key, device)


def check_no_strategy_was_used() -> None:
    """Checks that the first mesh can be created in this process.

    Raises:
      RuntimeError: If a `MirroredStrategy` has run collectives.
    """
    for keys in gc.get_objects():
        if isinstance(keys, tf_private.CollectiveKeys) and any(
            _shares_key_with_mesh(group_key, group)
            and max(group.values()) > tf_private.FIRST_INSTANCE_KEY
            for group_key, group in keys._instance_key_table.items()
        ):
            raise RuntimeError(
                "The first mesh of a process must be created before a "
                "MirroredStrategy runs, because DTensor and the strategy use "
                "the same keys for their collectives, and TensorFlow would "
                "abort all later collectives of the process. Create the mesh "
                "first, or use another process."
            )


def _shares_key_with_mesh(group_key: int, group: dict[str, int]) -> bool:
    """Returns whether a group of several local devices has a key of a mesh."""
    return group_key < OFFSET and len(group) > 1 and _are_local(list(group))


def _are_local(devices: Sequence[str]) -> bool:
    return all("/job:localhost" in device for device in devices)
