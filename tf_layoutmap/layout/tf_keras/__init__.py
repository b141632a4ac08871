"""Support for tf_keras models on a mesh.

This package is imported only if tf_keras is imported.

Start with these modules:

* `patches`: the scope and the replaced methods.
* `mapping`: variables on a mesh.
* `step`: the step that `fit`, `evaluate` and `predict` run.
"""
