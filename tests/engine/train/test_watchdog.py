"""The watchdog of a rank: who hangs, where, whom it waits for, and how long leases are renewed."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from outloop.buffer.errors import (
    RANK_KILLED_EXIT_CODE,
    BufferUnavailable,
    DeadlineExceeded,
    FenceExpired,
    PartFailed,
    RankKilled,
    SettingsError,
)
from outloop.engine.machine.memory_shortage import is_memory_shortage
from outloop.engine.train.ranks.watchdog import Watchdog

WAIT_S = 60.0
MakeWatchdog = Callable[..., Watchdog]


@pytest.fixture
def make_watchdog(tmp_path: Path) -> Iterator[MakeWatchdog]:
    """`make_watchdog(rank=1, num_ranks=2, store=store)`; closed at the end."""
    made: list[Watchdog] = []

    def make(**settings: object) -> Watchdog:
        defaults: dict[str, object] = {"rank": 0, "num_ranks": 1, "hang_timeout_s": WAIT_S}
        made.append(Watchdog(tmp_path, **(defaults | settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for watchdog in made:
        watchdog.close()


class Hang:
    """A thread that waits for what never comes, and the sentences about it."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.reported = threading.Event()
        self.sentences: list[str] = []
        self._thread = threading.Thread(target=self.wait_for_what_never_comes, name="stuck")
        self._thread.start()

    def wait_for_what_never_comes(self) -> None:
        """Named in the stacks."""
        self.released.wait(WAIT_S)

    def on_hang(self, error: PartFailed) -> None:
        """What the watchdog calls."""
        self.sentences.append(str(error))
        self.reported.set()

    def end(self) -> None:
        """Let the thread go."""
        self.released.set()
        self._thread.join(10)


class PatientStore:
    """The ranks' store, which tells the beats of a living rank after its next one: how many it
    gives in a time is a busy machine's."""

    def __init__(self, *, living_rank: int) -> None:
        self._store = dist.HashStore()
        self._key = f"outloop/alive/{living_rank}"
        self._has_beaten = threading.Event()

    def clone(self) -> "PatientStore":
        """Itself: it is used by many threads."""
        return self

    def set(self, key: str, value: str) -> None:
        """As the store's."""
        self._store.set(key, value)
        if key == self._key:
            self._has_beaten.set()

    def check(self, keys: list[str]) -> bool:
        """As the store's, after the next beat."""
        if keys == [self._key]:
            self._has_beaten.clear()
            self._has_beaten.wait(WAIT_S)
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        """As the store's."""
        return self._store.get(key)


@pytest.mark.medium
def test_a_hang_names_rank_phase_peers_and_stacks(
    make_watchdog: MakeWatchdog, tmp_path: Path
) -> None:
    """Rank 0 waits in its update for rank 1, which still saves, and for rank 2, which is dead."""
    hang, store = Hang(), PatientStore(living_rank=1)
    others = {"num_ranks": 3, "store": store, "beat_s": 0.05}
    saving = make_watchdog(rank=1, **others)
    dead = make_watchdog(rank=2, **others)
    with dead.enter("load"):
        dead.close()
    with saving.enter("save step 3"):
        watchdog = make_watchdog(hang_timeout_s=0.3, on_hang=hang.on_hang, **others)
        with watchdog.enter("update"):
            try:
                assert hang.reported.wait(WAIT_S)
            finally:
                hang.end()
    sentence = hang.sentences[0]
    assert "trainer rank 0 made no progress" in sentence
    assert "phase='update'" in sentence
    assert "rank 1: phase='save step 3'; rank 2: phase='load', no sign of life" in sentence
    report = (tmp_path / "hang_rank_0.txt").read_text()
    assert report.startswith("trainer rank 0 made no progress")
    assert "thread stuck" in report
    assert "wait_for_what_never_comes" in report


@pytest.mark.medium
def test_a_hang_is_reported_once(make_watchdog: MakeWatchdog) -> None:
    """Not twice for the same hang, and again after further progress."""
    hang = Hang()
    hang.end()
    watchdog = make_watchdog(hang_timeout_s=0.2, on_hang=hang.on_hang)
    assert hang.reported.wait(WAIT_S)
    hang.reported.clear()
    assert not hang.reported.wait(1.0)
    watchdog.progress("update")
    assert hang.reported.wait(WAIT_S)
    assert len(hang.sentences) == 2
    assert "phase='update'" in hang.sentences[1]


@pytest.mark.medium
def test_waiting_for_rank_0_is_no_hang(make_watchdog: MakeWatchdog) -> None:
    """A follower waits as long as rank 0 does; the collective has its own deadline."""
    hang = Hang()
    hang.end()
    watchdog = make_watchdog(hang_timeout_s=0.3, on_hang=hang.on_hang)
    with watchdog.enter("wait for rank 0", is_watched=False):
        assert not hang.reported.wait(1.0)
    with watchdog.enter("update"):
        assert hang.reported.wait(WAIT_S)


