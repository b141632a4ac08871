"""Loops on a mesh whose number of steps is unknown, run from the host.

DTensor has no rule for loops, and a loop with an unknown number of steps cannot
be unrolled. If such a loop is at the top level of a `tf.function` of user code,
the function is split at the loop. The result is three kinds of functions, each
compiled once for the mesh:

* the part before the loop, which also computes the first condition,
* one step of the loop, which runs the body and then the condition,
* the part after the loop.

The host calls the step until the condition is false. Between two steps, the
loop variables and all other tensors keep their layouts on the mesh. If all
devices are CPUs of this process, the host calls only the first step, and the
devices repeat the compiled step in one call (`device_loops.py`).

`SplitFunction` traces the Python function once. When the trace reaches the
loop, `SplitTrace.add_loop` traces the step in a separate graph, and sets
another graph as the default graph. The Python function then adds the part after
the loop to that graph. A graph captures tensors of earlier graphs. `_Program`
passes the values of these tensors.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops import device_loops, stacks
from tf_layoutmap.layout.ops.corrections import static_value
from tf_layoutmap.layout.ops.device_loops import DeviceLoop

dtensor = tf.experimental.dtensor

# Dtypes of tensors that a function on a mesh cannot return.
_NEVER_RETURNED = frozenset((tf.resource, tf.variant, tf.string))


# DTensor compiles a function for the values of its small inputs of these
# dtypes, and compiles it again when a value changes. Loop variables such as an
# index are therefore passed in a dtype with the same bits.
_PASSED = {
    tf.int32: tf.uint32,
    tf.float32: tf.uint32,
    tf.int64: tf.uint64,
    tf.float64: tf.uint64,
}
_MAX_SMALL = 1024


def _passed_dtype(dtype: tf.DType, shape: tf.TensorShape) -> tf.DType:
    """Returns the dtype in which a loop variable is passed between parts."""
    is_small = (shape.num_elements() or 0) <= _MAX_SMALL
    return _PASSED.get(dtype, dtype) if is_small else dtype


def _bitcast(x: Any, dtype: tf.DType) -> Any:
    return x if x.dtype == dtype else tf.bitcast(x, dtype)


class _PartGraph(tf_private.FuncGraph):
    """Graph of one part of a split function.

    A captured integer with a static value becomes a constant of the graph,
    because DTensor requires constants for sizes and positions.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self._constants: dict[int, tuple[Any, Any]] = {}

    def capture(
        self, tensor: Any, name: str | None = None, shape: Any = None
    ) -> Any:
        if (
            tf.is_symbolic_tensor(tensor)
            and tensor.graph is not self
            and tensor.dtype.is_integer
            and tensor.shape.rank in (0, 1)
        ):
            if id(tensor) not in self._constants:
                self._constants[id(tensor)] = tensor, self._constant(tensor)
            constant = self._constants[id(tensor)][1]
            if constant is not None:
                return constant
        return super().capture(tensor, name, shape)

    def _constant(self, tensor: Any) -> Any:
        value = static_value(tensor)
        if value is None:
            return None
        with self.as_default(), tf.control_dependencies(None):
            return tf.constant(value, tensor.dtype)


class _Part:
    """A compiled part of a function, and the tensors that it captures."""

    def __init__(self, graph: Any):
        self.graph = graph
        self.captures = list(graph.external_captures)
        self._function = tf_private.ConcreteFunction.from_func_graph(
            graph, None, {}
        )

    def programs(self) -> set[str]:
        """Returns the names of functions that DTensor compiled for the part."""
        prefix = tf.compat.as_str(self._function.name) + "__func_"
        return {
            name
            for name in tf_private.function_names()
            if name.startswith(prefix)
        }

    def __call__(
        self, inputs: Sequence[Any], values: dict[int, Any]
    ) -> list[Any]:
        """Runs the part.

        Args:
          inputs: Values of the inputs.
          values: Values of tensors of earlier parts, by `id`.
        """
        return self._function._call_flat(
            [*inputs], [values.get(id(x), x) for x in self.captures]
        )


# Limit of the number of steps of a loop without a limit.
_MAX_STEPS = 2**31 - 1


