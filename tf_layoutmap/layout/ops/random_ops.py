"""Random operations of TensorFlow on a mesh: the numbers of one device.

DTensor lets each device draw its own part, with a seed of its own, or has no
rule. Here every device draws all numbers from the same seed, and uses its part.
"""

import functools
import inspect
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import ops, tf_private
from tf_layoutmap.layout.mesh import pinning, tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops import corrections

dtensor = tf.experimental.dtensor

_SHARED_SEED = "tf_layoutmap/seed_of_random_operations"
_WAIT_SECONDS = 60.0
_lock = threading.Lock()
_drawn: list[int] = []
_in_parts = ThreadValue(False)


def correct(
    original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `original`, and on a mesh `ours(mesh, ...)`.

    Unlike `correction.correct` eagerly also where no input is on a mesh, but
    the operation runs on one: all that it needs may be a shape.
    """
    by_inputs = corrections.correct(original, ours)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            mesh = tracing.mesh_of_operation()
            if mesh is not None:
                return ours(mesh, *args, **kwargs)
        return by_inputs(*args, **kwargs)

    return wrapper


def correct_on_all_meshes(
    original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """As `correct`, for an operation that DTensor itself has no rule for.

    `missing_rules` enables it on meshes of the program's own as well. Eagerly
    it runs on the host there, as in TensorFlow; in a function with seeds, as
    each device would draw other numbers.
    """
    on_own_meshes = correct(original, ours)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if pinning.DEVICE not in tf_private.current_device() or (
            tracing.mesh_of_operation() is not None
        ):
            return on_own_meshes(*args, **kwargs)
        if not tf.executing_eagerly() or any(
            map(pinning.on_mesh, (*args, *kwargs.values()))
        ):
            return ours(None, *args, **kwargs)
        with tf.device("CPU:0"):
            return original(*args, **kwargs)

    return wrapper


def uniform(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Draws with an op of ours: DTensor refuses TensorFlow's by name."""
    signature = inspect.signature(original)
    ours = (
        ops.random_uniform_int
        if "maxval" in signature.parameters
        else ops.random_uniform
    )
    return seeded(ours, mesh, **signature.bind(*args, **kwargs).arguments)


def seeded(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Draws with the seeds that it is given, or with new ones.

    Without seeds every device would draw other numbers for the same tensor.
    """
    bound = inspect.signature(original).bind(*args, **kwargs).arguments
    if not bound.get("seed") and not bound.get("seed2"):
        bound["seed"], bound["seed2"] = _new_seed(), _new_seed()
    drawn = original(**bound)
    if mesh is None and tf.is_symbolic_tensor(drawn):
        # Of a mesh that the program has not passed to this package.
        return drawn
    return pinning.replicated(drawn, mesh)


def stateless(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Draws all numbers on every device, unless in `drawn_in_parts`."""
    if _in_parts.get():
        return original(*args, **kwargs)
    return pinning.replicated(original(*args, **kwargs), mesh)


def sharded_draws() -> AbstractContextManager[None]:
    """While open, devices draw their own parts: first values of weights."""
    return _in_parts.set_to(True)


def _new_seed() -> int:
    """Returns a seed that is the same in all processes of a mesh."""
    with _lock:
        if not _drawn:
            _drawn.append(_first_seed())
        # A step of a Weyl sequence, as all processes take it.
        _drawn[0] = (_drawn[0] + 0x9E3779B97F4A7C15) % 2**63
        return _drawn[0] or 1


def _first_seed() -> int:
    """Returns a random number; of the first process where there are several."""
    if dtensor.num_clients() == 1:
        return secrets.randbits(63)
    if dtensor.client_id() == 0:
        tf_private.set_cluster_value(_SHARED_SEED, str(secrets.randbits(63)))
    return int(tf_private.cluster_value(_SHARED_SEED, _WAIT_SECONDS))
