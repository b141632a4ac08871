"""State of random ops in the steps of a model, as on one device.

The state of a legacy random op, such as the dropout of tf_keras, consists of
two seeds, which are constants of the graph, and of a counter in the kernel. On
one device, TensorFlow traces a step once for all batch sizes, and a loop body
once for all time steps. On a mesh, a step is traced for each batch size, and
loops are unrolled. Without this module, each of these graphs would have
separate seeds and counters.

`StepRandomState` therefore stores the counters of a step in variables. In the
trace of a step, `draw` replaces a legacy random op by the stateless op with the
same numbers. `TraceIds` finds out which batches share one trace on one device.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import transfer
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.mesh.variable import StoredVariable
from tf_layoutmap.layout.ops.corrections import static_array

dtensor = tf.experimental.dtensor

# Number of counters in one variable. A step has few variables, because each
# variable is read and written in each step.
_COUNTERS_PER_VARIABLE = 64
# Number of blocks of the generator that a kernel reserves per number.
_BLOCKS_PER_NUMBER = 256
_PHILOX = 1

# Stateless ops that draw the numbers of a legacy op from a key and a counter.
_STATELESS: dict[str, Callable[..., Any]] = {
    "random_uniform": tf.raw_ops.StatelessRandomUniformV2,
    "random_uniform_int": tf.raw_ops.StatelessRandomUniformIntV2,
    "random_standard_normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}


class TraceIds:
    """Numbers of the traces in which one device runs a step."""

    def __init__(self) -> None:
        self._by_specs: dict[Any, int] = {}
        self._traces: dict[int, int] = {}
        self._kept: list[Any] = []
        self._last: Callable[[], Any] = lambda: None
        self._last_id = 0
        # Keras uses the same options.
        self._function = tf.function(
            lambda data: None, reduce_retracing=True, autograph=False
        )

    def id_of(self, data: Any) -> int:
        """Returns the number of the trace for an iterator or a batch.

        Args:
          data: Iterator that Keras passes to its step, or a batch.

        Returns:
          A positive number; 1 if it cannot be determined.
        """
        if self._last() is data:
            return self._last_id
        is_iterator = isinstance(data, tf.data.Iterator)
        try:
            specs = (
                data.element_spec
                if is_iterator
                else tf.nest.map_structure(_spec, data)
            )
            flat = tf.nest.flatten(specs, expand_composites=True)
            key = (is_iterator, *map(repr, flat))
            if key not in self._by_specs:
                self._by_specs[key] = self._new_id(data)
            number = self._by_specs[key]
        except (TypeError, ValueError, AttributeError):
            return 1
        if is_iterator:
            self._last, self._last_id = weakref.ref(data), number
        return number

    def _new_id(self, data: Any) -> int:
        trace = self._function.get_concrete_function(data)
        self._kept.append(trace)
        return self._traces.setdefault(id(trace), len(self._traces) + 1)


def _spec(x: Any) -> Any:
    return x if x is None else tf.TensorSpec(x.shape, x.dtype)


class _Scope:
    """A step or a loop body: one graph of one device.

    A scope can be traced several times. Each time, the seeds of generators
    start with the same values.
    """

    def __init__(self, key: tuple[int, ...]):
        self.key = key
        self.starts: dict[Any, int] = {}
        self.begin()

    def begin(self) -> None:
        """Begins the trace of the scope."""
        self.num_ops = 0
        self.num_loops = 0
        self.seen: set[Any] = set()

    def is_first_use(self, user: Any) -> bool:
        """Returns whether `user` is used for the first time in this trace."""
        is_first = id(user) not in self.seen
        self.seen.add(id(user))
        return is_first


class StepRandomState:
    """The counters and seeds of all random ops in one step of a model."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._variables: list[StoredVariable] = []
        self._positions: dict[Any, int] = {}
        self._scopes: dict[int, _Scope] = {}
        # Whether the step contains random ops or draws seeds.
        self.is_used = False

    @contextlib.contextmanager
    def tracing(self, trace_id: int) -> Iterator[None]:
        """Context manager in which the step is traced."""
        scope = self._scopes.setdefault(trace_id, _Scope((trace_id,)))
        scope.begin()
        trace = _Trace(self, scope)
        with _trace.set_to(trace):
            yield
            trace.write_counters()
        trace.restore_seeds()

    def draws_seeds(self, trace_id: int) -> bool:
        """Returns whether the trace has drawn seeds of generators."""
        scope = self._scopes.get(trace_id)
        return scope is not None and bool(scope.starts)

    def discard(self, trace_id: int) -> None:
        """Keeps the seeds that a trace has drawn as used."""
        self._scopes.pop(trace_id, None)

    def position(self, key: Any) -> int:
        """Returns the position of the counter of an op."""
        self.is_used = True
        position = self._positions.setdefault(key, len(self._positions))
        if position // _COUNTERS_PER_VARIABLE == len(self._variables):
            with tf.init_scope():
                zeros = np.zeros([_COUNTERS_PER_VARIABLE], np.int64)
                layout = dtensor.Layout.replicated(self._mesh, 1)
                self._variables.append(
                    StoredVariable(
                        transfer.to_mesh(zeros, layout), trainable=False
                    )
                )
        return position

    def variable(self, number: int) -> StoredVariable:
        """Returns a variable with counters."""
        return self._variables[number]


