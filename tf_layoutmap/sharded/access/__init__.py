"""Reading and writing a table in shards: indices, slices, operators."""
