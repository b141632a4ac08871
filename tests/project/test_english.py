"""Checks that the texts of the project contain no discouraged phrase.

The list of phrases is short on purpose. It contains phrases that were common in
earlier texts of this project, and a standard replacement for each phrase.
"""

import re

from tests.project import texts

# Maps each phrase to its replacement.
PHRASES = {
    r"unless told": "by default",
    r"to the bit": "bitwise identical",
    r"\banew\b": "again",
    r"\bthose of (a|an|the|one|its|all)\b": "repeat the noun",
    r"\bthat of (a|an|the|one|its)\b": "repeat the noun",
    r"\bwhoever\b": "name the actor",
    r"\bnobody\b": "name the actor, or use the passive",
    r"\bsomebody\b": "user code, another module",
    r"\blands (in|on|it|what|the)\b": "is applied, is written",
    r"\bcarr(y|ies) .{1,30} out\b": "run",
    r"\bis told (so|of|the|what|by)\b": "receives, raises",
    r"\bare told\b": "receive, raise",
    r"\bas good as\b": "equal to",
    r"\bnothing but\b": "only",
    r"\bof one's own\b": "separate, private",
    r"\bwhat becomes of\b": "how ... is handled",
    r"\bcomputed whole\b": "replicated",
    r"\bmade whole\b": "gathered",
    r"DOC-MERGE": "fold it into the docstring of the module",
}
PATTERNS = {re.compile(p, re.IGNORECASE): use for p, use in PHRASES.items()}
# This file contains the phrases themselves.
EXEMPT = {"tests/project/test_english.py"}


def offenders(found):
    return [
        f"{text.path}:{text.line}: {match[0]!r}; write: {use}"
        for text in found
        if text.path not in EXEMPT
        for pattern, use in PATTERNS.items()
        for match in pattern.finditer(re.sub(r"\s+", " ", text.text))
    ]


def test_listed_phrases_are_found():
    text = texts.Text("a.py", 3, "comment", "Equal to\nthe bit, unless  told.")
    assert offenders([text]) == [
        "a.py:3: 'unless told'; write: by default",
        "a.py:3: 'to the bit'; write: bitwise identical",
    ]


def test_texts_of_all_kinds_are_read():
    kinds = {
        (text.kind, text.path.rpartition(".")[2]) for text in texts.all_texts()
    }
    assert {
        ("comment", "py"),
        ("docstring", "py"),
        ("string", "py"),
        ("comment", "cc"),
        ("string", "cc"),
        ("page", "md"),
    } <= kinds


def test_no_text_contains_a_listed_phrase():
    found = offenders(texts.all_texts())
    assert not found, "\n".join(["", *found])
