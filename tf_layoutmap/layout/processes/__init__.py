"""Checks that the processes that train one model run the same steps.

Start with `checks`, which runs the checks before each step. `checks` uses
`messages` to exchange messages, `digest` to describe models and batches, and
`compare` to find differences between the descriptions.
"""
