"""Ops that DTensor computes incorrectly, corrected where TensorFlow creates them.

`corrections` says how an op is corrected for every caller; the other modules
correct one family of ops each.
"""
