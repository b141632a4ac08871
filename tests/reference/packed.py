"""Reference of packed batches in plain Python; samples are lists."""


def pack(features, mark, weights=None, num_columns=None, are_strings=None):
    """Returns two matrices of a packed batch: the ids and the weights.

    Args:
      features: Lists of ids, by feature and by sample.
      mark: Number that is the first value of each row of ids.
      weights: None if no feature has weights; otherwise, for each feature, None
        or lists in the same format as `features`.
      num_columns: Number of columns, or None for the smallest possible number.
      are_strings: For each feature, whether its ids are hashes of strings.
    """
    marked = are_strings or [False] * len(features)
    weights = weights or [None] * len(features)
    ids, factors = [], []
    for sample in range(len(features[0])):
        # The bitwise complement of a number `n` is `-1 - n`.
        sizes = [
            -1 - len(one[sample]) if is_string else len(one[sample])
            for one, is_string in zip(features, marked, strict=True)
        ]
        row = [mark, *sizes]
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
