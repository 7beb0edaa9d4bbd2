"""Hang reports: who hangs, in which phase, and where."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from outloop.engine.train.ranks.hang_watchdog import Progress


class Hang:
    """A thread that waits for what never comes, and the sentence about it."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.told = threading.Event()
        self.sentences: list[str] = []
        self._thread = threading.Thread(target=self.wait_for_what_never_comes, name="stuck")
        self._thread.start()

    def wait_for_what_never_comes(self) -> None:
        """Named in the stacks."""
        self.released.wait(60)

    def on_hang(self, sentence: str) -> None:
        """What Progress calls."""
        self.sentences.append(sentence)
        self.told.set()

    def end(self) -> None:
        """Let the thread go."""
        self.released.set()
        self._thread.join(10)


def test_a_hang_names_rank_phase_peers_and_stacks(tmp_path: Path) -> None:
    """Rank 0 waits in its update for rank 1, which is still loading: both are in the sentence."""
    hang = Hang()
    other = Progress(tmp_path, rank=1, timeout_s=60)
    other.mark("checkpoint")
    progress = Progress(tmp_path, rank=0, timeout_s=0.3, on_hang=hang.on_hang)
    progress.mark("update")
    try:
        assert hang.told.wait(30)
    finally:
        hang.end()
        progress.close()
        other.close()
    (sentence,) = hang.sentences
    assert "trainer rank 0 made no progress" in sentence
    assert "phase='update'" in sentence
    assert "rank 1: phase='checkpoint'" in sentence
    report = (tmp_path / "hang_rank_0.txt").read_text()
    assert report.startswith(sentence)
    assert "thread stuck" in report
    assert "wait_for_what_never_comes" in report


def test_marks_put_the_report_off_and_it_comes_once(tmp_path: Path) -> None:
    """No report while there is progress, one after it ends, none twice for the same hang."""
    hang = Hang()
    hang.end()
    progress = Progress(tmp_path, rank=0, timeout_s=2.0, on_hang=hang.on_hang)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        progress.mark("update")
        assert not hang.released.wait(0) or not hang.told.wait(0.05)
    assert hang.told.wait(30)
    hang.told.clear()
    assert not hang.told.wait(2.5)
    progress.close()
    assert len(hang.sentences) == 1
    assert json.loads((tmp_path / "rank_0.json").read_text())["phase"] == "update"


def test_a_process_that_hangs_ends_with_the_sentence(tmp_path: Path) -> None:
    """The trainer's process ends by itself, though its main thread never returns."""
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from outloop.cli.trainer import end_process\n"
        "from outloop.engine.train.ranks.hang_watchdog import Progress\n"
        "progress = Progress(Path(sys.argv[1]), rank=0, timeout_s=0.2, on_hang=end_process)\n"
        "progress.mark('publish')\n"
        "threading.Event().wait()\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert answer.returncode == 3
    last = answer.stderr.strip().splitlines()[-1]
    assert last.startswith("outloop: trainer rank 0 made no progress")
    assert "phase='publish'" in last