def _is_compiled_by_value(x: Any) -> bool:
    """Returns whether DTensor compiles a step for the values of `x`.

    The values of an eager tensor never change.
    """
    return (
        tf.is_symbolic_tensor(x) and _passed_dtype(x.dtype, x.shape) != x.dtype
    )


class _Loop:
    """One loop between two parts of a function.

    The host runs the first step, which DTensor compiles. If possible, the other
    steps run in one call of a `DeviceLoop`.

    Attributes:
      variables: Initial values of the loop variables, in the part before.
      more: First value of the condition, in the part before.
      limit: Maximum number of steps, in the part before, or None.
      is_endless: Whether the condition is always true.
      step: Function of the loop variables that returns their new values and the
        condition.
    """

    def __init__(
        self,
        mesh: Mesh,
        variables: list[Any],
        more: Any,
        limit: Any,
        is_endless: bool,
        step: _Part,
    ):
        self.variables = variables
        self.more = more
        self.limit = limit
        self.is_endless = is_endless
        self.step = step
        self._mesh = mesh
        # Maps the layouts of the inputs of a step to the loop over the program
        # that DTensor compiled for these layouts. None: the loop runs from the
        # host.
        self._device_loops: dict[tuple[str, ...], DeviceLoop | None] = {}
        self._can_run_on_devices = device_loops.can_run_on(mesh) and not any(
            map(_is_compiled_by_value, step.captures)
        )

    def tensors(self) -> list[Any]:
        """Returns the tensors of earlier parts that the loop needs."""
        return [
            *self.variables,
            *([] if self.is_endless else [self.more]),
            *([] if self.limit is None else [self.limit]),
            *self.step.captures,
        ]

    def run(self, values: dict[int, Any]) -> list[Any]:
        """Runs the loop and returns the final values of its variables."""
        variables = [values[id(x)] for x in self.variables]
        limit = (
            None if self.limit is None else int(values[id(self.limit)].numpy())
        )
        more = True if self.is_endless else bool(values[id(self.more)].numpy())
        limit = _MAX_STEPS if limit is None else min(limit, _MAX_STEPS)
        captures = [values.get(id(x), x) for x in self.step.captures]
        if self._can_run_on_devices and all(map(tracing.on_mesh, captures)):
            return self._run_on_devices(
                variables, captures, values, limit, more
            )
        return self._run_from_host(variables, values, limit, more)

    def _run_from_host(
        self,
        variables: list[Any],
        values: dict[int, Any],
        limit: int,
        more: bool,
    ) -> list[Any]:
        while more and limit > 0:
            variables, more = self._run_step(variables, values)
            limit -= 1
        return variables

    def _run_step(
        self, variables: list[Any], values: dict[int, Any]
    ) -> tuple[list[Any], bool]:
        *variables, more = self.step(variables, values)
        return variables, self.is_endless or bool(more.numpy())

    def _run_on_devices(
        self,
        variables: list[Any],
        captures: list[Any],
        values: dict[int, Any],
        limit: int,
        more: bool,
    ) -> list[Any]:
        """Runs the loop in one call, after a first step that is compiled."""
        layouts = tuple(
            dtensor.fetch_layout(x).to_string()
            for x in (*variables, *captures)
            if x.dtype != tf.resource
        )
        if layouts not in self._device_loops:
            if not more or limit <= 0:
                return variables
            before = self.step.programs()
            variables, more = self._run_step(variables, values)
            limit -= 1
            compiled = self.step.programs() - before
            program = (
                device_loops.program_of(tf_private.function_def(*compiled))
                if len(compiled) == 1
                else None
            )
            self._device_loops[layouts] = (
                None
                if program is None
                else DeviceLoop(
                    self._mesh, program, variables, captures, self.is_endless
                )
            )
        device_loop = self._device_loops[layouts]
        if device_loop is None:
            return self._run_from_host(variables, values, limit, more)
        try:
            return device_loop.run(variables, captures, limit, more)
        except tf.errors.CancelledError:
            # One device has failed and the others were cancelled. The steps run
            # again, because they raise the error of the first device.
            self._run_from_host(variables, values, limit, more)
            raise


