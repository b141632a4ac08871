"""Random ops on a mesh that return the same numbers as on one device.

DTensor does not support some random ops. For other random ops, each device
draws its shard from a different seed. With the functions of this module, every
device draws all numbers from the same seed, and uses only the numbers of its
shard.
"""

import functools
import inspect
import secrets
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.ops import corrections, random_state

dtensor = tf.experimental.dtensor

_SHARED_SEED = "tf_layoutmap/seed_of_random_operations"
_WAIT_SECONDS = 60.0
_lock = threading.Lock()
_seeds: list[int] = []


def correct(
    original: Callable[..., Any], corrected: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls `corrected(mesh, ...)` on a mesh.

    `corrections.correct` corrects an eager op only if an input is on a mesh.
    The only input of a random op can be a shape, so this function corrects
    every eager op that runs on a mesh.

    Args:
      original: An op of TensorFlow's Python API.
      corrected: Function that is called as `corrected(mesh, ...)` with the
        arguments of `original`.
    """
    by_inputs = corrections.correct(original, corrected)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            mesh = tracing.mesh_of_operation()
            if mesh is not None:
                return corrected(mesh, *args, **kwargs)
        return by_inputs(*args, **kwargs)

    return wrapper


def correct_on_all_meshes(
    original: Callable[..., Any], corrected: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the correction of an op that DTensor does not support.

    `dtensor_ops` enables these ops on all meshes, even if a mesh is not
    registered. On an unregistered mesh, an eager op runs on the host, as in
    TensorFlow. An op in a function gets seeds, because without seeds each
    device would draw different numbers.

    Args:
      original: An op of TensorFlow's Python API.
      corrected: Function that is called as `corrected(mesh, ...)` with the
        arguments of `original`.
    """
    on_registered_meshes = correct(original, corrected)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if tracing.DEVICE not in tf_private.current_device() or (
            tracing.mesh_of_operation() is not None
        ):
            return on_registered_meshes(*args, **kwargs)
        if not tf.executing_eagerly() or any(
            map(tracing.on_mesh, (*args, *kwargs.values()))
        ):
            return corrected(None, *args, **kwargs)
        with tf.device("CPU:0"):
            return original(*args, **kwargs)

    return wrapper


def uniform(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Draws uniform numbers with an op of this package.

    The op has a different name than TensorFlow's op, because DTensor rejects
    TensorFlow's op by its name.
    """
    signature = inspect.signature(original)
    kind = (
        "random_uniform_int"
        if "maxval" in signature.parameters
        else "random_uniform"
    )
    bound = signature.bind(*args, **kwargs).arguments
    return _seeded(getattr(ops, kind), kind, mesh, bound)


def seeded(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Draws numbers with the given seeds, or with new seeds if there are none.

    Without seeds every device would draw different numbers for the same tensor.
    """
    bound = inspect.signature(original).bind(*args, **kwargs).arguments
    return _seeded(original, original.__name__, mesh, bound)


def _seeded(
    op: Callable[..., Any], kind: str, mesh: Mesh | None, bound: dict[str, Any]
) -> Any:
    if not bound.get("seed") and not bound.get("seed2"):
        bound["seed"], bound["seed2"] = _new_seed(), _new_seed()
    drawn = None if mesh is None else random_state.draw(kind, bound)
    if drawn is None:
        drawn = op(**bound)
    if mesh is None and tf.is_symbolic_tensor(drawn):
        # The mesh is unknown, because it was not passed to this package.
        return drawn
    return tracing.pin_replicated(drawn, mesh)


def stateless(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Draws all numbers on every device."""
    random_state.count_draw()
    return tracing.pin_replicated(original(*args, **kwargs), mesh)


def _new_seed() -> int:
    """Returns a seed that is the same in all processes of a mesh."""
    with _lock:
        if not _seeds:
            _seeds.append(_initial_seed())
        # All processes draw their seeds from the same Weyl sequence.
        _seeds[0] = (_seeds[0] + 0x9E3779B97F4A7C15) % 2**63
        return _seeds[0] or 1


def _initial_seed() -> int:
    """Returns a random number that process 0 draws for all processes."""
    if dtensor.num_clients() == 1:
        return secrets.randbits(63)
    if dtensor.client_id() == 0:
        tf_private.set_cluster_value(_SHARED_SEED, str(secrets.randbits(63)))
    return int(tf_private.cluster_value(_SHARED_SEED, _WAIT_SECONDS))
