"""`StoredKeys`, the type of ids that are already keys of a vocabulary."""

from typing import Union

import tensorflow as tf

# Kind of keys that were read from a vocabulary (see `key_tensors.KINDS`). Such
# keys have the kind of the vocabulary, so the kind is not checked.
ANY = 0


class StoredKeys(tf.experimental.ExtensionType):
    """Keys as a vocabulary stores them: integers, or hashes of strings.

    Layers and embeddings with open vocabularies accept this type instead of
    integers or strings, and do not hash the values again. `tlm.ops.sample_keys`
    creates the objects.

    Attributes:
      values: The keys, int64.
      kind: Kind of the ids that are among the keys, one of
        `key_tensors.KINDS`, or 0 if all keys were read from a vocabulary.
      strings: `[num_strings]` strings whose hashes are among the keys, for
        tables with `keep_strings=True`, which store them if the keys have a
        row. None: no strings.
    """

    # ExtensionType does not support the operator `|` in annotations.
    values: Union[tf.Tensor, tf.RaggedTensor]  # noqa: UP007
    kind: int = ANY
    strings: Union[tf.Tensor, None] = None  # noqa: UP007
