"""Slot variables of sharded tables in Keras 3's optimizers.

If a model's optimizer trains the shards of a table as weights, it creates slot
variables for each shard. In a file, the slot variables of the same kind are
joined to one array, which has the position of the slot variable of an unsharded
embedding. The file can therefore be restored into any number of shards.
Checkpoints iterate over an optimizer's lists, and weight files iterate over its
`variables`. The patches at the end of this module replace the slot variables of
shards by the joined slot variables in these lists.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tf_layoutmap._core import patches, tf_private
from tf_layoutmap.layers.base import weight_files
from tf_layoutmap.sharded import ShardedVariable

_SLOT_TABLE_ATTRIBUTE = "_slot_table"


class SlotTable:
    """The slot variables of one kind, such as momenta, for a table's shards."""

    def __init__(self, table: ShardedVariable):
        """Creates the object for the slot variables of `table`."""
        self._table = table
        self._parts: dict[int, Any] = {}
        self._joined_table: ShardedVariable | None = None

    def has(self, shard: int) -> bool:
        """Returns whether the slot variable of `shard` was added."""
        return shard in self._parts

    def add(self, shard: int, variable: Any) -> None:
        """Adds the `keras.Variable` of `shard`."""
        self._parts[shard] = variable
        vars(variable)[_SLOT_TABLE_ATTRIBUTE] = self

    @property
    def joined_table(self) -> ShardedVariable | None:
        """The slot variables as one table, or None if it is incomplete."""
        if self._joined_table is None and len(self._parts) == len(
            self._table.variables
        ):
            self._joined_table = ShardedVariable(
                [part.value for _, part in sorted(self._parts.items())],
                name=f"slots of {self._table.name}",
                placement=self._table.partition,
            )
        return self._joined_table


class SlotTables:
    """Groups slot variables by kind while an optimizer creates them."""

    def __init__(self, table: ShardedVariable):
        """Creates the object for a table whose shards the optimizer trains."""
        self._table = table
        self._kinds: list[SlotTable] = []

    def add(self, shard: int, variable: Any) -> None:
        """Adds a slot variable.

        The order of kinds must be equal for all shards.
        """
        kind = next((kind for kind in self._kinds if not kind.has(shard)), None)
        if kind is None:
            kind = SlotTable(self._table)
            self._kinds.append(kind)
        kind.add(shard, variable)


def slot_table_of(variable: Any) -> SlotTable | None:
    """Returns the slot table that a slot variable belongs to, or None."""
    return getattr(variable, "__dict__", {}).get(_SLOT_TABLE_ATTRIBUTE)


def join_slots(
    variables: Iterable[Any],
    owner_of: Callable[[Any], Any | None] = slot_table_of,
) -> list[Any]:
    """Returns `variables`, with all parts of an object replaced by the object.

    Args:
      variables: Variables in the order of an optimizer.
      owner_of: Function that returns the object that a variable is a part of,
        or None.

    Returns:
      The list, in which each object has the position of its first part. The
      number and the order of the elements are therefore the same as for an
      unsharded table.
    """
    joined: dict[int, Any] = {}
    for variable in variables:
        joined_table = owner_of(variable)
        table = variable if joined_table is None else joined_table
        joined.setdefault(id(table), table)
    return list(joined.values())


def save_slots(variables: Iterable[Any], store: Any) -> None:
    """Writes an optimizer's variables with joined slot variables."""
    for number, value in enumerate(join_slots(variables)):
        if isinstance(value, SlotTable):
            weight_files.save_table(store, str(number), _complete(value))
        else:
            store[str(number)] = value.numpy()


def load_slots(variables: Iterable[Any], store: Any) -> bool:
    """Reads what `save_slots` wrote; the number of shards may differ.

    Returns:
      Whether the file has the expected number of variables. If the result is
      False, no variable was changed.

    Raises:
      ValueError: If an array and its variable have different shapes. In this
        case, no variable is changed.
    """
    joined = [
        _complete(value) if isinstance(value, SlotTable) else value
        for value in join_slots(variables)
    ]
    if len(store.keys()) != len(joined):
        return False
    for number, value in enumerate(joined):
        weight_files.check_table(store, str(number), value)
    for number, value in enumerate(joined):
        if isinstance(value, ShardedVariable):
            weight_files.load_table(store, str(number), value)
        else:
            value.assign(store[str(number)])
    return True


