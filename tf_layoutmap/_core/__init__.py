"""Foundations: checks, lazy public names, and the doors to private names.

`tf_private`, `keras_private` and `tf_keras_private` are the only modules that
import private names of TensorFlow, Keras and tf_keras; `ops` is the only one
that loads shared libraries. `files` and `paths` replace files atomically:
a writer writes into a folder beside its target, waits until the disk has the
data, and renames the folder.
"""
