"""What layers of both Keras versions have, as the base of our mixins.

Only type checkers see it: a mixin stands before the `Layer` of one version,
which brings all of this.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class LayerBase:
        """Attributes and methods of a Keras layer that mixins use."""

        name: str
        built: bool
        trainable: bool
        compute_dtype: str
        variable_dtype: str

        def __init__(self, **kwargs: Any): ...

        def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any: ...

        def add_loss(self, loss: Any) -> None: ...

        def get_config(self) -> dict[str, Any]: ...
else:
    LayerBase = object
