"""Slot variables of a table's shards, which are one table in every file.

Where a model's optimizer trains the shards of a table as weights, it makes slot
variables of each. A file holds those of one kind as one array, in the place
where the slot variable of an unsharded embedding stands: so it restores into
any number of shards.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tf_layoutmap.layers.shared import table_weights_file
from tf_layoutmap.sharded import ShardedVariable

_ATTRIBUTE = "_slot_table"


class SlotTable:
    """The slot variables of one kind, such as momenta, of a table's shards."""

    def __init__(self, table: ShardedVariable):
        """Takes the table that they belong to."""
        self._table = table
        self._parts: dict[int, Any] = {}
        self._whole: ShardedVariable | None = None

    def has(self, shard: int) -> bool:
        """Whether the one of `shard` is there."""
        return shard in self._parts

    def add(self, shard: int, variable: Any) -> None:
        """Takes the `keras.Variable` of `shard`."""
        self._parts[shard] = variable
        vars(variable)[_ATTRIBUTE] = self

    @property
    def whole(self) -> ShardedVariable | None:
        """One table of them; None while some are missing."""
        if self._whole is None and len(self._parts) == len(
            self._table.variables
        ):
            self._whole = ShardedVariable(
                [part.value for _, part in sorted(self._parts.items())],
                name=f"slots of {self._table.name}",
                placement=self._table.partition,
            )
        return self._whole


class SlotTables:
    """Puts slot variables together while an optimizer makes them."""

    def __init__(self, table: ShardedVariable):
        """Takes the table whose shards the optimizer trains."""
        self._table = table
        self._kinds: list[SlotTable] = []

    def add(self, shard: int, variable: Any) -> None:
        """Takes a slot variable of `shard`; each shard's in the same order."""
        kind = next((kind for kind in self._kinds if not kind.has(shard)), None)
        if kind is None:
            kind = SlotTable(self._table)
            self._kinds.append(kind)
        kind.add(shard, variable)


def slot_table_of(variable: Any) -> SlotTable | None:
    """Returns what a slot variable is a part of, or None."""
    return getattr(variable, "__dict__", {}).get(_ATTRIBUTE)


def join(
    variables: Iterable[Any],
    whole_of: Callable[[Any], Any | None] = slot_table_of,
) -> list[Any]:
    """Returns `variables`, with parts replaced by what they are parts of.

    Args:
      variables: In the order of an optimizer.
      whole_of: Returns what a variable is a part of, or None.

    Returns:
      Each whole stands where its first part stood: so there are as many as
      without shards, in the same order.
    """
    found: dict[int, Any] = {}
    for variable in variables:
        whole = whole_of(variable)
        one = variable if whole is None else whole
        found.setdefault(id(one), one)
    return list(found.values())


def save(variables: Iterable[Any], store: Any) -> None:
    """Writes an optimizer's variables, for `save_own_variables`."""
    for number, one in enumerate(join(variables)):
        if isinstance(one, SlotTable):
            table_weights_file.save(store, str(number), _complete(one))
        else:
            store[str(number)] = one.numpy()


def load(variables: Iterable[Any], store: Any) -> bool:
    """Reads what `save` wrote, of any number of shards, or of none.

    Returns:
      Whether there are as many variables as in the file; else nothing is read.

    Raises:
      ValueError: An array has another shape. Nothing is changed.
    """
    joined = [
        _complete(one) if isinstance(one, SlotTable) else one
        for one in join(variables)
    ]
    if len(store.keys()) != len(joined):
        return False
    for number, one in enumerate(joined):
        table_weights_file.check(store, str(number), one)
    for number, one in enumerate(joined):
        if isinstance(one, ShardedVariable):
            table_weights_file.load(store, str(number), one)
        else:
            one.assign(store[str(number)])
    return True


def skipped(optimizer: Any, store: Any) -> str:
    """Returns the warning for when `load` has read nothing."""
    return (
        f"The saved optimizer must have {len(join(optimizer.variables))} "
        "variables, slot variables of a table's shards counted as one, to be "
        f"loaded. Received: {len(store.keys())}; optimizer "
        f"{optimizer.name!r} goes on as it is."
    )


def _complete(slots: SlotTable) -> ShardedVariable:
    whole = slots.whole
    if whole is None:
        raise RuntimeError(
            "An optimizer must have the slot variables of all shards of a "
            "table when it is saved or loaded; build it with all of the "
            "layer's weights."
        )
    return whole
