"""Installs and uninstalls groups of rows of the table of replaced names."""

import functools
import importlib
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

from tf_layoutmap._core import tf_private
from tf_layoutmap._patches import keras_rows, mesh_rows, runtime_rows
from tf_layoutmap._patches.rows import Patch

# The rows of each group. Functions, so that a group imports the code that it
# installs and no other. Of two rows for one name the later one is called
# first: code that moves values to a mesh wraps code that updates tables.
_GROUPS: dict[str, Callable[[], list[Patch]]] = {
    mesh_rows.GROUP: mesh_rows.rows,
    mesh_rows.CHECKPOINTS_GROUP: mesh_rows.checkpoint_rows,
    keras_rows.SELF_TRAINING: keras_rows.self_training_rows,
    keras_rows.SHARD_SLOTS: keras_rows.shard_slot_rows,
    keras_rows.TF_KERAS_LAYERS: keras_rows.tf_keras_layer_rows,
    keras_rows.KERAS3_GROUP: keras_rows.keras3_rows,
    keras_rows.TF_KERAS_GROUP: keras_rows.tf_keras_rows,
    runtime_rows.ENUM: runtime_rows.enum_rows,
    runtime_rows.EMULATION_GROUP: runtime_rows.emulation_rows,
    runtime_rows.KERAS3_PS_GROUP: runtime_rows.keras3_ps_rows,
    runtime_rows.TF_KERAS_PS_GROUP: runtime_rows.tf_keras_ps_rows,
    runtime_rows.EXIT_GROUP: runtime_rows.exit_rows,
    runtime_rows.SHARDED_TABLES_GROUP: runtime_rows.sharded_tables_rows,
    runtime_rows.MEMORY_GROUP: runtime_rows.memory_rows,
}

GROUPS: tuple[str, ...] = tuple(_GROUPS)


@functools.cache
def rows_of(group: str) -> tuple[Patch, ...]:
    """Returns the rows of a group, which imports the code that they hold.

    Raises:
      KeyError: There is no such group.
    """
    return tuple(_GROUPS[group]())


def all_rows() -> list[Patch]:
    """Returns the rows of all groups, in the order in which they stack."""
    return [row for group in GROUPS for row in rows_of(group)]


_lock = threading.RLock()
_counts: dict[str, int] = {}
# An inherited name is deleted from the class again when it is restored.
_INHERITED = object()


class _ReplacedName:
    """A name, its original, and the rows that replace it now."""

    def __init__(self, owner: Any, name: str):
        self._owner = owner
        self._name = name
        self._was = (
            inspect.getattr_static(owner, name)
            if (name in vars(owner))
            else _INHERITED
        )
        self.original = getattr(owner, name)
        self._is = self.original
        self.rows: list[Patch] = []

    def put(self, rows: list[Patch]) -> None:
        """Makes `rows` the replacements of the name, the last called first."""
        everywhere = any(row.everywhere for row in (*rows, *self.rows))
        before, value = self._is, self.original
        self.rows = rows
        for row in rows:
            value = _replacement(row, value)
        self._set(value)
        # Also in modules that were loaded since, with the replacement.
        if everywhere:
            for module in tf_private.modules_with(before, self._name):
                if module is not self._owner:
                    setattr(module, self._name, value)
        self._is = getattr(self._owner, self._name)

    def _set(self, value: Any) -> None:
        if value is not self.original:
            is_static = isinstance(self._was, staticmethod)
            setattr(
                self._owner,
                self._name,
                staticmethod(value) if is_static else value,
            )
        elif self._was is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._was)

    def check_untouched(self) -> None:
        """Raises if somebody else has replaced the name since."""
        if getattr(self._owner, self._name) is not self._is:
            raise RuntimeError(
                f"`{display_name(self._owner, self._name)}` was replaced by "
                "somebody else after tf_layoutmap had replaced it, so that it "
                "cannot be set now. Undo that first."
            )


_replaced: dict[tuple[str, str], _ReplacedName] = {}


