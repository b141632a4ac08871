"""Installs and uninstalls groups of entries of the patch table."""

import functools
import importlib
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

from tf_layoutmap._core import tf_private
from tf_layoutmap._patches import (
    keras_rows,
    layer_rows,
    mesh_rows,
    runtime_rows,
)
from tf_layoutmap._patches.rows import Patch

# Maps each group to a function that returns its entries. Only this function
# imports the code of the group. If two entries replace the same name, the
# replacement of the later group is called first. For example, the code that
# moves values to a mesh is called before the code that updates tables.
_GROUPS: dict[str, Callable[[], list[Patch]]] = {
    mesh_rows.GROUP: mesh_rows.rows,
    mesh_rows.CHECKPOINTS_GROUP: mesh_rows.checkpoint_rows,
    layer_rows.SELF_TRAINING: layer_rows.self_training_rows,
    layer_rows.SHARD_SLOTS: layer_rows.shard_slot_rows,
    layer_rows.TF_KERAS_LAYERS: layer_rows.tf_keras_layer_rows,
    layer_rows.STRING_BATCHES: layer_rows.string_batch_rows,
    layer_rows.PROCESSES: layer_rows.process_rows,
    layer_rows.KERAS3_EMBEDDINGS: layer_rows.keras3_embedding_rows,
    layer_rows.TF_KERAS_EMBEDDINGS: layer_rows.tf_keras_embedding_rows,
    keras_rows.KERAS3_GROUP: keras_rows.keras3_rows,
    keras_rows.KERAS_DISTRIBUTION_GROUP: keras_rows.keras_distribution_rows,
    keras_rows.TF_KERAS_GROUP: keras_rows.tf_keras_rows,
    runtime_rows.ENUM: runtime_rows.enum_rows,
    runtime_rows.EMULATION_GROUP: runtime_rows.emulation_rows,
    runtime_rows.KERAS3_PS_GROUP: runtime_rows.keras3_ps_rows,
    runtime_rows.TF_KERAS_PS_GROUP: runtime_rows.tf_keras_ps_rows,
    runtime_rows.EXIT_GROUP: runtime_rows.exit_rows,
    runtime_rows.SHARDED_TABLES_GROUP: runtime_rows.sharded_tables_rows,
    runtime_rows.MEMORY_GROUP: runtime_rows.memory_rows,
    runtime_rows.GRADIENTS_GROUP: runtime_rows.gradient_rows,
    runtime_rows.FUNCTION_TRACES_GROUP: runtime_rows.function_trace_rows,
}

GROUPS: tuple[str, ...] = tuple(_GROUPS)


@functools.cache
def rows_of(group: str) -> tuple[Patch, ...]:
    """Imports the code of a group and returns its entries.

    Raises:
      KeyError: If `group` is not in `GROUPS`.
    """
    return tuple(_GROUPS[group]())


def all_rows() -> list[Patch]:
    """Returns the entries of all groups, in the order of installation."""
    return [row for group in GROUPS for row in rows_of(group)]


_lock = threading.RLock()
_counts: dict[str, int] = {}
# The groups that `ensure` has installed.
_ensured: set[str] = set()
# Marks a name that is missing or that a class inherits. Such a name is restored
# by deleting it.
_INHERITED = object()


class _ReplacedName:
    """A replaced name with its original value and the installed patches."""

    def __init__(self, owner: Any, name: str, is_missing: bool):
        self._owner = owner
        self._name = name
        self._original_attribute = (
            inspect.getattr_static(owner, name)
            if name in vars(owner)
            else _INHERITED
        )
        self.original = (
            _missing(owner, name) if is_missing else getattr(owner, name)
        )
        self._current = self.original
        self.rows: list[Patch] = []

    def set_rows(self, rows: list[Patch]) -> None:
        """Replaces the name; the last element of `rows` is called first."""
        everywhere = any(row.everywhere for row in (*rows, *self.rows))
        before, value = self._current, self.original
        self.rows = rows
        for row in rows:
            value = _replacement(row, value)
        self._set(value)
        # All modules are searched again, because a module that was imported
        # later holds a reference to the replacement.
        if everywhere:
            for module in tf_private.modules_with(before, self._name):
                if module is not self._owner:
                    setattr(module, self._name, value)
        self._current = getattr(self._owner, self._name, self.original)

    def _set(self, value: Any) -> None:
        if value is not self.original:
            is_static = isinstance(self._original_attribute, staticmethod)
            setattr(
                self._owner,
                self._name,
                staticmethod(value) if is_static else value,
            )
        elif self._original_attribute is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original_attribute)

    def check_untouched(self) -> None:
        """Raises `RuntimeError` if other code has replaced the name as well."""
        if getattr(self._owner, self._name) is not self._current:
            raise RuntimeError(
                f"`{display_name(self._owner, self._name)}` was replaced by "
                "other code after tf_layoutmap had replaced it, so it cannot "
                "be changed or restored. Undo the other replacement first."
            )


