"""Packed batches in plain Python, a list for each sample."""


def pack(features, mark, weights=None, num_columns=None):
    """Rows of ids and rows of weights of a packed batch.

    Args:
      features: By feature, then by sample, lists of ids.
      mark: Begins each row.
      weights: By feature None or lists as those of the ids; or None.
      num_columns: None for as many as are needed.
    """
    weights = weights or [None] * len(features)
    ids, factors = [], []
    for sample in range(len(features[0])):
        row = [mark, *(len(one[sample]) for one in features)]
        ones = [1.0] * len(row)
        for feature, given in zip(features, weights, strict=True):
            row += feature[sample]
            ones += given[sample] if given else [1.0] * len(feature[sample])
        ids.append(row)
        factors.append(ones)
    width = num_columns or max(map(len, ids), default=1 + len(features))
    return (
        [row + [0] * (width - len(row)) for row in ids],
        [row + [1.0] * (width - len(row)) for row in factors],
    )
