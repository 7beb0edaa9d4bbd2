"""One program of a call: its init, which prepares and reports, and the program itself.

The program cannot reach the init's descriptors and memory, so only the init can write the report.
It does so when no process of the program is left that could change a file. The supervisor limits
time and output.
"""

from __future__ import annotations

import fcntl
import os

from outloop.envs.sandbox.guest import framing, isolation, syscalls, workspace


class Become(BaseException):
    """Carries a forked interpreter out of the supervisor's frames, to run a script as its own."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.argv = argv


class Order:
    """The parameters of one program, from the fields of its message."""

    def __init__(self, fields: list[bytes]) -> None:
        taken = iter(fields)

        def text() -> str:
            return next(taken).decode("utf-8", "surrogateescape")

        def number() -> int:
            return int(next(taken))

        self.is_kept = bool(number())
        self.cpu_s = number()
        self.memory_bytes = number()
        self.disk_bytes = number()
        self.max_files = number()
        self.num_processes = number()
        self.stdin = next(taken)
        self.argv = [text() for _ in range(number())]
        self.environ = {text(): text() for _ in range(number())}
        self.files = [(text(), number(), next(taken)) for _ in range(number())]
        self.given = [(text(), number(), next(taken)) for _ in range(number())]
        self.arrange = [
            workspace.Entry(text(), text(), number(), target=text()) for _ in range(number())
        ]
        self.is_kept_copied = bool(number())
        self.collect = [text() for _ in range(number())]
        self.listed = [text() for _ in range(number())]


def receive(fd: int) -> list[bytes]:
    """The next message.

    Raises:
        EOFError: the other side closed the descriptor.
    """
    return framing.unpack(_read(fd, framing.body_length(_read(fd, 8))))


def send(fd: int, fields: list[bytes]) -> None:
    """Write one message."""
    view = memoryview(framing.pack(fields))
    while view:
        view = view[os.write(fd, view) :]


def init(
    walls: isolation.Isolation, index: int, streams: tuple[int, int, int], link: int | None
) -> None:
    """Run in the forked init, and never return, except by `Become` in the program.

    `link`, the line to the other program of a pair, becomes descriptor 3 of the program.
    """
    status, out, err = streams
    pid = 0
    try:
        syscalls.die_with_parent()
        syscalls.set_traceable(False)
        order = Order(receive(0))
        os.close(0)
        os.close(1)
        root = walls.enter(index, order)
        walls.give(order.given)
        _write_files(walls, index, root, order)
        os.write(status, b"+")
        pid = os.fork()
        if pid == 0:
            _become(walls, index, root, order, out, err, link)
        for fd in (out, err) if link is None else (out, err, link):
            os.close(fd)
        wait_status, cpu_s = _wait(pid)
        walls.end(index, pid)
        _reap()
        fields = [b"%d" % wait_status, b"%d" % int(1000 * cpu_s)]
        # First: it makes unreadable files readable, which may be collected.
        listed = workspace.list_below(root, order.listed, opens_all=True)
        left = order.disk_bytes
        for path in order.collect:
            data = _collected(walls, root, path, left)
            fields += [b"0" if data is None else b"1", data or b""]
            left -= len(data or b"")
        for entry in listed:
            fields += [entry.kind.encode(), os.fsencode(entry.path), b"%d" % entry.mode]
            fields += [b"%d" % entry.size, os.fsencode(entry.target)]
        send(status, fields)
        os._exit(0)
    except Become:
        raise
    except BaseException as error:  # noqa: BLE001 - the init is a process boundary
        if pid:
            walls.end(index, pid)
        os.write(status, b"-" + f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(1)


def _collected(walls: isolation.Isolation, root: str, path: str, max_bytes: int) -> bytes | None:
    temporary = "/tmp/"
    if walls.temporary and path.startswith(temporary):
        return workspace.read_file(walls.temporary, path.removeprefix(temporary), max_bytes)
    return workspace.read_file(root, path, max_bytes)


def _write_files(walls: isolation.Isolation, index: int, root: str, order: Order) -> None:
    if not isinstance(walls, isolation.UserIsolation):
        _write(root, order)
        return
    # As the program's own user: root would write wherever an earlier call has led a path.
    pid = os.fork()
    if pid == 0:
        try:
            walls.confine(index)
            _write(root, order)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise OSError(f"the files could not be written into {root}")


def _write(root: str, order: Order) -> None:
    for path, mode, data in order.files:
        workspace.write_file(root, path, data, mode)
    workspace.arrange(root, order.arrange)


def _become(
    walls: isolation.Isolation,
    index: int,
    root: str,
    order: Order,
    out: int,
    err: int,
    link: int | None,
) -> None:
    """In the program: take on its isolation, limits and descriptors, and run it."""
    try:
        os.setsid()
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(order.stdin)
        os.lseek(stdin, 0, os.SEEK_SET)
        given = [stdin, out, err] if link is None else [stdin, out, err, link]
        # First to numbers above all targets.
        for target, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in given]):
            os.dup2(fd, target)
        os.closerange(len(given), 4096)
        walls.confine(index)
        syscalls.die_with_parent()
        syscalls.set_traceable(True)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        os.chdir(root)
        os.environ.clear()
        os.environ.update({"HOME": root, "TMPDIR": walls.temporary or root, **order.environ})
        isolation.set_limits(
            cpu_s=order.cpu_s,
            memory_bytes=order.memory_bytes,
            disk_bytes=order.disk_bytes,
            num_processes=order.num_processes,
            is_counted=walls.is_counted_by_user,
        )
    except BaseException as error:  # noqa: BLE001 - the program is a process boundary
        _say(f"the session could not start the program: {error}")
        os._exit(126)
    argv = order.argv
    if argv[0] == "python" and len(argv) > 1 and not argv[1].startswith("-"):
        raise Become(argv[1:])
    try:
        for number in (syscalls.SIGPIPE, syscalls.SIGXFSZ):
            syscalls.set_default_action(number)
        if argv[0] in ("python", "python3"):
            os.execve(os.readlink("/proc/self/exe"), argv, os.environ)
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        _say(f"{argv[0]}: {error.strerror}")
        os._exit(127)


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def _wait(pid: int) -> tuple[int, float]:
    """Wait until the program itself has ended; orphans that end before it are reaped too."""
    cpu_s = 0.0
    while True:
        ended, wait_status, usage = os.wait3(0)
        cpu_s += usage.ru_utime + usage.ru_stime
        if ended == pid:
            return wait_status, cpu_s


def _reap() -> None:
    try:
        while True:
            os.wait3(0)
    except ChildProcessError:
        pass


def _read(fd: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = os.read(fd, length - len(data))
        if not chunk:
            raise EOFError(f"fd={fd} ended after {len(data)} of {length} bytes")
        data += chunk
    return bytes(data)
