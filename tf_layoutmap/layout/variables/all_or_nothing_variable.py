"""A variable on a mesh whose writes wait for the gradients of a step."""

from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.variables import all_or_nothing, dependencies

dtensor = tf.experimental.dtensor

_NEVER_KEPT = "_written_in_inner_functions"


class AllOrNothingVariable(dtensor.DVariable):
    """A variable whose writes wait for the gradients of a step."""

    @property
    def handle(self) -> Any:
        """TensorFlow's; asked for by all that reads or writes."""
        step = all_or_nothing.traced_step()
        if (
            step is not None
            and not tf.executing_eagerly()
            and (self._kept_here(step) is not None)
        ):
            step.release([])
        return super().handle

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        step = all_or_nothing.traced_step()
        if step is not None and not tf.executing_eagerly():
            kept = self._kept_here(step)
            # Tapes watch variables, not what will be written to them.
            if kept is not None and not self.trainable:
                return kept
        return super()._read_variable_op(no_copy)

    def _kept_here(self, step: all_or_nothing.Step) -> Any:
        """Returns what this variable will be, or None without it."""
        if step.graph is tf.compat.v1.get_default_graph():
            return step.kept.get(id(self), (None, None))[1]
        # A function in the step, or a branch. It may be called again without
        # being traced, and then what it reads and writes is not known.
        setattr(self, _NEVER_KEPT, True)
        step.release_ungated(self)
        return None

    def assign(
        self,
        value: Any,
        use_locking: Any = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._written("assign", lambda: value, value, name, read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: Any = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._written(
            "assign_add", lambda: self + delta, delta, name, read_value
        )

    def assign_sub(
        self,
        delta: Any,
        use_locking: Any = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._written(
            "assign_sub", lambda: self - delta, delta, name, read_value
        )

    def write_now(self, how: str, value: Any, **options: Any) -> Any:
        """Writes as a plain DVariable; `how` is the name of its method."""
        return getattr(super(), how)(value, **options)

    def _written(
        self, how: str, new: Any, value: Any, name: str | None, read_value: bool
    ) -> Any:
        options = {"name": name, "read_value": read_value}
        if tf.executing_eagerly():
            return self.write_now(how, value, **options)
        token = getattr(all_or_nothing.state, "applying", None)
        step = all_or_nothing.traced_step()
        if token is None and step is not None:
            self._kept_here(step)
            if step.graph is tf.compat.v1.get_default_graph() and (
                not hasattr(self, _NEVER_KEPT)
            ):
                kept = dtensor.relayout(
                    tf.convert_to_tensor(new(), self.dtype), self.layout
                )
                step.kept[id(self)] = self, kept
                return kept if read_value else kept.op
            token = step.token
        if token is not None and dependencies.may_wait_for(token):
            value = tf.convert_to_tensor(value, self.dtype)
            written = getattr(all_or_nothing.state, "written", set())
            if not dependencies.waits(value, token, written):
                value = dependencies.after(token, value)
            result = self.write_now(how, value, **options)
            if value.graph is token.graph:
                written.add(id(value.graph.capture(self.handle)))
            return result
        return self.write_now(how, value, **options)
