"""A small real corpus, Python's own documentation strings, and questions about it.

    python tasks.py     # how many documents, and what a player who searches the question scores

A document is the name of a function or class of the standard library and the first paragraph of its
documentation. The question is that paragraph's first sentence, with a third of its words left out;
the answer is the name. Both are of the Python that runs this. A hash of the question decides its
split: 8/10 for training, 1/10 validation, 1/10 test.
"""

import importlib
import inspect
import random
import re
import sqlite3

from outloop.envs.tasks.splits import split_of

MODULES = (
    *("argparse", "asyncio", "base64", "bisect", "calendar", "collections", "configparser"),
    *("contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "email.utils"),
    *(
        "enum",
        "fractions",
        "functools",
        "glob",
        "gzip",
        "hashlib",
        "heapq",
        "html",
        "inspect",
        "io",
    ),
    *("ipaddress", "itertools", "json", "logging", "math", "mimetypes", "os", "os.path", "pathlib"),
    *("pprint", "queue", "random", "re", "secrets", "shlex", "shutil", "signal", "socket", "ssl"),
    *("statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time"),
    *("traceback", "types", "unicodedata", "urllib.parse", "uuid", "weakref", "zipfile", "zlib"),
)
SHARES = {"train": 8, "validation": 1, "test": 1}
NUM_SHOWN = 3


def documents() -> dict[str, str]:
    """Name -> first paragraph; texts that stand under several names are left out."""
    found: dict[str, str] = {}
    for module in MODULES:
        for name, thing in vars(importlib.import_module(module)).items():
            is_thing = inspect.isroutine(thing) or inspect.isclass(thing)
            if name.startswith("_") or not is_thing or not isinstance(thing.__doc__, str):
                continue
            text = " ".join(thing.__doc__.split("\n\n")[0].split())
            if len(text.split()) >= 5 and not text.startswith(name + "("):
                found[f"{module}.{name}"] = text[:400]
    texts = list(found.values())
    once = {text for text in texts if texts.count(text) == 1}
    return {name: text for name, text in sorted(found.items()) if text in once}


class Corpus:
    """The documents in SQLite's full-text index, in memory."""

    def __init__(self) -> None:
        # A rollout function may play episodes in several threads of its process.
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute(
            "CREATE VIRTUAL TABLE documents USING fts5(name, text, tokenize=porter)"
        )
        self._index.executemany("INSERT INTO documents VALUES (?, ?)", documents().items())

    def search(self, query: str) -> str:
        """The three documents that fit the words of `query` best by BM25; any text is a query."""
        words = re.findall(r"\w+", query)[:32]
        if not words:
            return "nothing found: the query has no words"
        rows = self._index.execute(
            "SELECT name, text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), NUM_SHOWN),
        ).fetchall()
        return "\n".join(f"{name}: {text}" for name, text in rows) or "nothing found"


def questions(split: str) -> list[dict[str, str]]:
    """Rows of a split, shuffled."""
    found = []
    for name, text in documents().items():
        words = re.split(r"(?<=[.;:])\s", text)[0].split()
        rng = random.Random(name)
        kept = sorted(rng.sample(range(len(words)), (2 * len(words) + 2) // 3))
        row = {"question": "Which one? " + " ".join(words[n] for n in kept), "answer": name}
        if split_of(row, SHARES) == split:
            found.append(row)
    random.Random(0).shuffle(found)
    return found


def train_tasks() -> list[dict[str, str]]:
    """What RL practises on."""
    return questions("train")


def eval_tasks() -> list[dict[str, str]]:
    """What a curve is measured on."""
    return questions("test")


def searching_player(question: str, corpus: Corpus) -> str:
    """Searches the question and takes the first name: what one good search is worth."""
    return corpus.search(question).partition(":")[0]


if __name__ == "__main__":
    corpus, rows = Corpus(), eval_tasks()
    right = sum(searching_player(row["question"], corpus) == row["answer"] for row in rows)
    print(f"documents {len(documents())}, training questions {len(train_tasks())}")
    print(f"searching_player {right / len(rows):.3f} of {len(rows)}, for example: {rows[0]}")
