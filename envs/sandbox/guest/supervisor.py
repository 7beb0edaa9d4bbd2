"""The first process of a session: receives calls, starts their programs, and answers.

It limits the time, output and memory of a call. It has no rights to anything outside its sandbox,
and answers every call once, soon after the call's wall time at the latest. An interpreter is a call
of its own that lasts for many inputs: each input has an answer, a time and an output.
"""

from __future__ import annotations

import os
import select
import sys
import time

from outloop.envs.sandbox.guest import (
    framing,
    interpreter_line,
    isolation,
    memory,
    program,
    syscalls,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # imported in every sandbox, these would be a quarter of its start
    from collections.abc import Callable
    from types import TracebackType

_TICK_MS = 50
_DRAIN_S = 0.2
_NOT_RUN = b"the input was not run: the interpreter had ended before it\n"
_DISCARD_FACTOR = 16
"""A program that writes this many times what is kept is ended."""


class _Running:
    """One program of the current call."""

    def __init__(self, pid: int, status: int, out: int, err: int) -> None:
        self.pid = pid
        self.streams = {out: bytearray(), err: bytearray(), status: bytearray()}
        self.status, self.out, self.err = status, out, err
        self.num_written = {out: 0, err: 0}
        self.open = set(self.streams)
        self.is_reaped = False
        self.ended = ""

    def kill(self, why: str) -> None:
        """Kill the program if it runs; the first reason is reported."""
        if not self.is_reaped:
            self.ended = self.ended or why
            os.kill(self.pid, syscalls.SIGKILL)

    def take(self, fd: int, output_bytes: int) -> None:
        """Read once from a stream with data."""
        chunk = os.read(fd, 65536)
        if not chunk:
            self.open.discard(fd)
        elif fd == self.status:
            self.streams[fd] += chunk
        else:
            self.num_written[fd] += len(chunk)
            self.streams[fd] += chunk[: max(0, output_bytes - len(self.streams[fd]))]
            if self.num_written[fd] > _DISCARD_FACTOR * max(output_bytes, 4096):
                self.kill("output")


class _Talk:
    """An interpreter, and the input that it runs; None between two."""

    def __init__(self, one: _Running, own: int, output_bytes: int) -> None:
        self.asked: interpreter_line.Input | None = None
        self.line = interpreter_line.Line(own)
        self._one = one
        self._own = own
        self._output_bytes = output_bytes
        self._poll = select.poll()
        for fd in (0, own, *one.open):
            self._poll.register(fd, select.POLLIN)

    def move(self) -> None:
        """Wait a moment; pass on what there is to pass on, and end what is late or has left."""
        one = self._one
        for fd, _ in self._poll.poll(self.line.wait_ms(self.asked, _TICK_MS)):
            if fd == 0:
                self._ask()
                is_open = True
            elif fd == self._own:
                is_open = self.line.take()
            else:
                one.take(fd, self._output_bytes)
                is_open = fd in one.open
            if not is_open:
                self._poll.unregister(fd)
        if not one.is_reaped:
            self.line.give()
        if self.line.is_left:
            one.kill("killed")
        if self.asked is not None and time.monotonic() > self.asked.deadline:
            one.kill("wall_time")

    def _ask(self) -> None:
        one = self._one
        self.asked = interpreter_line.receive()
        self.line.put(self.asked)
        one.num_written = {one.out: 0, one.err: 0}
        if self.asked.is_end:
            one.kill("killed")
        elif one.is_reaped:
            one.streams[one.err] += _NOT_RUN

    def answer(self) -> list[bytes]:
        """The answer to the input, which is over; what was written is forgotten."""
        one, asked, status = self._one, self.asked, self.line.status
        assert asked is not None
        assert status is not None
        self.asked = None
        is_cut = any(number > self._output_bytes for number in one.num_written.values())
        fields = [
            b"answered",
            b"%d" % int(1000 * (time.monotonic() - asked.started)),
            b"%d" % is_cut,
            bytes(one.streams[one.out]),
            bytes(one.streams[one.err]),
            status,
        ]
        for fd in (one.out, one.err):
            one.streams[fd].clear()
        return fields


class Supervisor:
    """Serves calls on descriptors 0 and 1 until the sandbox closes them."""

    def __init__(self, walls: isolation.Isolation, killed: memory.Killed) -> None:
        self._walls = walls
        self._killed = killed

    def serve(self) -> None:
        """Answer calls until the input ends; raises `Become` in a forked program."""
        while True:
            try:
                head = program.receive(0)
            except EOFError:
                return
            is_kept, *numbers = (int(field) for field in head)
            if is_kept:
                self._walls.open_kept()
            # In a fork: later programs must not be forked from memory with data of earlier ones.
            pid = os.fork()
            if pid == 0:
                self._answer_call(numbers)
            if os.waitpid(pid, 0)[1]:
                os._exit(1)

    def _answer_call(self, numbers: list[int]) -> None:
        """Answer one call, and never return, except by `Become` in a forked program."""
        try:
            syscalls.die_with_parent()
            if numbers[0]:
                program.send(1, self._call(*numbers))
            else:
                self._interpret(*numbers[2:])
        except program.Become:
            raise
        except BaseException as error:  # noqa: BLE001 - the fork is a process boundary
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)

    def _call(
        self, num_programs: int, wall_ms: int, output_bytes: int, memory_bytes: int
    ) -> list[bytes]:
        started = time.monotonic()
        num_killed = self._killed.count()
        # Numbers, not sockets, which would close when a forked program leaves these frames.
        link = _socketpair() if num_programs == 2 else []
        running: list[_Running] = []
        for index in range(num_programs):
            own = link[index] if link else None
            others = [fd for fd in link if fd != own]
            others += [fd for one in running for fd in one.streams]
            running.append(self._start(index, own, others))
        for fd in link:
            os.close(fd)

        def is_too_much() -> bool:
            # When the kernel kills one process for memory, the call is over.
            return self._killed.count() > num_killed or bool(
                memory_bytes and memory.resident_bytes() > memory_bytes
            )

        self._watch(running, time.monotonic() + wall_ms / 1000, output_bytes, is_too_much)
        if self._killed.count() > num_killed:
            for one in running:
                one.ended = one.ended or "memory"
        fields = []
        for index, one in enumerate(running):
            fields += self._answer(one, output_bytes, time.monotonic() - started)
            self._walls.clean(index)
        return fields

    def _interpret(self, output_bytes: int, memory_bytes: int) -> None:
        """Give the inputs that come on descriptor 0 to one program, until it ends or is ended."""
        num_killed = self._killed.count()
        own, its = _socketpair()
        one = self._start(0, its, [own])
        os.close(its)
        talk = _Talk(one, own, output_bytes)
        while True:
            talk.move()
            if self._killed.count() > num_killed or (
                memory_bytes and memory.resident_bytes() > memory_bytes
            ):
                one.kill("memory")
            self._reap(one)
            asked = talk.asked
            if asked is not None and one.is_reaped:
                break
            if asked is not None and talk.line.status is not None:
                self._read_all(one, output_bytes)
                program.send(1, [framing.pack(talk.answer())])
        if self._killed.count() > num_killed:
            one.ended = one.ended or "memory"
        self._drain(one, output_bytes)
        answer = self._answer(one, output_bytes, time.monotonic() - asked.started)
        self._walls.clean(0)
        program.send(1, answer)

    def _read_all(self, one: _Running, output_bytes: int) -> None:
        """Read what is in the pipes by now; what is left running may go on writing."""
        deadline = time.monotonic() + _DRAIN_S
        for fd in (one.out, one.err):
            while fd in one.open and time.monotonic() < deadline:
                if not select.select([fd], [], [], 0)[0]:
                    break
                one.take(fd, output_bytes)

    def _start(self, index: int, link: int | None, others: list[int]) -> _Running:
        (status, its_status), (out, its_out), (err, its_err) = (os.pipe() for _ in range(3))
        pid = self._walls.fork()
        if pid == 0:
            for fd in [*others, status, out, err]:
                os.close(fd)
            program.init(self._walls, index, (its_status, its_out, its_err), link)
        for fd in (its_status, its_out, its_err):
            os.close(fd)
        one = _Running(pid, status, out, err)
        # When it reports that it has read its message, descriptor 0 is ours again.
        if os.read(status, 1) != b"+":
            one.streams[err] += os.read(status, 2000)
            one.ended = "refused"
        return one

    def _watch(
        self,
        running: list[_Running],
        deadline: float,
        output_bytes: int,
        is_too_much: Callable[[], bool],
    ) -> None:
        """Wait until every program has ended, on its own or by a limit."""
        owners = {fd: one for one in running for fd in one.open}
        poll = select.poll()
        for fd in owners:
            poll.register(fd, select.POLLIN)
        poll.register(0, 0)
        while not all(one.is_reaped for one in running):
            left_ms = 1000 * (deadline - time.monotonic())
            why = "wall_time" if left_ms <= 0 else ""
            for fd, _ in poll.poll(max(1.0, min(_TICK_MS, left_ms))):
                if fd == 0:
                    os._exit(0)  # The session was closed.
                owners[fd].take(fd, output_bytes)
                if fd not in owners[fd].open:
                    poll.unregister(fd)
            why = why or ("memory" if is_too_much() else "")
            for one in running:
                if why:
                    one.kill(why)
                self._reap(one)
                if running[0].is_reaped:
                    one.kill("partner")
        for one in running:
            self._drain(one, output_bytes)

    def _reap(self, one: _Running) -> None:
        # The status stream ends with the init, so this wait is short.
        if not one.is_reaped and one.status not in one.open:
            os.waitpid(one.pid, 0)
            one.is_reaped = True

    def _drain(self, one: _Running, output_bytes: int) -> None:
        """Read what is still in the pipes, without waiting for a process that holds one open."""
        self._read_all(one, output_bytes)
        for fd in one.streams:
            os.close(fd)

    def _answer(self, one: _Running, output_bytes: int, wall_s: float) -> list[bytes]:
        report = bytes(one.streams[one.status])
        fields = framing.unpack(report[8:]) if report[:1] == b"\0" else []
        if report and not fields:  # text: the init itself failed
            one.streams[one.err] += report
        ended = one.ended or ("exited" if fields else "killed")
        is_cut = any(number > output_bytes for number in one.num_written.values())
        body = [
            ended.encode(),
            b"%d" % int(1000 * wall_s),
            b"%d" % is_cut,
            bytes(one.streams[one.out]),
            bytes(one.streams[one.err]),
            *fields,
        ]
        return [framing.pack(body)]


