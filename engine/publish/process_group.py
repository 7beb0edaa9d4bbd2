"""A process group beside the default one, which a trainer rank and servers join.

Joining and broadcasting end by their deadline. Keys and ranks are those of SGLang's
init_custom_process_group, so that its servers and ours are members alike. Rank 0 sends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from outloop.buffer.errors import PublishFailed

Result = TypeVar("Result")
Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
_DEVICE_OF: dict[Backend, str] = {"gloo": "cpu", "nccl": "cuda"}
_LOCAL_ADDRESS = "127.0.0.1"
_NUM_GLOO_THREADS = 2
_CONNECT_TIMEOUT_S = 10.0
_NCCL_ENVIRONMENT = {
    # After an error the communicator is given up; by default the process would end with it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # By default an abort waits a minute for a debug dump,
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # and the process ends if that takes longer.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What torch reads when it makes a group, and only then: the trainer's own groups keep theirs."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The network that gloo takes, in SGLang too; a name of this machine may lead to another."""
_NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds, read once in a process: how long calls of communicators that do not block may take."""


class Rendezvous:
    """Where members meet: a store on `host`, at a free port.

    `close` frees, with an error, those that wait for members which do not come.
    """

    def __init__(self, host: str) -> None:
        """Listen.

        Raises:
            PublishFailed: `host` is no address of this machine.
        """
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise PublishFailed(
                f"cannot listen on publish.host={host!r}: {error}; set it to an address of "
                "this machine that servers reach"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        # The store closes the descriptor that it is given.
        self._store: Store | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
        listener.close()

    def wait_for(self, name: str, ranks: Sequence[int], backend: Backend, timeout_s: float) -> None:
        """Wait until these members of the group `name` have come, or `timeout_s` has passed.

        One that comes after `close` keeps trying to connect for as long as its own deadline.
        """
        if self._store is None or not ranks:
            return
        # Where gloo leaves a member's address. Members of an NCCL group do not wait for each other.
        keys = [f"{_store_prefix(name, backend)}0/{rank}" for rank in ranks]
        with contextlib.suppress(RuntimeError):
            self._store.wait(keys, timedelta(seconds=max(timeout_s, 0.001)))

    def close(self) -> None:
        """Stop listening."""
        self._store = None


class Group:
    """Membership in a group."""

    def __init__(self, members: Any, backend: Backend) -> None:
        self._members = members
        self.device_type = _DEVICE_OF[backend]
        """Where broadcast tensors must lie: cpu or cuda."""

    def broadcast(self, content: Tensor, *, timeout_s: float) -> None:
        """Send `content` from rank 0, or receive it there, on the other ranks.

        Raises:
            PublishFailed: a member is gone, or did not take part within `timeout_s`.
        """
        assert self._members is not None
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work: Any = None
        try:
            work = self._members.broadcast([content], options)
            work.wait(timedelta(seconds=max(timeout_s, 0.001)))
            if content.is_cuda:
                torch.cuda.current_stream(content.device).synchronize()
        except RuntimeError as error:
            reason = str(error)
        else:
            return
        finally:
            # It keeps the connections open, on which others wait, and an error keeps its frame.
            work = None
        raise PublishFailed(f"the broadcast of {len(content)} bytes failed: {_remedied(reason)}")

    def close(self) -> None:
        """Leave; members that wait for this one fail. May take as long as what is under way."""
        members, self._members = self._members, None
        if members is not None and self.device_type == "cuda":
            # Destruction would wait too, and keep every other thread from running meanwhile.
            members.abort()


def join_group(
    host: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    name: str,
    backend: Backend,
    timeout_s: float,
    nccl_type: Any = None,
) -> Group:
    """Join the group `name` at `host:port`; returns when all `world_size` members have.

    Operations of the group end after `timeout_s` too. `nccl_type` is the class of the members of an
    NCCL group; None: torch.distributed.ProcessGroupNCCL, which torch has on CUDA only.

    Raises:
        PublishFailed: not all members came in time, or the rendezvous was closed.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        connect_timeout = timedelta(seconds=min(timeout_s, _CONNECT_TIMEOUT_S))
        store: Store = TCPStore(host, port, is_master=False, timeout=connect_timeout)
        store.set_timeout(timeout)
        # SGLang wraps once, torch's own helper twice more.
        for prefix in _prefixes(name, backend):
            store = PrefixStore(prefix, store)
        if backend == "nccl":
            members = _join_nccl(store, rank, world_size, timeout, nccl_type)
        else:
            members = _join_gloo(store, rank, world_size, timeout, _own_address(host, rank))
    except RuntimeError as error:
        raise PublishFailed(
            f"group name={name!r} at {host}:{port} was not complete after {timeout_s:.1f} s or was "
            f"given up, rank={rank} of world_size={world_size}: {str(error).splitlines()[0]}"
        ) from error
    return Group(members, backend)


def _join_nccl(store: Store, rank: int, world_size: int, timeout: timedelta, nccl_type: Any) -> Any:
    """A backend of torch.distributed, whose stubs leave out most of what is used here."""
    if nccl_type is None:
        from torch.distributed import ProcessGroupNCCL as nccl_type  # noqa: N813 - a parameter
    options = nccl_type.Options()
    options._timeout = timeout
    # The communicator is made in the first broadcast: one that blocks would have no deadline.
    options.config.blocking = 0
    seconds = str(max(1, math.ceil(timeout.total_seconds())))
    os.environ.setdefault(_NONBLOCKING_TIMEOUT, seconds)
    with _environment(_NCCL_ENVIRONMENT):
        return nccl_type(store, rank, world_size, options)


def _join_gloo(store: Store, rank: int, world_size: int, timeout: timedelta, address: str) -> Any:
    """As `_join_nccl`, on the CPU."""
    gloo_type: Any = ProcessGroupGloo
    gloo = gloo_type._Options()
    gloo._timeout = timeout
    gloo._threads = _NUM_GLOO_THREADS
    interface = os.environ.get(_INTERFACE)
    if interface and address != _LOCAL_ADDRESS:
        gloo._devices = [gloo_type.create_device(interface=interface)]
    else:
        gloo._devices = [gloo_type.create_device(hostname=address)]
    return gloo_type(store, rank, world_size, gloo)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that hold while a group is made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _remedied(reason: str) -> str:
    """An error of NCCL, with what to do where that is known."""
    if "mismatched nccl version" in reason.lower():
        return (
            f"{reason}; trainer and servers need the same release of NCCL: "
            "see `outloop doctor`, or set another publish.transport"
        )
    return reason


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run `function` in a thread of its own that does not keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="publish-group", daemon=True).start()
    return future


def _prefixes(name: str, backend: Backend) -> tuple[str, str, str]:
    return name, f"{name}/", f"{_DEVICE_OF[backend]}/"


def _store_prefix(name: str, backend: Backend) -> str:
    return "".join(f"{prefix}/" for prefix in _prefixes(name, backend))


def _own_address(host: str, rank: int) -> str:
    """What the other members connect to: for rank 0, where it is on the rendezvous' machine, that
    one's address."""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if is_local:
        return _LOCAL_ADDRESS
    if rank == 0 and _is_own(host):
        return host
    return socket.gethostname()


def _is_own(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True