def end_of(program: str, folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a program that is to end by itself."""
    answer = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return answer.returncode, answer.stderr


@pytest.mark.medium
def test_a_process_that_hangs_ends_with_the_sentence(tmp_path: Path) -> None:
    """The trainer's process ends by itself, though its main thread never returns."""
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from outloop.cli.trainer import end_process\n"
        "from outloop.engine.train.ranks.watchdog import Watchdog\n"
        "watchdog = Watchdog(Path(sys.argv[1]), rank=0, num_ranks=1, hang_timeout_s=0.2,\n"
        "                    on_hang=end_process)\n"
        "watchdog.progress('publish')\n"
        "threading.Event().wait()\n"
    )
    code, said = end_of(program, tmp_path)
    assert code == 3
    last = said.strip().splitlines()[-1]
    assert last.startswith("outloop: trainer rank 0 made no progress")
    assert "phase='publish'" in last


SHORT_OF_MEMORY = """
import os, resource, sys, threading
from pathlib import Path
from outloop.cli.trainer import end_process, end_without_memory
from outloop.engine.train.ranks.watchdog import Watchdog
threading.excepthook = end_without_memory
watchdog = Watchdog(Path(sys.argv[1]), rank=0, num_ranks=1, hang_timeout_s=600.0,
                    start_timeout_s=1.0, on_hang=end_process)
watchdog.progress("save")
"""
WITHOUT_ROOM = """
threading.stack_size(2**20)
pages = int(Path("/proc/self/statm").read_text().split()[0])
for number in range(pages, pages + 10_000):
    # Page by page until a thread gets its stack, and nothing else.
    limit = number * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        threading.Thread(target=str).start()
        break
    except RuntimeError:
        continue
"""


@pytest.mark.medium
def test_a_thread_that_gets_no_memory_to_begin_ends_the_rank(tmp_path: Path) -> None:
    """The call that starts it never returns; the exit code has the run started again."""
    code, said = end_of(SHORT_OF_MEMORY + WITHOUT_ROOM, tmp_path)
    assert code == RANK_KILLED_EXIT_CODE, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("outloop: trainer rank 0 started a thread in phase='save' that had not")
    assert "no more memory" in last


@pytest.mark.medium
def test_a_thread_that_gets_no_more_memory_ends_the_rank(tmp_path: Path) -> None:
    """Others may wait for what it does."""
    work = "threading.Thread(target=lambda: bytearray(2**40), name='beside').start()\n"
    code, said = end_of(f"{SHORT_OF_MEMORY}{work}threading.Event().wait()", tmp_path)
    assert code == RANK_KILLED_EXIT_CODE, said
    assert "outloop: the system gave thread 'beside' of trainer rank 0 no more memory" in said


class Leases:
    """Counts renewals; the ones named in `failing` raise."""

    def __init__(self, failing: dict[int, Exception] | None = None) -> None:
        self.num_renewals = 0
        self.changed = threading.Condition()
        self._failing = failing or {}

    def renew(self) -> None:
        """One renewal."""
        with self.changed:
            self.num_renewals += 1
            self.changed.notify_all()
        if self.num_renewals in self._failing:
            raise self._failing[self.num_renewals]

    def wait_for(self, count: int) -> bool:
        """Until so many were tried."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_renewals >= count, WAIT_S)


def test_leases_are_renewed_while_the_training_thread_waits(make_watchdog: MakeWatchdog) -> None:
    """Without a call they are still renewed; Redis may be away for a while."""
    leases = Leases({2: BufferUnavailable("away")})
    watchdog = make_watchdog()
    watchdog.renew_leases(leases.renew, every_s=0.02)
    assert leases.wait_for(5)
    watchdog.progress()


@pytest.mark.medium
def test_a_hung_training_thread_loses_its_leases(make_watchdog: MakeWatchdog) -> None:
    """No renewal after hang_timeout_s without progress; progress brings them back."""
    leases = Leases()
    watchdog = make_watchdog(hang_timeout_s=0.5)
    watchdog.renew_leases(leases.renew, every_s=0.02)
    progress_until(watchdog, lambda: leases.num_renewals >= 2)
    before = -1
    while leases.num_renewals != before:
        before = leases.num_renewals
        time.sleep(0.6)
    progress_until(watchdog, lambda: leases.num_renewals > before)


def progress_until(watchdog: Watchdog, is_true: Callable[[], bool]) -> None:
    """As a training thread that is well."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        watchdog.progress()


def test_lost_leases_are_raised_in_the_training_thread(make_watchdog: MakeWatchdog) -> None:
    """At its next sign of progress; the renewals end."""
    leases = Leases({1: FenceExpired("another trainer holds this run")})
    watchdog = make_watchdog()
    watchdog.renew_leases(leases.renew, every_s=0.02)
    assert leases.wait_for(1)
    with pytest.raises(FenceExpired, match="another trainer"):
        progress_until(watchdog, lambda: False)
    assert leases.num_renewals == 1


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Watchdog, Watchdog]]:
    """The watchdogs of two ranks on one store, without beats."""
    store = dist.HashStore()
    first, second = (
        Watchdog(tmp_path, rank=rank, num_ranks=2, hang_timeout_s=60.0, store=store, beat_s=0.0)
        for rank in range(2)
    )
    yield first, second
    first.close()
    second.close()


