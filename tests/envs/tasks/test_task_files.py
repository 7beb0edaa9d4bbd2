"""Where tasks come from, what identifies them, and how they are held apart."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outloop.buffer.codec.records_codec import decode_task, encode_task
from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Task
from outloop.buffer.settings import Settings
from outloop.buffer.settings.env import EvalSuiteSettings
from outloop.envs.tasks.splits import content_hash, split_of
from outloop.envs.tasks.task_files import load_run_tasks, load_tasks

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def load(source: str) -> list[tuple[str, dict[str, object]]]:
    """Ids and payloads of a source in the working directory."""
    loaded = load_tasks(source, setting="env.tasks", import_dir=None)
    return [(task.task_id, task.payload) for task in loaded]


def test_rows_are_payloads_or_tasks_with_an_id(folder: Path) -> None:
    """Without an id the id is the content's hash; with one it is kept."""
    (folder / "t.jsonl").write_text(
        '{"question": "1+1"}\n\n{"task_id": "x", "payload": {"question": "2+2"}}\n'
        '{"task_id": "y", "question": "3+3"}\n'
    )
    loaded = load("t.jsonl")
    assert loaded[0] == (content_hash({"question": "1+1"})[:32], {"question": "1+1"})
    assert loaded[1:] == [("x", {"question": "2+2"}), ("y", {"question": "3+3"})]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": ', ["line 2", "not JSON", "one JSON object per line"]),
        ("[1, 2]", ["line 2", "is a list", "object"]),
        ('"text"', ["line 2", "is a str"]),
        ("{}", ["line 2", "payload={}"]),
        ('{"payload": 3}', ["line 2", "payload=3"]),
        ('{"task_id": 7, "q": "a"}', ["line 2", "task_id=7", "string"]),
        ('{"q": NaN}', ["line 2", "JSON"]),
        ('{"q": [1, -Infinity]}', ["line 2", "-Infinity"]),
        ('{"q": [1, 1e999]}', ["line 2", "q[1] is inf"]),
        ('{"question": "\\ud83d broken"}', ["line 2", "question holds half"]),
        ('{"a": {"b": ["\\udc00"]}}', ["line 2", "a.b[0] holds half"]),
        ('{"\\ud800": 1}', ["line 2", "has the name"]),
        ('{"a": 15511210043330985984000000}', ["line 2", "a is a whole number", "string"]),
        ('{"a": -9223372036854775809}', ["line 2", "a is a whole number", "string"]),
        ('{"a": ' + "9" * 5000 + "}", ["line 2", "digits"]),
        ('{"a": ' + "[" * 3000 + "]" * 3000 + "}", ["line 2", "nested deeper than 64"]),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", ["line 2", "nested deeper than 64"]),
        ('{"q": "a", "q": "b"}', ["line 2", "'q' is given twice"]),
        ('{"task_id": "a\\u0000b", "q": "a"}', ["line 2", "task_id=", "printable"]),
        ('{"task_id": "\\ud800", "q": "a"}', ["line 2", "task_id=", "printable"]),
        ('{"task_id": "first", "q": "other"}', ["line 2", "task_id='first'", "another task"]),
    ],
)
def test_a_malformed_line_is_named(line: str, words: list[str], folder: Path) -> None:
    """The sentence holds the file, the line number, what is there and what is allowed."""
    (folder / "t.jsonl").write_text('{"task_id": "first", "q": "a"}\n' + line + "\n")
    with pytest.raises(SettingsError) as caught:
        load("t.jsonl")
    assert [word for word in words if word not in str(caught.value)] == []
    assert "t.jsonl" in str(caught.value)


@pytest.mark.parametrize("made", ["float('nan')", "{1: 2}", "b'x'", "object()", "{'x': {1, 2}}"])
def test_what_a_function_makes_is_checked_like_a_file(made: str, folder: Path) -> None:
    """With the item's number and the field."""
    source = f"def tasks():\n    return [{{'q': 'a'}}, {{'deep': [{made}]}}]\n"
    (folder / "made_tasks.py").write_text(source)
    with pytest.raises(SettingsError, match=r"item 1: deep\[0\]"):
        load("made_tasks:tasks")


