"""Installs and uninstalls groups of entries of the patch table.

`patches` is the public function `tlm.process.patches`, which lists the names
that are currently replaced.
"""

import dataclasses
import functools
import hashlib
import importlib
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

from tf_layoutmap._core import tf_private
from tf_layoutmap._core.patch_entry import Patch

# Maps each group to the module that contains its entries. The module is
# imported when the group is first used. The order of this table is the order of
# installation: if two entries replace the same name, the replacement of the
# later group is called first. For example, the code that moves values to a mesh
# is called before the code that updates tables.
_HOMES = {
    "mesh": "tf_layoutmap.layout.replacements",
    "checkpoints": "tf_layoutmap.layout.mesh.replacements",
    "keras3_self_training": "tf_layoutmap.layers.keras3.replacements",
    "keras3_shard_slots": "tf_layoutmap.layers.keras3.replacements",
    "tf_keras_self_training": "tf_layoutmap.layers.tf_keras.replacements",
    "keras3_string_batches": "tf_layoutmap.layers.keras3.replacements",
    "keras3_processes": "tf_layoutmap.layers.keras3.replacements",
    "keras3_evaluation": "tf_layoutmap.layers.keras3.replacements",
    "keras3_embedding_creation": "tf_layoutmap.layers.keras3.replacements",
    "tf_keras_evaluation": "tf_layoutmap.layers.tf_keras.replacements",
    "tf_keras_embedding_creation": "tf_layoutmap.layers.tf_keras.replacements",
    "keras3": "tf_layoutmap.layout.keras3.replacements",
    "keras_distribution": "tf_layoutmap.distribution.replacements",
    "tf_keras": "tf_layoutmap.layout.tf_keras.replacements",
    "tpu_optimizer_enum": "tf_layoutmap.emulation.replacements",
    "emulation": "tf_layoutmap.emulation.replacements",
    "keras3_ps": "tf_layoutmap.ps.replacements",
    "tf_keras_ps": "tf_layoutmap.ps.tf_keras_replacements",
    "ps_exit": "tf_layoutmap.ps.replacements",
    "ps_calls": "tf_layoutmap.ps.replacements",
    "sharded_tables": "tf_layoutmap.embedding.process_sharded.replacements",
    "table_restores": "tf_layoutmap.embedding.checkpoints.replacements",
    "memory": "tf_layoutmap._core.freed_gradients",
    "table_gradients": "tf_layoutmap.sharded.replacements",
    "function_traces": "tf_layoutmap._core.function_traces",
    "function_calls": "tf_layoutmap._core.function_traces",
}

GROUPS: tuple[str, ...] = tuple(_HOMES)


@functools.cache
def entries_of(group: str) -> tuple[Patch, ...]:
    """Imports the module of a group and returns the entries of the group.

    Raises:
      KeyError: If `group` is not in `GROUPS`.
    """
    module = importlib.import_module(_HOMES[group])
    return tuple(entry for entry in module.PATCHES if entry.group == group)


def all_entries() -> list[Patch]:
    """Returns the entries of all groups, in the order of installation."""
    return [entry for group in GROUPS for entry in entries_of(group)]


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
        self.entries: list[Patch] = []

    def set_entries(self, entries: list[Patch]) -> None:
        """Replaces the name; the last element of `entries` is called first."""
        everywhere = any(
            entry.everywhere for entry in (*entries, *self.entries)
        )
        before, value = self._current, self.original
        self.entries = entries
        for entry in entries:
            value = _replacement(entry, value)
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
    entries = entries_of(group)
    with _lock:
        if _counts.get(group, 0) == 0:
            _check_untouched(entries)
            for entry in entries:
                _add(entry)
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
    entries = entries_of(group)
    with _lock:
        if not _counts.get(group):
            raise RuntimeError(
                "`uninstall` must follow an `install` of the same group. "
                f"Received: group {group!r}, which is not installed."
            )
        if _counts[group] == 1:
            _check_untouched(entries)
            for entry in reversed(entries):
                _remove(entry)
            _ensured.discard(group)
        _counts[group] -= 1


