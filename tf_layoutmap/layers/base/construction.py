"""Replaces `Embedding` layers when they are created, inside a scope.

`init_embedding` is a patch of the constructor of `Embedding`, of Keras 3 and of
tf_keras. It is installed while a scope is open.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tf_layoutmap._core.patch_entry import Patch
from tf_layoutmap.layers.base.embedding_report import EmbeddingReport
from tf_layoutmap.layers.base.stock_embeddings import Replacer

_threads = threading.local()


def _stack() -> list[tuple[list[Replacer], EmbeddingReport]]:
    if not hasattr(_threads, "stack"):
        _threads.stack = []
    return _threads.stack


@contextlib.contextmanager
def replacing(
    replacers: list[Replacer], report: EmbeddingReport
) -> Iterator[None]:
    """Context in which this thread replaces layers that it creates.

    Args:
      replacers: One replacer per Keras version.
      report: Report to which an entry per created `Embedding` is added.
    """
    _stack().append((replacers, report))
    try:
        yield
    finally:
        _stack().pop()


def init_embedding(
    original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any
) -> None:
    """Creates an `Embedding`, and replaces it if a scope is open."""
    original(layer, *args, **kwargs)
    if not _stack():
        return
    replacers, report = _stack()[-1]
    for replacer in replacers:
        if replacer.is_candidate(layer):
            reason = replacer.reason_against(layer, [])
            report.entries.append(replacer.entry(layer, reason))
            if reason is None:
                replacer.convert(layer)


def with_signature(
    original: Callable[..., None], ours: Callable[..., None]
) -> Callable[..., None]:
    """Returns `ours` with the signature of `original`.

    Keras 3 reads the names of the arguments by `inspect.getfullargspec`, which
    ignores `functools.wraps`.
    """

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        ours(*args, **kwargs)

    vars(wrapper)["__signature__"] = inspect.signature(original)
    return wrapper


def patch_of_creation(group: str, owner: str, version: str) -> Patch:
    """Returns the entry by which a scope replaces `Embedding` layers."""
    return Patch(
        group,
        f"{owner}:Embedding",
        "__init__",
        init_embedding,
        "The optimizer of a model updates all rows of an Embedding.",
        version,
        "tests/layers/test_embedding_replacement.py",
        make=with_signature,
    )
