"""Checks that the processes that train one model run the same steps.

Start with `checks`. `messages` exchanges messages, `digest` describes models
and batches, and `compare` finds differences between descriptions.
"""