def gone() -> RuntimeError:
    """What gloo raises when the other rank's process has ended."""
    return RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:11653: "
        "Connection reset by peer. This is typically caused by a remote worker hanging"
    )


def late() -> RuntimeError:
    """What gloo raises when the other rank does not come before the deadline."""
    return RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
        "3000ms for recv operation to complete"
    )


def fail_in(watchdog: Watchdog, phase: str, error: Exception) -> None:
    """A rank in whose phase something fails."""
    with watchdog.enter(phase):
        raise error


def test_a_rank_that_waits_in_vain_names_whom_and_where(two: tuple[Watchdog, Watchdog]) -> None:
    """The other is still two phases behind."""
    first, second = two
    for watchdog in two:
        with watchdog.enter("build"):
            pass
    with first.enter("tell"):
        pass
    with pytest.raises(DeadlineExceeded, match=r"rank 0 .*'update' .*rank 1 \(in phase='build'"):
        fail_in(first, "update", late())
    assert second is not None


def test_a_rank_that_is_gone_is_named(two: tuple[Watchdog, Watchdog]) -> None:
    """A connection that breaks without a word: the run may be started again."""
    assert not two[0].has_lost_rank
    with pytest.raises(RankKilled, match=r"rank 0 lost another rank .*rank 1 \(not started"):
        fail_in(two[0], "update", gone())
    assert two[0].has_lost_rank


def test_a_store_that_went_with_rank_0_is_a_lost_rank(tmp_path: Path) -> None:
    """Where torchrun shares no store, rank 0 has it; the others end, to be started again."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    watchdog = Watchdog(
        tmp_path, rank=1, num_ranks=2, hang_timeout_s=60.0, store=client, beat_s=0.0
    )
    try:
        del server
        with pytest.raises(RankKilled, match=r"rank 1 lost the store .*'update'.*started again"):
            fail_in(watchdog, "update", gone())
        assert watchdog.has_lost_rank
        with pytest.raises(RankKilled, match=r"rank 1 lost the store .*'save'"):
            fail_in(watchdog, "save", ValueError("it is not entered"))
    finally:
        watchdog.close()


def test_the_sentence_of_the_rank_that_failed_first_is_reported(
    two: tuple[Watchdog, Watchdog],
) -> None:
    """Not the broken connection that it left behind; settings stay settings."""
    with pytest.raises(ValueError, match="NaN"):
        fail_in(two[1], "update", ValueError("NaN in layer 3"))
    with pytest.raises(PartFailed, match=r"rank 1 failed in phase='update': .*NaN in layer 3"):
        fail_in(two[0], "update", gone())


def test_a_refusal_of_one_rank_is_that_of_all(two: tuple[Watchdog, Watchdog]) -> None:
    """The same exception type, so the exit code says that settings are to be changed."""
    with pytest.raises(SettingsError):
        fail_in(two[1], "load", SettingsError("lacks a tensor"))
    with pytest.raises(SettingsError, match="lacks a tensor"):
        fail_in(two[0], "load", gone())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4000000000000 bytes. Error code 12"
        ),
    ],
    ids=["python", "system call", "thread", "torch"],
)
def test_a_rank_without_memory_is_as_one_that_was_killed(
    two: tuple[Watchdog, Watchdog], error: Exception
) -> None:
    """On itself and on the others, so that the run is started again."""
    with pytest.raises(RankKilled, match=r"gave trainer rank 1 no more memory in phase='update'"):
        fail_in(two[1], "update", error)
    with pytest.raises(RankKilled, match=r"gave trainer rank 1 no more memory in phase='update'"):
        fail_in(two[0], "update", gone())
    assert two[0].has_lost_rank


def test_the_memory_that_torch_is_refused_is_recognized() -> None:
    """By its sentence, which has no type of its own."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50)
    assert is_memory_shortage(refused.value)
    assert not is_memory_shortage(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))


@pytest.mark.parametrize(
    "sentence",
    [
        "expected a connection string, got ''",
        "the user's timeout is negative",
        "peer review says: shape mismatch",
        "CUDA error: out of memory while allocating NCCL buffers of 0 bytes",
    ],
)
def test_an_error_of_this_rank_is_not_taken_for_anothers_death(
    sentence: str, two: tuple[Watchdog, Watchdog]
) -> None:
    """Words of an error decide nothing: the other ranks learn whose error it is."""
    with pytest.raises(RuntimeError, match="^" + re.escape(sentence) + "$"):
        fail_in(two[0], "update", RuntimeError(sentence))
    with pytest.raises(PartFailed, match="rank 0 failed in phase='update'"):
        fail_in(two[1], "update", dist.DistNetworkError("The client socket has failed"))