def install(group: str) -> None:
    """Replaces the names of a group, until as many calls of `uninstall`.

    Args:
      group: One of `GROUPS`.

    Raises:
      KeyError: There is no such group.
      RuntimeError: Somebody else has replaced what is replaced already.
    """
    rows = rows_of(group)
    with _lock:
        if _counts.get(group, 0) == 0:
            _check_untouched(rows)
            for row in rows:
                _add(row)
        _counts[group] = _counts.get(group, 0) + 1


def ensure(group: str) -> None:
    """Installs a group unless it is; cheap enough to be called often."""
    if not _counts.get(group):
        with _lock:
            if not _counts.get(group):
                install(group)


def uninstall(group: str) -> None:
    """Undoes one `install`; the last call restores all names.

    Raises:
      KeyError: There is no such group.
      RuntimeError: It is not installed, or somebody else has replaced one of
        its names since.
    """
    rows = rows_of(group)
    with _lock:
        if not _counts.get(group):
            raise RuntimeError(
                "`uninstall` must follow an `install` of its own. Received: "
                f"group {group!r}, which is not installed."
            )
        if _counts[group] == 1:
            _check_untouched(rows)
            for row in reversed(rows):
                _remove(row)
        _counts[group] -= 1


def is_installed(group: str) -> bool:
    """Whether the names of a group are replaced now."""
    return bool(_counts.get(group))


def installed_rows() -> list[Patch]:
    """Returns the rows in force, in the order of the table."""
    with _lock:
        return [
            row
            for group in GROUPS
            if _counts.get(group)
            for row in rows_of(group)
        ]


def _check_untouched(rows: tuple[Patch, ...]) -> None:
    """Before the first name is set: all of a group are, or none."""
    for row in rows:
        if row.key in _replaced:
            _replaced[row.key].check_untouched()


def _add(row: Patch) -> None:
    replaced = _replaced.get(row.key)
    if replaced is None:
        replaced = _replaced[row.key] = _ReplacedName(owner_of(row), row.name)
    # A group has one row per name, so the order of groups decides.
    replaced.put(
        sorted([*replaced.rows, row], key=lambda one: GROUPS.index(one.group))
    )


def _remove(row: Patch) -> None:
    replaced = _replaced[row.key]
    replaced.put([one for one in replaced.rows if one != row])
    if not replaced.rows:
        del _replaced[row.key]


def _replacement(row: Patch, original: Any) -> Any:
    if row.make is None:
        return around(original, row.ours)
    base = original if row.base is None else _replaced[row.base].original
    return row.make(original, functools.partial(row.ours, base))


def around(
    original: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls `ours(original, ...)`.

    AutoGraph converts neither, but what `original` calls in turn: the `call` of
    a user's layer, for example. `tf.autograph.experimental.do_not_convert`
    would switch AutoGraph off for that, too.
    """
    ours = tf_private.called_as_written(ours)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return tf_private.called_as_written(wrapper)


def owner_of(row: Patch) -> Any:
    """Returns the module or class that has the name of a row."""
    module, _, attribute = row.owner.partition(":")
    if module.startswith("_"):
        module = f"tf_layoutmap.{module}"
    return _resolve(f"{module}:{attribute}")


def _resolve(target: str) -> Any:
    module, _, attributes = target.partition(":")
    value = importlib.import_module(module)
    for attribute in filter(None, attributes.split(".")):
        value = getattr(value, attribute)
    return value


def display_name(owner: Any, name: str) -> str:
    """Returns the full name of an attribute, as TensorFlow's docs have it."""
    full = (
        f"{owner.__module__}.{owner.__qualname__}.{name}"
        if inspect.isclass(owner)
        else f"{owner.__name__}.{name}"
    )
    # Where TensorFlow keeps its public names, `tf.raw_ops` for one.
    return re.sub(
        r"^(tensorflow\._api\.v2|tensorflow)\.(?!python|dtensor)", "tf.", full
    )