class _Program:
    """The parts and loops of a split function, which run one after another."""

    def __init__(
        self,
        first: list[Any],
        loops: list[_Loop],
        parts: list[tuple[_Part, list[Any]]],
        structure: Any,
        flat: list[Any],
        written: list[tuple[Any, tf.DType]],
    ):
        """Initializes the program.

        Args:
          first: Tensors that the first part returns.
          loops: The loops.
          parts: The part after each loop, and the tensors that it returns.
          structure: Structure of the results of the function.
          flat: Flat results. None is not returned by the last part.
          written: Handles and dtypes of the variables that the parts write.
        """
        self._first = first
        self._loops = loops
        self._parts = parts
        self._structure = structure
        self._is_none = [x is None for x in flat]
        self._written = written
        self._is_compiled = False

    @contextlib.contextmanager
    def restored_after_error(self) -> Iterator[None]:
        """Restores variables if DTensor cannot compile a part.

        The parts before it have already run. The replicated function must read
        the same seeds as they did.
        """
        if self._is_compiled:
            yield
            return
        before = [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            for handle, dtype in self._written
        ]
        try:
            yield
        except tf.errors.OpError:
            for (handle, _), value in zip(self._written, before):
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            raise
        self._is_compiled = True

    def run(self, results: list[Any]) -> Any:
        """Runs all loops and the parts after them.

        Args:
          results: Results of the first part.
        """
        values = {id(x): result for x, result in zip(self._first, results)}
        for loop, (part, tensors) in zip(self._loops, self._parts):
            results = part(loop.run(values), values)
            values |= {id(x): result for x, result in zip(tensors, results)}
        left = iter(results)
        return tf.nest.pack_sequence_as(
            self._structure,
            [None if is_none else next(left) for is_none in self._is_none],
            expand_composites=True,
        )


