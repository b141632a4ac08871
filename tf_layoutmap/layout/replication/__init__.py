"""Retraces a function with more of it replicated where DTensor cannot shard it.

DTensor raises while it compiles a function, before anything is computed. Then
`retrace` traces the function again, with the op that the error names marked as
replicated (`replicated_ops`): every device gathers its inputs and computes all
of it. If no single op can be named, all of the function is replicated, and its
variables are gathered when they are read (`gathered_reads`). Functions of user
code that read a weight are handled by `user_functions`, tensors of the host
that a function captures by `captured_tensors`. `report` lists what a model
replicates, for warnings and for `explain`.
"""