def skipped_slots(optimizer: Any, store: Any) -> str:
    """Returns the warning text for a file that `load_slots` did not read."""
    return (
        f"The saved optimizer must have {len(join_slots(optimizer.variables))} "
        "variables, where slot variables of a table's shards count as one. "
        f"Received: {len(store.keys())}; optimizer {optimizer.name!r} was not "
        "changed."
    )


def _complete(slots: SlotTable) -> ShardedVariable:
    joined_table = slots.joined_table
    if joined_table is None:
        raise RuntimeError(
            "An optimizer must have the slot variables of all shards of a "
            "table when it is saved or loaded; build it with all of the "
            "layer's weights."
        )
    return joined_table


_ATTRIBUTE = "_shard_slots"


class ShardOfTable:
    """A mixin for a `keras.Variable` that holds one shard of a table."""

    table: ShardedVariable
    shard: int

    def __init__(self, *args: Any, **kwargs: Any):
        patches.ensure("keras3_shard_slots")
        super().__init__(*args, **kwargs)


class _JoinedList(tf_private.Trackable):
    """The list that a checkpoint saves instead of an optimizer's list."""

    def __init__(self, variables: Any, owner_of: Any):
        self._variables = variables
        self._owner_of = owner_of
        self._maybe_initialize_trackable()

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = {}
        for number, value in enumerate(
            join_slots(self._variables, self._owner_of)
        ):
            if isinstance(value, SlotTable):
                value = value.joined_table
            if isinstance(value, tf_private.Trackable):
                children[str(number)] = value
        return children

    # The original list also records the number of the latest restore.

    @property
    def _update_uid(self) -> int:
        return max(self._self_update_uid, self._variables._update_uid)

    @_update_uid.setter
    def _update_uid(self, value: int) -> None:
        self._self_update_uid = value

    def take_over_deferred(self) -> None:
        """Moves the restored values of future variables to this object.

        The optimizer's original list would select the value of a variable by
        the variable's index in the list. In a file, however, the slot variables
        of all shards count as one variable.
        """
        pending = self._variables._deferred_dependencies
        self._deferred_dependencies.update(pending)
        pending.clear()

    def restore_deferred(self) -> None:
        """Restores all variables that have been created since the last call."""
        if not self._deferred_dependencies:
            return
        for name, child in self._trackable_children().items():
            if name in self._deferred_dependencies:
                self._handle_deferred_dependencies(name, child)


class _ShardSlots:
    """Additional state of an optimizer that trains shards of tables."""

    def __init__(
        self,
        optimizer: Any,
        tables: dict[int, ShardedVariable],
        shards: dict[int, int],
    ):
        """Creates the state. The dicts have the key `id(weight)`."""
        self._tables = tables
        self._shards = shards
        self._slots = {
            id(table): SlotTables(table) for table in tables.values()
        }
        self._lists: dict[str, tuple[Any, _JoinedList]] = {}
        self._weight: Any = None
        self._held: dict[str, Any] = {}
        self.joined = self._join("_variables", optimizer._variables)
        self.joined.take_over_deferred()

    @contextlib.contextmanager
    def creating_slots_of(self, weight: Any) -> Iterator[None]:
        """Context in which new variables are slot variables of `weight`."""
        self._weight = weight if id(weight) in self._tables else None
        try:
            yield
        finally:
            self._weight = None

    def hold_deferred(self, optimizer: Any) -> None:
        """Stores values to restore until `build` has filled the lists."""
        pending = optimizer._deferred_dependencies
        self._held = dict(pending)
        pending.clear()

    def release_deferred(self, optimizer: Any) -> None:
        """Restores the variables in the lists that `build` has filled."""
        optimizer._deferred_dependencies.update(self._held)
        children = optimizer._trackable_children()
        for name in self._held.keys() & children.keys():
            optimizer._handle_deferred_dependencies(name, children[name])
        self._held = {}

    def track(self, variable: Any) -> None:
        """Registers a new variable of the optimizer."""
        if self._weight is not None:
            weight = id(self._weight)
            self._slots[id(self._tables[weight])].add(
                self._shards[weight], variable
            )
        self.joined.restore_deferred()

    def children(self, children: dict[str, Any]) -> dict[str, Any]:
        """Returns the checkpoint children with joined slot variables."""
        return {
            name: self._join(name, child)
            if isinstance(child, list | tuple)
            and any(self._owner_of(element) is not None for element in child)
            else child
            for name, child in children.items()
        }

    def _join(self, name: str, variables: Any) -> _JoinedList:
        # The object is cached, because a checkpoint calls this method several
        # times and compares the results by identity.
        if name not in self._lists or self._lists[name][0] is not variables:
            self._lists[name] = (
                variables,
                _JoinedList(variables, self._owner_of),
            )
        return self._lists[name][1]

    def _owner_of(self, variable: Any) -> Any | None:
        joined_table = self._tables.get(id(variable))
        return slot_table_of(variable) if joined_table is None else joined_table


