"""Corrections of ops that DTensor computes incorrectly.

TensorFlow's Python functions that create these ops are replaced, so that the
corrections apply to all callers. Start with `corrections`, which defines how
an op is corrected; each other module corrects one family of ops.
"""
