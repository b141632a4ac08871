"""Operations for recommenders, with gradients."""

from typing import TYPE_CHECKING

from tf_layoutmap._core import lazy as _lazy

_HOMES = {
    "dot_interaction": "tf_layoutmap.layers.base.interactions:dot_interaction",
}

if TYPE_CHECKING:
    from tf_layoutmap.layers.base.interactions import dot_interaction
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = ["dot_interaction"]