def is_installed(group: str) -> bool:
    """Returns whether the names of a group are replaced."""
    return bool(_counts.get(group))


def installed_entries() -> list[Patch]:
    """Returns the installed entries, in the order of the table."""
    with _lock:
        return [
            entry
            for group in GROUPS
            if _counts.get(group)
            for entry in entries_of(group)
        ]


def _check_untouched(entries: tuple[Patch, ...]) -> None:
    """Checks all names of a group before any of them is changed.

    If the check fails, no name of the group is changed.
    """
    for entry in entries:
        if entry.key in _replaced:
            _replaced[entry.key].check_untouched()


def _add(entry: Patch) -> None:
    replaced = _replaced.get(entry.key)
    if replaced is None:
        replaced = _replaced[entry.key] = _ReplacedName(
            owner_of(entry), entry.name, entry.is_missing
        )
    # The entries of a name are sorted by group, because a group has only one
    # entry per name.
    replaced.set_entries(
        sorted(
            [*replaced.entries, entry],
            key=lambda item: GROUPS.index(item.group),
        )
    )


def _remove(entry: Patch) -> None:
    replaced = _replaced[entry.key]
    replaced.set_entries(
        [other for other in replaced.entries if other != entry]
    )
    if not replaced.entries:
        del _replaced[entry.key]


def _replacement(entry: Patch, original: Any) -> Any:
    if entry.make is None:
        return around(original, entry.ours)
    base = original if entry.base is None else _replaced[entry.base].original
    return entry.make(original, functools.partial(entry.ours, base))


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


def owner_of(entry: Patch) -> Any:
    """Returns the module or class whose attribute `entry` replaces."""
    module, _, attribute = entry.owner.partition(":")
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


def digest(entry: Patch) -> str | None:
    """Returns a digest of the source of a replaced function.

    The digest is the same while the function is replaced. It is None for a name
    that only this package adds, and `"unreadable"` without source files.
    """
    if entry.is_missing:
        return None
    replaced = _replaced.get(entry.key)
    original = (
        inspect.getattr_static(owner_of(entry), entry.name)
        if replaced is None
        else replaced.original
    )
    try:
        source = "".join(
            inspect.getsource(function)
            for function in (
                (original.fget, original.fset)
                if isinstance(original, property)
                else (original,)
            )
            if function is not None
        )
    except (OSError, TypeError):
        return "unreadable"
    return hashlib.sha256(source.encode()).hexdigest()[:8]


@dataclasses.dataclass(frozen=True)
class AppliedPatch:
    """A name of TensorFlow, Keras or tf_keras that is currently replaced.

    Attributes:
      name: Full name, such as `"keras.src.layers.layer.Layer.__call__"`.
      group: Group of the name; all names of a group are replaced together.
      replacement: Full name of the function of this package.
      why: Problem that occurs without the replacement.
      seen_in: Version in which the problem was observed.
    """

    name: str
    group: str
    replacement: str
    why: str
    seen_in: str


def patches() -> tuple[AppliedPatch, ...]:
    """Returns the names that tf_layoutmap has replaced in this process so far.

    Importing tf_layoutmap does not replace any name. The package replaces names
    when user code creates a scope, a mesh or a layer that requires the
    replacements. For all other objects, the replaced functions behave as
    before.

    ```python
    for patch in tlm.process.patches():
        print(patch.name, "-", patch.why)
    ```

    Returns:
      One `AppliedPatch` per replaced name, in a fixed order.
    """
    return tuple(
        AppliedPatch(
            name=display_name(owner_of(entry), entry.name),
            group=entry.group,
            replacement=f"{entry.ours.__module__}.{entry.ours.__qualname__}",
            why=entry.why,
            seen_in=entry.seen_in,
        )
        for entry in installed_entries()
    )
