"""Foundations: argument checks, lazy public names, private names, ops, files.

`tf_private`, `keras_private` and `tf_keras_private` are the only modules that
import private names of TensorFlow, Keras and tf_keras. `ops` is the only module
that loads shared libraries. `files` and `paths` replace files atomically: a
writer writes to a folder next to its target, flushes the data to disk, and
renames the folder.
"""
