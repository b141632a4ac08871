"""Lists the variables that an embedding holds."""

from tf_layoutmap.embedding import tables


def variables_of(embedding):
    """Returns each variable of a `TPUEmbedding` once, shards separately."""
    variables = {id(one): one for one in embedding.variables}
    for by_name in embedding._variables.values():
        for value in by_name.values():
            for part in tables.shards_of(value):
                variables[id(part)] = part
    return list(variables.values())
