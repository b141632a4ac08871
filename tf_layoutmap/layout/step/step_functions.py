"""What takes the place of `make_train_function` and its two siblings."""

from collections.abc import Callable
from typing import Any


def maker(
    kind: str,
    context_of: Callable[[Any], Any],
    make: Callable[[Any, Any], Any],
    check_plain: Callable[[Any, str, bool], None] | None = None,
) -> Callable[..., Any]:
    """Returns the replacement of `make_<kind>_function`.

    Args:
      kind: `"train"`, `"test"` or `"predict"`.
      context_of: Returns the `MeshContext` of a model, or None.
      make: Makes the function for a model and its context.
      check_plain: Called as `(model, kind, is_new)` for a model without a
        context, before Keras makes its function.

    Returns:
      A function `(original, model, force=False)` that sets
      `model.<kind>_function`, if there is none yet or `force`, and returns it.
    """
    name = f"{kind}_function"

    def make_function(
        original: Callable[..., Any], model: Any, force: bool = False
    ) -> Any:
        context = context_of(model)
        if context is None:
            if check_plain is not None:
                check_plain(model, kind, force or getattr(model, name) is None)
            return original(model, force)
        if force or getattr(model, name) is None:
            setattr(model, name, make(model, context))
        return getattr(model, name)

    make_function.__name__ = f"make_{name}"
    return make_function
