"""Prints random sentences from the documentation, docstrings and comments.

    python tools/sample_sentences.py --count 60 --seed 27

Give the sentences to a reader without knowledge of the project. The reader
marks each sentence that needs a second reading. At most 5 of 100 sentences may
be marked.
"""

import argparse
import pathlib
import random
import sys

# Python adds only the folder of this file to its search path.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from tests.project import texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--prefix", default="", help="only files whose path begins with it"
    )
    arguments = parser.parse_args()
    sentences = [
        (text, sentence)
        for text in texts.all_texts()
        if text.kind != "string" and text.path.startswith(arguments.prefix)
        for sentence in texts.sentences(text)
    ]
    drawn = random.Random(arguments.seed).sample(sentences, arguments.count)
    for number, (text, sentence) in enumerate(drawn, 1):
        print(f"{number}. {text.path}:{text.line} ({text.kind}): {sentence}")


if __name__ == "__main__":
    main()