class SplitTrace:
    """One trace of a function that is split at its loops.

    Attributes:
      context: `MeshContext` of the last weight that the function has read.
    """

    def __init__(self, context: Any = None) -> None:
        self.context = context
        # The graph of each part. The first graph belongs to a `tf.function`.
        self._graphs = [tf.compat.v1.get_default_graph()]
        self._dependencies: list[Any] = []
        self._inputs: list[list[Any]] = []
        self._loops: list[_Loop] = []
        self._contexts = contextlib.ExitStack()

    def can_add_loop(self) -> bool:
        """Returns whether a new loop is at the top level of the function.

        If a tape records, the loop must stay in a graph, because the program
        can require its gradient.
        """
        return (
            tf.compat.v1.get_default_graph() is self._graphs[-1]
            and not tf_private.could_possibly_record()
        )

    def add_loop(
        self,
        mesh: Mesh,
        cond: Callable[..., Any],
        body: Callable[..., Any],
        variables: Any,
        *,
        limit: Any,
        invariants: Any,
    ) -> Any:
        """Splits the function at a loop.

        Args:
          mesh: Mesh of the function.
          cond: Function of the loop variables that returns the condition.
          body: Function that returns the new loop variables.
          variables: Initial values of the loop variables.
          limit: Maximum number of steps, or None.
          invariants: Shapes of the loop variables, or None.

        Returns:
          The final values of the loop variables, in the same structure.

        Raises:
          TraceAgain: If the loop cannot run from the host.
        """
        more = tf.convert_to_tensor(cond(*variables))
        stacked = tf.nest.flatten(variables, expand_composites=True)
        # The parts of a stack are separate loop variables, so that no step
        # copies the stack. Shape invariants refer to the stacks.
        structures = [
            stacks.structure_of(x) if invariants is None else None
            for x in stacked
        ]
        # `tf.identity` creates a tensor in this graph if the variable is an
        # eager tensor or a tensor of an earlier part.
        flat = [tf.identity(x) for x in stacks.split_all(stacked, structures)]
        if limit is not None:
            limit = tf.identity(limit)
        shapes = [x.shape for x in flat]
        if invariants is not None:
            shapes = [
                tf.TensorShape(getattr(invariant, "shape", invariant))
                for invariant in tf_private.flatten_up_to(variables, invariants)
            ]
        if len(shapes) != len(flat) or not all(
            shape.is_fully_defined() for shape in shapes
        ):
            raise tracing.TraceAgain(
                mesh,
                is_strict=False,
                why="the shape of a loop variable is unknown during tracing",
            )
        dtypes = [x.dtype for x in flat]
        passed = [_passed_dtype(x.dtype, x.shape) for x in flat]
        flat = [_bitcast(x, dtype) for x, dtype in zip(flat, passed)]
        is_endless = True

        def step(*inputs: Any) -> Any:
            nonlocal is_endless
            before = stacks.join_all(
                [_bitcast(x, dtype) for x, dtype in zip(inputs, dtypes)],
                structures,
            )
            after = body(
                *tf.nest.pack_sequence_as(
                    variables, before, expand_composites=True
                )
            )
            # As in TensorFlow, the body of a loop with only one loop variable
            # may return the variable without a list.
            if not isinstance(after, list | tuple):
                after = [after]
            after = _converted(after, variables, before)
            has_next = tf.convert_to_tensor(cond(*after))
            is_endless = bool(static_value(has_next))
            return [
                *(
                    _bitcast(
                        dtensor.relayout_like(x, was) if x.shape.rank else x,
                        was.dtype,
                    )
                    for x, was in zip(
                        stacks.split_all(
                            tf.nest.flatten(after, expand_composites=True),
                            structures,
                        ),
                        inputs,
                    )
                ),
                has_next,
            ]

        graph = tf_private.func_graph_from_py_func(
            "loop_step",
            step,
            [tf.TensorSpec(s, x.dtype) for s, x in zip(shapes, flat)],
            {},
            func_graph=_PartGraph("loop_step"),
        )
        is_endless = is_endless and bool(static_value(more))
        loop = _Loop(mesh, flat, more, limit, is_endless, _Part(graph))
        if any(
            tf.is_symbolic_tensor(x) and x.dtype in _NEVER_RETURNED
            for x in loop.tensors()
        ):
            raise tracing.TraceAgain(
                mesh,
                is_strict=False,
                why="a loop needs a resource or a string of the function",
            )
        self._loops.append(loop)
        results = [
            _bitcast(x, dtype)
            for x, dtype in zip(self._begin_part(flat), dtypes)
        ]
        return tf.nest.pack_sequence_as(
            variables,
            stacks.join_all(results, structures),
            expand_composites=True,
        )

    def _begin_part(self, variables: list[Any]) -> list[Any]:
        graph = _PartGraph("after_loop")
        self._graphs.append(graph)
        self._contexts.enter_context(graph.as_default())
        self._dependencies.append(
            self._contexts.enter_context(
                tf_private.AutomaticControlDependencies()
            )
        )
        results = [
            tf.compat.v1.placeholder(x.dtype, x.shape) for x in variables
        ]
        self._inputs.append(results)
        return results

    def finish(self, outputs: Any) -> tuple[Any, _Program | None]:
        """Ends the trace.

        Args:
          outputs: Results of the Python function.

        Returns:
          The tensors that the first part must return, and the program. If the
          function has no loop, the results of the Python function and None.
        """
        if not self._loops:
            return outputs, None
        structure = tf_private.variables_as_tensors(outputs)
        # `None` is a valid result of a `tf.function`.
        flat = tf.nest.flatten(structure, expand_composites=True)
        returned = [
            self._dependencies[-1].mark_as_return(
                tf.identity(tf.convert_to_tensor(x))
            )
            for x in flat
            if x is not None
        ]
        self._contexts.close()
        used = [
            *itertools.chain(*(loop.tensors() for loop in self._loops)),
            *itertools.chain(
                *(graph.external_captures for graph in self._graphs[1:])
            ),
        ]
        results = [
            list({id(x): x for x in used if _is_in(x, graph)}.values())
            for graph in self._graphs
        ]
        results[-1] = returned
        parts = []
        for graph, inputs, manager, tensors in zip(
            self._graphs[1:], self._inputs, self._dependencies, results[1:]
        ):
            graph.inputs = inputs + graph.internal_captures
            graph.outputs = tensors
            graph.structured_outputs = tensors
            graph.control_outputs.extend(manager.ops_which_must_run)
            graph.collective_manager_ids_used = (
                manager.collective_manager_ids_used
            )
            parts.append((_Part(graph), tensors))
        steps = [loop.step.graph for loop in self._loops]
        return results[0], _Program(
            results[0],
            self._loops,
            parts,
            structure,
            flat,
            _written_variables([*self._graphs, *steps]),
        )

    def close(self) -> None:
        """Restores the default graph."""
        self._contexts.close()