def _socketpair() -> list[int]:
    import _socket

    return [end.detach() for end in _socket.socketpair()]


def main(kind: str, disk_bytes: int, max_files: int, events: int, base: str) -> Callable[[], None]:
    """Serve calls. In a forked program this returns the function that runs its script."""
    walls = isolation.ISOLATIONS[kind](disk_bytes, max_files, base)
    killed = memory.Killed(events, isinstance(walls, isolation.UserIsolation))
    try:
        Supervisor(walls, killed).serve()
    except program.Become as become:
        argv = become.argv
        return lambda: _run_script(argv)
    if isinstance(walls, isolation.NoIsolation):
        walls.close()
    os._exit(0)


def _run_script(argv: list[str]) -> None:
    """Run a script in this interpreter, as `python SCRIPT ...` does."""
    import site

    # This interpreter began without site, which defines exit, quit, help, copyright and others.
    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    module = type(sys)("__main__")
    module.__dict__.update(__file__=argv[0], __builtins__=__builtins__)
    sys.modules["__main__"] = module
    try:
        with open(argv[0], "rb") as file:
            source = file.read()
    except OSError as error:
        sys.exit(f"python: can't open file {argv[0]!r}: {error.strerror}")
    sys.excepthook = _show_own_frames
    # Without the `from __future__` of this file.
    exec(compile(source, argv[0], "exec", dont_inherit=True), module.__dict__)


def _show_own_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback that begins at the script, as if python had started it."""
    while trace is not None and trace.tb_frame.f_code.co_filename != sys.argv[0]:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