def _missing(owner: Any, name: str) -> Callable[..., Any]:
    """Returns a function that raises the error for a missing name."""

    def raise_missing(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise AttributeError(
            f"{display_name(owner, name)} does not exist.", name=name
        )

    return raise_missing


_replaced: dict[tuple[str, str], _ReplacedName] = {}


def install(group: str) -> None:
    """Replaces the names of a group.

    Calls are counted: `uninstall` must be called as often as `install`.

    Args:
      group: One of `GROUPS`.

    Raises:
      KeyError: If `group` is not in `GROUPS`.
      RuntimeError: If other code has replaced a name after this package.
    """
    rows = rows_of(group)
    with _lock:
        if _counts.get(group, 0) == 0:
            _check_untouched(rows)
            for row in rows:
                _add(row)
        _counts[group] = _counts.get(group, 0) + 1


def ensure(group: str) -> None:
    """Installs a group permanently, on the first call.

    A later `uninstall` that belongs to an `install` does not restore the names.
    """
    if group not in _ensured:
        with _lock:
            if group not in _ensured:
                install(group)
                _ensured.add(group)


def uninstall(group: str) -> None:
    """Undoes one call of `install`; the last call restores all names.

    Raises:
      KeyError: If `group` is not in `GROUPS`.
      RuntimeError: If the group is not installed, or other code has replaced
        one of its names after this package.
    """
    rows = rows_of(group)
    with _lock:
        if not _counts.get(group):
            raise RuntimeError(
                "`uninstall` must follow an `install` of the same group. "
                f"Received: group {group!r}, which is not installed."
            )
        if _counts[group] == 1:
            _check_untouched(rows)
            for row in reversed(rows):
                _remove(row)
            _ensured.discard(group)
        _counts[group] -= 1


def is_installed(group: str) -> bool:
    """Returns whether the names of a group are replaced."""
    return bool(_counts.get(group))


def installed_rows() -> list[Patch]:
    """Returns the installed entries, in the order of the table."""
    with _lock:
        return [
            row
            for group in GROUPS
            if _counts.get(group)
            for row in rows_of(group)
        ]


def _check_untouched(rows: tuple[Patch, ...]) -> None:
    """Checks all names of a group before any of them is changed.

    If the check fails, no name of the group is changed.
    """
    for row in rows:
        if row.key in _replaced:
            _replaced[row.key].check_untouched()


def _add(row: Patch) -> None:
    replaced = _replaced.get(row.key)
    if replaced is None:
        replaced = _replaced[row.key] = _ReplacedName(
            owner_of(row), row.name, row.is_missing
        )
    # The entries of a name are sorted by group, because a group has only one
    # entry per name.
    replaced.set_rows(
        sorted([*replaced.rows, row], key=lambda one: GROUPS.index(one.group))
    )


def _remove(row: Patch) -> None:
    replaced = _replaced[row.key]
    replaced.set_rows([one for one in replaced.rows if one != row])
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

    AutoGraph does not convert `ours` and `original`. AutoGraph does convert the
    functions that `original` calls, such as the `call` method of a user-defined
    layer. `tf.autograph.experimental.do_not_convert` is not used, because it
    would also disable AutoGraph for these functions.
    """
    ours = tf_private.called_as_written(ours)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return tf_private.called_as_written(wrapper)


def owner_of(row: Patch) -> Any:
    """Returns the module or class whose attribute `row` replaces."""
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
    """Returns the full name of an attribute, as in TensorFlow's docs."""
    full = (
        f"{owner.__module__}.{owner.__qualname__}.{name}"
        if inspect.isclass(owner)
        else f"{owner.__name__}.{name}"
    )
    # Prefixes of modules with public names, for example `tf.raw_ops`.
    return re.sub(
        r"^(tensorflow\._api\.v2|tensorflow)\.(?!python|dtensor)", "tf.", full
    )
