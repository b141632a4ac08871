"""Reference of packed batches in plain Python, with a list per sample."""


def pack(features, mark, weights=None, num_columns=None):
    """Returns the rows of ids and the rows of weights of a packed batch.

    Args:
      features: Lists of ids, by feature and by sample.
      mark: First value of each row.
      weights: None, or for each feature None or lists in the form of `ids`.
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
