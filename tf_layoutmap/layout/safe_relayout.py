"""`dtensor.relayout` of four dimensions and more, made right.

DTensor moves a mesh axis from one dimension to another by an all-to-all. With
four dimensions or more it puts the pieces in the wrong order, without a word,
unless one of the two dimensions is the first. So the way then goes over a
layout where all dimensions but the first are whole.
"""

import functools
import threading
from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private

dtensor = tf.experimental.dtensor

_SAFE_RANK = 3

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Replaces both operations, the first time it is called."""
    global _installed
    with _lock:
        if _installed:
            return
        for name, ours in (("relayout", _relayout),
                           ("relayout_like", _relayout_like)):
            module = _tf_private.gen_dtensor_ops
            original = getattr(module, name)
            setattr(module, name, functools.wraps(original)(
                functools.partial(ours, original)))
        _installed = True


def _relayout(original: Any, input: Any, layout: Any,
              name: str | None = None) -> Any:
    wanted = dtensor.Layout.from_string(
        layout if isinstance(layout, str) else layout.decode())
    if _may_mix(_specs_of(input), wanted.sharding_specs):
        first = wanted.sharding_specs[0]
        input = _to_middle(input, wanted.mesh, (
            dtensor.UNSHARDED if first == dtensor.MATCH else first))
    elif tf.is_symbolic_tensor(input) and _has_match(wanted):
        # In a function, one with MATCH takes the layout of what comes behind,
        # by the same all-to-all. What comes behind the first is the second.
        input = original(input, layout)
    return original(input, layout, name=name)


def _has_match(layout: Any) -> bool:
    specs = layout.sharding_specs
    return len(specs) > _SAFE_RANK and dtensor.MATCH in specs


def _relayout_like(original: Any, input: Any, layout_input: Any,
                   name: str | None = None) -> Any:
    now, wanted = _specs_of(input), _specs_of(layout_input)
    mesh = dtensor.get_default_mesh()
    if wanted is not None:
        mesh = dtensor.fetch_layout(layout_input).mesh
    rank = getattr(input.shape, "rank", None)
    if mesh is not None and rank and rank > _SAFE_RANK and (
            _may_mix(now, wanted)):
        input = _to_middle(input, mesh, (
            dtensor.UNSHARDED if wanted is None else wanted[0]))
    return original(input, layout_input, name=name)


def _to_middle(x: Any, mesh: Any, first: str) -> Any:
    """Returns `x` with its first dimension so, the others whole."""
    # Not MATCH: in a function it is taken for what comes behind.
    specs = [first, *[dtensor.UNSHARDED] * (x.shape.rank - 1)]
    return dtensor.relayout(x, dtensor.Layout(specs, mesh))


def _specs_of(x: Any) -> list[str] | None:
    """Returns how an eager tensor is divided; None where nobody knows yet."""
    if tf.is_symbolic_tensor(x) or not dtensor.is_dtensor(x):
        return None
    return dtensor.fetch_layout(x).sharding_specs


def _may_mix(now: list[str] | None, wanted: list[str] | None) -> bool:
    """Whether a mesh axis may move between dimensions after the first."""
    if wanted is not None and len(wanted) <= _SAFE_RANK:
        return False
    free = (dtensor.UNSHARDED, dtensor.MATCH)
    if wanted is not None and all(axis in free for axis in wanted[1:]):
        return False
    if now is None or wanted is None:
        return True
    return any(a not in free and a in wanted and a != b
               for a, b in zip(now, wanted))
