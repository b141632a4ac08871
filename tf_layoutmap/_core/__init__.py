"""Modules that all other packages use: argument checks, ops, files and more.

`tf_private`, `keras_private` and `tf_keras_private` are the only modules that
import private names of TensorFlow, Keras and tf_keras. `ops` is the only module
that loads shared libraries. `files` replaces files and folders atomically: a
writer creates the new data in a folder next to its target, flushes the data to
disk, and renames the new data to the target. `paths` contains functions for
paths.
"""
