"""Reference of packed batches in plain Python; samples are lists."""


def pack(features, mark, weights=None, num_columns=None):
    """Returns two matrices of a packed batch: the ids and the weights.

    Args:
      features: Lists of ids, by feature and by sample.
      mark: Number that is the first value of each row of ids.
      weights: None if no feature has weights; otherwise, for each feature, None
        or lists in the same format as `features`.
      num_columns: Number of columns, or None for the smallest possible number.
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