class _Trace:
    """One trace of a step."""

    def __init__(self, state: StepRandomState, scope: _Scope):
        self.graph = tf.compat.v1.get_default_graph()
        self.scopes = [scope]
        # Number of random ops and drawn seeds.
        self.num_draws = 0
        self._state = state
        self._seeds: dict[Any, int] = {}
        self._values: dict[int, Any] = {}
        self._added: dict[int, np.ndarray] = {}

    def use_seed(self, generator: Any) -> None:
        """Sets the seed of a generator before it is drawn."""
        self._state.is_used = True
        self.num_draws += 1
        self._seeds.setdefault(generator, generator._seed)
        for scope in self.scopes:
            if scope.is_first_use(generator):
                generator._seed = scope.starts.setdefault(
                    generator, generator._seed
                )

    def restore_seeds(self) -> None:
        """Sets each seed to the first value that no trace has used."""
        for generator, seed in self._seeds.items():
            generator._seed = max(seed, generator._seed)

    def counter(self, key: Any, num_blocks: int) -> Any:
        """Returns the counter of the next op, and increments it."""
        scope = self.scopes[-1]
        number, place = divmod(
            self._state.position((scope.key, scope.num_ops, *key)),
            _COUNTERS_PER_VARIABLE,
        )
        scope.num_ops += 1
        self.num_draws += 1
        if number not in self._values:
            self._values[number] = tf.unstack(
                self._state.variable(number).read_value()
            )
            self._added[number] = np.zeros([_COUNTERS_PER_VARIABLE], np.int64)
        added = self._added[number]
        counter = self._values[number][place] + added[place]
        added[place] += num_blocks
        return counter

    def write_counters(self) -> None:
        """Traces the writes of the counters."""
        for number, added in self._added.items():
            self._state.variable(number).assign_add(added)


_trace: ThreadValue[_Trace | None] = ThreadValue(None)
# Seeds to which generators are reset, or None.
_saved_seeds: ThreadValue[dict[Any, int] | None] = ThreadValue(None)


def _current_trace() -> _Trace | None:
    """Returns the trace of a step; None in inner functions and branches."""
    trace = _trace.get()
    if (
        trace is None
        or tf.executing_eagerly()
        or trace.graph is not tf.compat.v1.get_default_graph()
    ):
        return None
    return trace


def count_draw() -> None:
    """Counts a random op that has no state of its own."""
    trace = _current_trace()
    if trace is not None:
        trace.num_draws += 1


def use_seed(generator: Any) -> None:
    """Sets the attribute `_seed`, if any, of a generator before it is drawn."""
    if getattr(generator, "_seed", None) is None:
        return
    saved, trace = _saved_seeds.get(), _trace.get()
    if saved is not None:
        saved.setdefault(generator, generator._seed)
    elif trace is not None:
        trace.use_seed(generator)


@contextlib.contextmanager
def seeds_restored() -> Iterator[None]:
    """Context manager that resets seeds at its end.

    It is used for traces that do not exist on one device.
    """
    seeds: dict[Any, int] = {}
    try:
        with _saved_seeds.set_to(seeds):
            yield
    finally:
        for generator, seed in seeds.items():
            generator._seed = seed


def draw(kind: str, arguments: dict[str, Any]) -> Any:
    """Draws the numbers of a legacy random op with a stored counter.

    Args:
      kind: Name of the op, such as `"random_uniform"`.
      arguments: Arguments of the op, with its seeds.

    Returns:
      A tensor; None if the op must draw the numbers.
    """
    trace = _current_trace()
    shape = (
        None
        if trace is None or kind not in _STATELESS
        else static_array(arguments["shape"])
    )
    if trace is None or shape is None:
        return None
    seed, seed2 = (
        int(arguments.get(name) or 0) % 2**64 for name in ("seed", "seed2")
    )
    skipped = trace.counter(
        (kind, seed, seed2), _BLOCKS_PER_NUMBER * math.prod(shape.tolist())
    )
    return _STATELESS[kind](
        shape=arguments["shape"],
        key=tf.constant([seed], tf.uint64),
        counter=tf.stack(
            [tf.cast(skipped, tf.uint64), tf.constant(seed2, tf.uint64)]
        ),
        alg=_PHILOX,
        **{
            name: arguments[name]
            for name in ("dtype", "minval", "maxval")
            if name in arguments
        },
    )


class UnrolledLoop:
    """A loop that is unrolled on a mesh, but has one body on one device."""

    def __init__(self) -> None:
        self._trace = _current_trace()
        if self._trace is None:
            return
        parent = self._trace.scopes[-1]
        self._scope = _Scope((*parent.key, parent.num_loops))
        parent.num_loops += 1

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context manager in which one step of the loop is traced."""
        trace = self._trace
        if trace is None:
            yield
            return
        self._scope.begin()
        trace.scopes.append(self._scope)
        try:
            with tf_private.op_seeds_from_zero(trace.graph):
                yield
        finally:
            trace.scopes.pop()


def unrolled_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the step of a recurrent layer for an unrolled loop.

    On one device, Keras calls the step twice: in the graph of the layer, where
    only the shape of its output is used, and in the body of the loop. Both
    calls draw seeds.
    """
    trace = _current_trace()
    if trace is None:
        return function
    loop = UnrolledLoop()
    has_draws: bool | None = None

    def step(*args: Any) -> Any:
        nonlocal has_draws
        if not has_draws:
            before = trace.num_draws
            outputs = function(*args)
            if has_draws is None:
                has_draws = trace.num_draws > before
            if not has_draws:
                return outputs
        with loop.step():
            return function(*args)

    return step


def in_new_loop_step(user: Any) -> bool:
    """Returns whether a loop step is traced that `user` has not yet used."""
    trace = _current_trace()
    return (
        trace is not None
        and len(trace.scopes) > 1
        and trace.scopes[-1].is_first_use(user)
    )