def _shards_of_tables(
    variables: Sequence[Any],
) -> tuple[dict[int, ShardedVariable], dict[int, int]]:
    """Returns two dicts: the table and the shard number by `id(variable)`.

    If `variables` does not contain all shards of a table, the table is skipped.
    """
    weights = [
        variable for variable in variables if isinstance(variable, ShardOfTable)
    ]
    shards_of: dict[int, set[int]] = {}
    for weight in weights:
        shards_of.setdefault(id(weight.table), set()).add(weight.shard)
    joined = [
        weight
        for weight in weights
        if len(weight.table.variables) == len(shards_of[id(weight.table)])
    ]
    return (
        {id(weight): weight.table for weight in joined},
        {id(weight): weight.shard for weight in joined},
    )


def build(original: Callable[..., Any], optimizer: Any, variables: Any) -> Any:
    """Builds an optimizer and records which variables are shards of tables."""
    tables, shards = _shards_of_tables(variables)
    if not tables:
        return original(optimizer, variables)
    slots = _ShardSlots(optimizer, tables, shards)
    # `vars` bypasses the attribute tracking of Keras and TensorFlow.
    vars(optimizer)[_ATTRIBUTE] = slots
    slots.hold_deferred(optimizer)
    original(optimizer, variables)
    slots.release_deferred(optimizer)
    return None


def add_variable(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Creates a variable; records whether it is a slot variable of a shard."""
    slots = _slots_of(optimizer)
    with (
        contextlib.nullcontext()
        if slots is None
        else slots.creating_slots_of(reference_variable)
    ):
        return original(optimizer, reference_variable, *args, **kwargs)


def track_variable(
    original: Callable[..., Any], optimizer: Any, variable: Any
) -> None:
    """Tracks a new variable of an optimizer, and restores its saved value."""
    original(optimizer, variable)
    slots = _slots_of(optimizer)
    if slots is not None:
        slots.track(variable)


def trackable_children(
    original: Callable[..., Any],
    optimizer: Any,
    save_type: str = "checkpoint",
    **kwargs: Any,
) -> Any:
    """Returns an optimizer's checkpoint children with joined slot variables."""
    children = original(optimizer, save_type, **kwargs)
    slots = _slots_of(optimizer)
    if slots is None or save_type != "checkpoint":
        return children
    return slots.children(children)


def save_own_variables(
    original: Callable[..., Any], optimizer: Any, store: Any
) -> Any:
    """Writes an optimizer's variables to a file with joined slot variables."""
    if not _is_joined(optimizer):
        return original(optimizer, store)
    return save_slots(optimizer.variables, store)


def load_own_variables(
    original: Callable[..., Any], optimizer: Any, store: Any
) -> Any:
    """Reads an optimizer's variables from a file with joined slot variables."""
    if not _is_joined(optimizer):
        return original(optimizer, store)
    if not load_slots(optimizer.variables, store):
        warnings.warn(skipped_slots(optimizer, store), stacklevel=2)
    return None


def _slots_of(optimizer: Any) -> _ShardSlots | None:
    return vars(optimizer).get(_ATTRIBUTE)


def _is_joined(optimizer: Any) -> bool:
    return any(
        slot_table_of(variable) is not None for variable in optimizer.variables
    )