_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


def _written_variables(graphs: Sequence[Any]) -> list[tuple[Any, tf.DType]]:
    """Returns the handles and dtypes of variables that graphs write."""
    written: dict[int, tuple[Any, tf.DType]] = {}
    for graph in graphs:
        for handle, inside in graph.captures:
            if tf.is_symbolic_tensor(handle) or handle.dtype != tf.resource:
                continue
            for op in inside.consumers():
                if op.type in _WRITES:
                    written[id(handle)] = handle, op.get_attr("dtype")
    return list(written.values())


def _is_in(x: Any, graph: Any) -> bool:
    return tf.is_symbolic_tensor(x) and x.graph is graph


def _converted(after: Any, variables: Any, before: Sequence[Any]) -> Any:
    """Returns the new loop variables as tensors.

    Raises:
      ValueError: If the body returned another structure, dtype or shape.
    """
    tf.nest.assert_same_structure(
        list(variables),
        list(after),
        check_types=False,
        expand_composites=True,
    )
    flat = [
        tf.convert_to_tensor(x, was.dtype)
        for x, was in zip(
            tf.nest.flatten(list(after), expand_composites=True), before
        )
    ]
    for x, was in zip(flat, before):
        if x.shape.as_list() != was.shape.as_list():
            raise ValueError(
                "The body of a loop on a mesh must return loop variables with "
                f"unchanged shapes. Received: a loop variable of shape "
                f"{was.shape}, for which the body returned shape {x.shape}."
            )
    return tf.nest.pack_sequence_as(variables, flat, expand_composites=True)


_trace: ThreadValue[SplitTrace | None] = ThreadValue(None)


def active_trace() -> SplitTrace | None:
    """Returns the trace of this thread, or None."""
    return _trace.get()


def is_splitting() -> bool:
    """Returns whether this thread traces a function that can be split."""
    return _trace.get() is not None


def current_trace() -> SplitTrace | None:
    """Returns the trace to which this thread can add a loop, or None."""
    trace = _trace.get()
    return None if trace is None or not trace.can_add_loop() else trace


class SplitFunction:
    """A copy of a `tf.function` that runs its loops from the host."""

    def __init__(
        self,
        original: Callable[..., Any],
        function: Any,
        context: Any = None,
    ):
        """Initializes the copy.

        Args:
          original: `Function.__call__`.
          function: A `tf.function` of user code.
          context: `MeshContext` of a weight that the function reads, or None.
        """
        self._context = context
        self._original = original
        self._programs: dict[str, _Program] = {}
        self._python_function = tf_private.converted_function(function)

        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._traced(*args, **kwargs)

        traced.__name__ = getattr(
            function.python_function, "__name__", "function"
        )
        traced.__signature__ = inspect.signature(function.python_function)
        self.function = tf_private.clone_without_autograph(function, traced)

    def _traced(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        trace = SplitTrace(self._context)
        try:
            with _trace.set_to(trace):
                outputs = self._python_function(*args, **kwargs)
            outputs, program = trace.finish(outputs)
        finally:
            trace.close()
        # The key is part of the structure of the results. It identifies the
        # trace that a call has selected.
        key = "" if program is None else str(len(self._programs))
        if program is not None:
            self._programs[key] = program
        return {key: outputs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function and returns its results."""
        (key,) = self.function.get_concrete_function(
            *args, **kwargs
        ).structured_outputs
        if not key:
            return self._original(self.function, *args, **kwargs)[key]
        program = self._programs[key]
        with program.restored_after_error():
            return program.run(
                self._original(self.function, *args, **kwargs)[key]
            )
