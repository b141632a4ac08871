"""Reference of the keys that a shared vocabulary counts in a step."""

import collections


def merge(tables):
    """Returns the keys that are counted for lists of keys of several tables.

    A key occurs as often as in the table in which it occurs most often. The
    keys of the first table come first. A further occurrence in another table
    follows in the order of the tables.
    """
    merged = list(tables[0])
    counted = collections.Counter(merged)
    for table in tables[1:]:
        here = collections.Counter()
        for key in table:
            here[key] += 1
            if here[key] > counted[key]:
                counted[key] += 1
                merged.append(key)
    return merged
