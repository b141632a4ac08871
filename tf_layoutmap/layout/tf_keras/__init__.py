"""Support for tf_keras models on a mesh. Imported only if tf_keras is imported.

Start with `patches` (the scope and the replaced methods), `mapping` (variables)
and `step` (the step that `fit`, `evaluate` and `predict` run).
"""
