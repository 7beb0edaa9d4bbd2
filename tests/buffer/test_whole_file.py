"""Files that are there whole or not at all."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outloop.buffer.whole_file import whole_file


def write(path: Path, text: str) -> None:
    """By way of `whole_file`."""
    with whole_file(path) as writing:
        writing.write_text(text)


def test_a_file_is_there_when_it_is_written(tmp_path: Path) -> None:
    """Beside it lies nothing."""
    path = tmp_path / "file"
    with whole_file(path) as writing:
        writing.write_text("one")
        assert not path.exists()
    write(path, "two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("begun", [b"t", None])
def test_what_was_there_stays_if_the_writer_fails(tmp_path: Path, begun: bytes | None) -> None:
    """Its error is raised."""

    def fail() -> None:
        with whole_file(path) as writing:
            if begun is not None:
                writing.write_bytes(begun)
            raise ZeroDivisionError

    path = tmp_path / "file"
    write(path, "one")
    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_if_the_writer_is_killed(tmp_path: Path) -> None:
    """And the next one is not hindered by what it left."""
    path = tmp_path / "file"
    write(path, "one")
    program = (
        "import sys, pathlib, time\n"
        "from outloop.buffer.whole_file import whole_file\n"
        "with whole_file(pathlib.Path(sys.argv[1])) as writing:\n"
        "    writing.write_text('t')\n"
        "    print(flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        writer.kill()
    assert path.read_text() == "one"
    write(path, "three")
    assert path.read_text() == "three"


def test_writers_at_once_leave_the_file_of_one(tmp_path: Path) -> None:
    """Never a mixture."""
    path = tmp_path / "file"
    texts = [str(number) * 10_000 for number in range(8)]
    until = time.monotonic() + 0.2

    def write_again(text: str) -> None:
        while time.monotonic() < until:
            write(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as at_once:
        list(at_once.map(write_again, texts))
    assert list(tmp_path.iterdir()) == [path]
