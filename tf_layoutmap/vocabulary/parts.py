"""The variables of a vocabulary, and the parts of its table.

A part contains the rows that one call of an op can access. The stores in
`tf_layoutmap/embedding` create the parts; see `embedding/table_store.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from tf_layoutmap.sharded.routing.checks import known_size
from tf_layoutmap.vocabulary import bucket_layout

if TYPE_CHECKING:
    from tf_layoutmap.embedding.processes import Processes

# Names of the vocabulary's variables in checkpoints. These variables are
# children of the same object as the variables of the table.
KEYS = "vocabulary_keys"
LAST_STEPS = "vocabulary_last_steps"
COUNTS = "vocabulary_counts"
SKETCH = "vocabulary_sketch"
SKETCH_SUMS = "vocabulary_sketch_sums"
NUMBERS = "vocabulary_numbers"
# All names, in the order of the ops' inputs.
_IN_ORDER = (KEYS, LAST_STEPS, COUNTS, SKETCH, SKETCH_SUMS, NUMBERS)
NAMES = frozenset(_IN_ORDER)

# Elements of `NUMBERS` (cc/kernels/vocabulary/locked_vocabulary.h).
NUMBERS_HELD = (
    "step",
    "kind",
    "num_lookups",
    "num_known",
    "num_probes",
    "num_admitted",
    "num_rejected",
    "num_full",
    "num_evicted",
    "num_expired",
)

# Name of the variable with the rows of a table.
_PARAMETERS = "parameters"


def in_order_of_ops(shards: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Returns the shards of a vocabulary in the order of the ops' inputs.

    Args:
      shards: Shards of variables by name. Other variables are ignored.
    """
    return [shard for name in _IN_ORDER for shard in shards.get(name, ())]


def shards_of(variable: Any) -> list[tf.Variable]:
    """Returns the shards of a variable, or the unsharded variable itself."""
    return list(getattr(variable, "variables", None) or [variable])


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Rows of a table that one call of an op can access.

    Attributes:
      table: Index of the table.
      index: Index of the part in its table.
      rows: The rows, as indices in the unsharded table.
      device: Device of the variables.
      owner: Index of the process that holds the variables.
      variables: Variables of the table by name, each as a list of shards. Empty
        in processes that do not own the part.
      vocabulary: Variables of the vocabulary that the table uses, in the same
        form. Empty for a table without an open vocabulary.
    """

    table: int
    index: int
    rows: range
    device: str
    owner: int
    variables: Mapping[str, Sequence[Any]]
    vocabulary: Mapping[str, Sequence[Any]]

    @property
    def buckets(self) -> range:
        """The buckets of the vocabulary. The last row belongs to no bucket."""
        lanes = bucket_layout.KEYS_PER_BUCKET
        return range(self.rows.start // lanes, self.rows.stop // lanes)

    def buckets_of_shards(self) -> list[int]:
        """Returns the number of buckets of each shard of the part.

        In processes that do not own the part, it is a single shard.
        """
        shards = self.vocabulary.get(KEYS)
        if shards is None:
            return [len(self.buckets)]
        return [known_size(shard) for shard in shards]

    def buckets_if_shard(self, num_buckets: int) -> int:
        """Returns the op attribute `vocabulary_buckets`.

        The attribute is 0 for a part with all buckets of the vocabulary, which
        can have several shards. Otherwise, an op requires a single shard.

        Args:
          num_buckets: Number of buckets of the vocabulary.
        """
        return 0 if len(self.buckets) == num_buckets else num_buckets

    def offsets(self) -> list[int]:
        """Returns the cumulative numbers of buckets of the shards."""
        return [0, *itertools.accumulate(self.buckets_of_shards())]

    @property
    def state(self) -> list[Any]:
        """The variables of the vocabulary, in the order of the ops' inputs."""
        return in_order_of_ops(self.vocabulary)

    def key_variables(self) -> list[Sequence[Any]]:
        """Returns the shards of the keys, of the last steps and of counts."""
        return [self.vocabulary[name] for name in (KEYS, LAST_STEPS, COUNTS)]

    def row_variables(self, slots: Iterable[str]) -> list[Sequence[Any]]:
        """Returns the shards of the rows, and of each slot variable."""
        return [self.variables[name] for name in (_PARAMETERS, *slots)]

    @property
    def numbers(self) -> Any:
        """Variable with the statistics of the vocabulary."""
        (variable,) = self.vocabulary[NUMBERS]
        return variable


class Parts(Protocol):
    """Access to the parts of tables; see `TableStore`, also for the methods.

    Attributes:
      group: The processes that call methods together, or None.
    """

    group: Processes | None

    def parts(self, table: int) -> list[Part]:
        """Returns the parts of a table, in the order of their rows."""
        ...

    def run(self, part: Part, function: Callable[[Part], Any]) -> Any:
        """Calls a function on the device of a part, in its owner."""
        ...

    def send(self, part: Part, result: Any) -> Any:
        """Returns the result of one part, in all processes."""
        ...

    def each(self, table: int, function: Callable[[Part], Any]) -> list[Any]:
        """Calls a function for each part, and returns all results."""
        ...

    def ask(
        self,
        table: int,
        arguments: tf.Tensor,
        function: Callable[[Part, tf.Tensor], list[tf.Tensor]],
        num_results: int,
    ) -> list[list[tf.Tensor]]:
        """Calls a function for each part, with arguments of this process."""
        ...

    def check_can_read(self, call: str) -> None:
        """Checks that the results of parts can be sent here."""


def keys_of(part: Part) -> list[tf.Tensor]:
    """Returns the keys of a part by bucket."""
    return [tf.concat(part.vocabulary[KEYS], 0)]


def num_keys_of(part: Part) -> list[tf.Tensor]:
    """Returns the number of keys of a part."""
    return [
        tf.add_n(
            [
                tf.math.count_nonzero(shard != bucket_layout.EMPTY_KEY)
                for shard in part.vocabulary[KEYS]
            ]
        )
    ]
