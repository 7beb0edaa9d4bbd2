"""A small real corpus, Python's own documentation strings, and questions about it.

    python tasks.py     # how many documents, and what scripted players score

A document is the name of a function or class of the standard library and the first paragraph of its
documentation. The question is the rarest words of that paragraph's first sentence, of which a third
was left out before; the answer is the name. Both are of the Python that runs this. A hash of the
question decides its split: 8/10 for training (warm start and RL), 1/10 validation, 1/10 test.
"""

import importlib
import inspect
import json
import random
import re
import sqlite3
from collections import Counter
from functools import cache

from agent import SEARCH, SYSTEM_PROMPT

from outloop.envs.tasks.splits import split_of

TITLE = "A research agent learns to search and to copy what it found"

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
SHOWN_CHARS = 40
"""What a result shows of a text; the index has all of it."""
NUM_WORDS = 3
OPENING = "Which one? "

NUM_CONVERSATIONS = 30_000
SEARCH_SHARE = 0.6
"""How often the scripted player searches; otherwise it says any name."""
CAREFUL_SHARE = 0.5
"""How often it then searches every word and takes the first name; otherwise some, or any name."""


@cache
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
        shown = (f"{name}: {text[:SHOWN_CHARS]}" for name, text in rows)
        return "\n".join(shown) or "nothing found"


@cache
def occurrences() -> Counter[str]:
    """How many documents have a word."""
    return Counter(w for text in documents().values() for w in {*words_of(text.lower())})


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def question_of(name: str, text: str) -> str:
    """The rarest words of a document's first sentence, in their order."""
    words = words_of(re.split(r"(?<=[.;:])\s", text)[0])
    rng = random.Random(name)
    left = sorted(rng.sample(range(len(words)), (2 * len(words) + 2) // 3))
    kept = list(dict.fromkeys(words[n] for n in left))
    rare = sorted(kept, key=lambda word: (occurrences()[word.lower()], word))[:NUM_WORDS]
    return OPENING + " ".join(word for word in kept if word in rare)


def questions(split: str) -> list[dict[str, str]]:
    """Rows of a split, shuffled."""
    rows = [{"question": question_of(n, t), "answer": n} for n, t in documents().items()]
    found = [row for row in rows if split_of(row, SHARES) == split]
    random.Random(0).shuffle(found)
    return found


def train_tasks() -> list[dict[str, str]]:
    """What RL practises on."""
    return questions("train")


def eval_tasks() -> list[dict[str, str]]:
    """What a curve is measured on."""
    return questions("test")


def searching_player(question: str, corpus: Corpus, rng: random.Random) -> tuple[str, str]:
    """Searches every word and takes the first name: what one good search is worth."""
    query = question.removeprefix(OPENING)
    return query, corpus.search(query).partition(":")[0]


def scripted_player(question: str, corpus: Corpus, rng: random.Random) -> tuple[str, str]:
    """A careless player: its query, empty if it did not search, and its answer."""
    if rng.random() >= SEARCH_SHARE:
        return "", rng.choice([*documents()])
    query, answer = searching_player(question, corpus, rng)
    if rng.random() < CAREFUL_SHARE:
        return query, answer
    query = rng.choice([query, rng.choice(query.split())])
    names = [line.partition(":")[0] for line in corpus.search(query).split("\n")]
    return query, rng.choice(names)


def played(question: str, query: str, answer: str, corpus: Corpus) -> dict:
    """The conversation of such a player."""
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    call = {"id": "call_0", "type": "function", "function": function}
    found = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": corpus.search(query)},
    ]
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
        *(found if query else []),
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, "tools": [SEARCH]}


def conversations() -> list[dict]:
    """What the warm start learns from: the careless player asked for words of training questions.

    The words are mixed, so that copying them is learned and no question's answer.
    """
    rng, corpus = random.Random(1), Corpus()
    words = [w for row in train_tasks() for w in row["question"].removeprefix(OPENING).split()]
    found = []
    for _ in range(NUM_CONVERSATIONS):
        question = OPENING + " ".join(rng.sample(words, NUM_WORDS))
        query, answer = scripted_player(question, corpus, rng)
        found.append(played(question, query, answer, corpus))
    return found


def reward_of(player) -> float:
    """Mean reward of a scripted player on held-out questions."""
    rng, corpus, rows = random.Random(2), Corpus(), eval_tasks()
    right = sum(player(row["question"], corpus, rng)[1] == row["answer"] for row in rows)
    return right / len(rows)


if __name__ == "__main__":
    for player in (scripted_player, searching_player):
        print(f"{player.__name__} {reward_of(player):.3f}")
    counts = {split: len(questions(split)) for split in SHARES}
    print(f"documents {len(documents())}, questions {counts}, for example: {eval_tasks()[0]}")
