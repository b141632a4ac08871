"""Replication of functions and ops that DTensor cannot shard.

DTensor raises an error when it compiles a function, before anything is
computed. In this case, `retrace` traces the function again and replicates the
op that the error names (`replicated_ops`). Every device then gathers the inputs
of the op and computes the full result. If no op can be identified, the full
function is replicated, and its variables are gathered when they are read.
`traces` holds what each function replicates, and the current trace. `retrace` also handles each `tf.function` of
user code that reads a weight. `captured_tensors` copies host tensors that a
function captures to the mesh. `report` lists the replicated ops of a model for
warnings and for `explain`.
"""