def test_whatever_passes_the_check_can_be_stored(folder: Path) -> None:
    """As JSON to the router, and as MessagePack."""
    rows = [
        {"a": 2**64 - 1, "b": -(2**63), "c": 1e308, "d": "\U0001f600", "e": None, "f": [[{}]]},
        {"a": json.loads("[" * 60 + "]" * 60)},
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=number > 0) for number, row in enumerate(rows))
    (folder / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    loaded = load("t.jsonl")
    assert [payload for _, payload in loaded] == rows
    for task_id, payload in loaded:
        sent = msgspec.json.decode(json.dumps(payload).encode(), type=dict[str, object])
        stored = encode_task(Task(task_id=task_id, payload=sent))
        assert decode_task(stored).payload == payload


def test_bytes_that_are_no_text_are_a_sentence(folder: Path) -> None:
    """A file in another encoding is refused by name."""
    for data in (b'{"q": "\xff\xfe"}\n', '{"q": "a"}\n'.encode("utf-16")):
        (folder / "t.jsonl").write_bytes(data)
        with pytest.raises(SettingsError, match="not UTF-8"):
            load("t.jsonl")


def test_missing_and_empty_sources_are_sentences(folder: Path) -> None:
    """No file, no row, no iterable and a raising function each say what to give instead."""
    (folder / "empty.jsonl").write_text("\n")
    (folder / "sources.py").write_text(
        "none = []\ntext = 'abc'\n\n\ndef broken():\n    yield {'q': 1}\n    raise KeyError('x')\n"
    )
    for source, words in (
        ("missing.jsonl", "no such file"),
        ("empty.jsonl", "gives no task"),
        ("sources:none", "gives no task"),
        ("sources:text", "iterable of dicts"),
        ("sources:broken", "raised KeyError"),
    ):
        with pytest.raises(SettingsError, match=words):
            load(source)


def test_functions_lists_and_generators_give_tasks(folder: Path) -> None:
    """Any iterable of dicts or Task objects will do, called or not; repeats are one task."""
    (folder / "givers.py").write_text(
        "from outloop.buffer.records import Task\n"
        "rows = [{'q': 'a'}, {'q': 'b'}, {'q': 'a'}]\n\n\n"
        "def many():\n    yield Task(task_id='t', payload={'q': 'a'})\n"
    )
    assert [payload for _, payload in load("givers:rows")] == [{"q": "a"}, {"q": "b"}]
    assert load("givers:many") == [("t", {"q": "a"})]


def test_an_overlap_of_training_and_evaluation_is_an_error(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Equal content is found under other ids, spacing and key order (rule 13)."""
    (folder / "train.jsonl").write_text('{"task_id": "a", "q": "1 + 1", "level": 2}\n')
    (folder / "eval.jsonl").write_text('{"task_id": "b", "level": 2.0, "q": " 1  + 1 "}\n')
    with pytest.raises(SettingsError, match=r"1 of 1 tasks of env\.eval_tasks"):
        load_run_tasks(make_settings(tasks="train.jsonl", eval_tasks="eval.jsonl"))


def test_one_id_in_both_lists_is_an_error(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Two contents under one id would be confused in the buffer."""
    (folder / "train.jsonl").write_text('{"task_id": "a", "q": "x"}\n')
    (folder / "eval.jsonl").write_text('{"task_id": "a", "q": "y"}\n')
    with pytest.raises(SettingsError, match="task_id='a'"):
        load_run_tasks(make_settings(tasks="train.jsonl", eval_tasks="eval.jsonl"))


@pytest.mark.medium
@given(JSON)
def test_a_content_has_one_hash_and_one_split(content: object) -> None:
    """Key order and spacing do not move a task; every content falls into a known split."""

    def shuffled(value: object) -> object:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in reversed(value)}
        if isinstance(value, list):
            return [shuffled(one) for one in value]
        return f"  {value} " if isinstance(value, str) else value

    shares = {"train": 8.0, "validation": 1.0, "test": 1.0}
    assert content_hash(shuffled(content)) == content_hash(content)
    assert split_of(shuffled(content), shares) == split_of(content, shares)
    assert split_of(content, shares) in shares


def test_splits_have_the_asked_sizes() -> None:
    """Over many tasks the shares come out within a few standard errors."""
    counts = {"train": 0, "test": 0}
    for number in range(4000):
        counts[split_of({"q": number}, {"train": 3, "test": 1})] += 1
    assert abs(counts["test"] - 1000) < 120
    with pytest.raises(SettingsError, match="non-negative"):
        split_of("x", {"train": -1.0})


def mixture(folder: Path) -> dict[str, dict[str, object]]:
    """Two sources of a mixture, by name."""
    (folder / "a.jsonl").write_text("".join(f'{{"q": "a{n}"}}\n' for n in range(40)))
    (folder / "b.jsonl").write_text("".join(f'{{"q": "b{n}"}}\n' for n in range(20)))
    return {"easy": {"source": "a.jsonl", "weight": 3}, "hard": {"source": "b.jsonl"}}


def test_a_mixture_is_its_sources_one_after_the_other(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """With names, sizes and the weights that it begins with."""
    found = load_run_tasks(make_settings(tasks=mixture(folder)))
    assert [(s.name, s.num_tasks, s.weight) for s in found.sources] == [
        ("easy", 40, 3.0),
        ("hard", 20, 1.0),
    ]
    assert [str(task.payload["q"])[0] for task in found.tasks] == ["a"] * 40 + ["b"] * 20


def test_splits_are_made_before_mixing(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Each content is in one split, whichever is evaluated; the test split is trained by nobody."""
    split = {"train": 2, "validation": 1, "test": 1}
    runs = {
        name: load_run_tasks(make_settings(tasks=mixture(folder), split=split, eval_split=name))
        for name in ("validation", "test")
    }
    trained = {task.task_id for task in runs["test"].tasks}
    assert trained == {task.task_id for task in runs["validation"].tasks}
    held_out = [{task.task_id for task in runs[name].eval_tasks} for name in runs]
    assert not held_out[0] & held_out[1]
    assert len(trained) + len(held_out[0]) + len(held_out[1]) == 60
    for task in runs["test"].eval_tasks:
        assert split_of(task.payload, split) == "test"
    assert sum(source.num_tasks for source in runs["test"].sources) == len(trained)


def test_a_run_that_chooses_by_validation_gets_the_test_split_behind_it(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Both held-out splits are registered, the test split last and counted."""
    split = {"train": 2, "validation": 1, "test": 1}
    settings = make_settings(tasks=mixture(folder), split=split)
    plan = settings.eval.model_copy(update={"every": 5, "chooses_checkpoint": True})
    found = load_run_tasks(settings.model_copy(update={"eval": plan}))
    splits = [split_of(task.payload, split) for task in found.eval_tasks]
    assert list(found.suites) == ["validation", "test"]
    assert min(found.suites.values()) > 0
    assert splits == [name for name, number in found.suites.items() for _ in range(number)]


def test_held_out_tasks_name_their_source_and_come_from_each_in_turn(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """The first of them are of every source, so that a small evaluation is of all."""
    settings = make_settings(tasks=mixture(folder), split={"train": 1, "validation": 1})
    sources = [task.source for task in load_run_tasks(settings).eval_tasks]
    assert set(sources[:2]) == set(mixture(folder))
    assert min(sources.count(name) for name in mixture(folder)) > 1


def test_suites_share_equal_lists_and_hold_out_their_tasks(
    folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Two suites of one file register it once; a suite's task must not be trained."""
    (folder / "hard.jsonl").write_text('{"q": "h1"}\n{"q": "h2"}\n')
    hard = {"tasks": "hard.jsonl"}
    settings = make_settings(tasks=mixture(folder), split={"train": 3, "validation": 1})

    def with_suites(**suites: dict[str, object]) -> Settings:
        made = {name: EvalSuiteSettings(**values) for name, values in suites.items()}
        return settings.model_copy(
            update={"eval": settings.eval.model_copy(update={"suites": made})}
        )

    found = load_run_tasks(with_suites(quick=hard, often=hard | {"every": 2}, own={"every": 5}))
    assert list(found.suites) == ["validation", "quick"]
    assert found.suites["quick"] == 2
    assert [task.payload for task in found.eval_tasks[-2:]] == [{"q": "h1"}, {"q": "h2"}]
    trained = str(mixture(folder)["easy"]["source"])
    with pytest.raises(SettingsError, match="held out"):
        load_run_tasks(with_suites(quick={"tasks": trained}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": {"train": 1, "validation": 1}, "eval_tasks": "a.jsonl"}, "are both given"),
        ({"split": {"validation": 1}}, "leaves no training task of env.tasks 'easy'"),
        (
            {"tasks": {"x": {"source": "a.jsonl"}, "y": {"source": "a.jsonl"}}},
            "is in 'x' and in 'y'",
        ),
        ({"tasks": {"x": {"source": "a.jsonl", "weight": 0}}}, "at least one above 0"),
        ({"tasks": {"x": {"source": "c.jsonl"}}}, "env.tasks.x.source='c.jsonl'.*no such file"),
        ({"tasks": "late.jsonl"}, "late.jsonl, line 2: deadline_s=-1"),
    ],
)
def test_wrong_mixtures_and_splits_are_sentences(
    change: dict[str, object], words: str, folder: Path, make_settings: Callable[..., Settings]
) -> None:
    """Each names the source and what to do."""
    (folder / "late.jsonl").write_text(
        '{"q": "a", "deadline_s": 5}\n{"q": "b", "deadline_s": -1}\n'
    )
    with pytest.raises(SettingsError, match=words):
        load_run_tasks(make_settings(**({"tasks": mixture(folder)} | change)))
