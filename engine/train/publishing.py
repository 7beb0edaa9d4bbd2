"""The trainer's weights on their way to the servers, within the training loop or beside it.

A server is given a version's own weights and no others, whenever it joins: within the loop nothing
updates them before they are published, beside it they are sent from a copy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from outloop.buffer.errors import PublishFailed
from outloop.engine.publish.tensor_source import TensorSource
from outloop.engine.train.interfaces import Publisher, PublishReport, Registry
from outloop.engine.train.ranks.controller import RankController
from outloop.engine.train.ranks.copied_weights import CopiedWeights

_POLL_S = 0.5
"""How often servers that joined are looked for, and the other ranks told that this one waits."""
_CLOSE_S = 30.0
"""A publish may take longer; it ends with the process."""
_log = structlog.get_logger()

OnWait = Callable[[str], None]
"""Gets a sentence while the training thread waits for servers; called in that thread."""


class Publishing(Protocol):
    """Publishes one version after the other; used by the training thread."""

    def begin(self, policy_version: int, settle: Callable[[], None]) -> None:
        """Publish the weights as they are now; `settle` runs once servers hold them, before another
        version is published.

        Raises:
            PublishFailed: no server took them, the second time either.
        """

    def report(self) -> PublishReport | None:
        """Of the version begun last, if servers hold it by now; None otherwise.

        Raises:
            PublishFailed: no server took it, the second time either. Whatever `settle` raised.
        """

    def finish(self) -> PublishReport | None:
        """The same, once it is over; None before the first version."""

    def look_after_servers(self) -> None:
        """Load weights into servers that joined; called wherever the training thread waits.

        Raises:
            PublishFailed: no server took them.
        """

    def close(self) -> None:
        """Publish nothing more."""


class PublishingWithin:
    """Publishing by the training thread, from the model, a few buckets at a time."""

    def __init__(
        self,
        ranks: RankController,
        registry: Registry,
        publisher: Publisher,
        on_wait: OnWait,
        take_devices: Callable[[], None],
    ) -> None:
        """`take_devices`: puts the weights on devices that servers share; a publish leaves them."""
        self._take_devices = take_devices
        self._ranks = ranks
        self._registry = registry
        self._publisher = publisher
        self._on_wait = on_wait
        self._policy_version = -1
        self._report: PublishReport | None = None

    def begin(self, policy_version: int, settle: Callable[[], None]) -> None:
        """Publish, and settle."""
        self._policy_version = policy_version
        self._report = self._load()
        settle()

    def report(self) -> PublishReport | None:
        """Of the version begun last."""
        return self._report

    def finish(self) -> PublishReport | None:
        """The same."""
        return self._report

    def look_after_servers(self) -> None:
        """Load the version's weights, which the model still has."""
        if _has_joined(self._registry):
            self._take_devices()
            self._load()

    def close(self) -> None:
        """Nothing to end."""

    def _load(self) -> PublishReport:
        version, on_wait = self._policy_version, self._on_wait
        return _load(self._publisher, self._ranks, version, on_wait, again=self._take_devices)


@dataclass(frozen=True, slots=True)
class _Order:
    """What the thread is to publish."""

    policy_version: int
    settle: Callable[[], None]
    done: Future[PublishReport]


class PublishingBeside:
    """Publishing by a thread of its own, from a copy, while the model is trained on.

    `settle` runs in that thread. It also looks for servers that joined, all the time.
    """

    def __init__(
        self,
        ranks: RankController,
        registry: Registry,
        publisher: Publisher,
        on_wait: OnWait,
        *,
        copy: CopiedWeights,
    ) -> None:
        self._ranks = ranks
        self._registry = registry
        self._publisher = publisher
        self._on_wait = on_wait
        self._copy = copy
        self._in_use = threading.Lock()
        """Held while the copy is read, or filled."""
        self._policy_version = -1
        """Of the copy, once it was sent; -1 before."""
        self._last: Future[PublishReport] | None = None
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._noted = ""
        """What the thread said last that it waits for, until the training thread repeats it."""
        self._failure: Exception | None = None
        """Of loading servers that joined."""
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)
        self._thread.start()

    def begin(self, policy_version: int, settle: Callable[[], None]) -> None:
        """Copy the weights, once the version before is published, and let the thread go on."""
        self.finish()
        while not self._in_use.acquire(timeout=_POLL_S):
            self._wait_on()
        try:
            self._copy.fill()
            # No server that joins gets these weights under the number of the last ones.
            self._policy_version = -1
        finally:
            self._in_use.release()
        order = _Order(policy_version, settle, Future())
        self._last = order.done
        self._orders.put(order)

    def report(self) -> PublishReport | None:
        """Of the version begun last, if it is over."""
        if self._failure is not None:
            raise self._failure
        return self._last.result() if self._last is not None and self._last.done() else None

    def finish(self) -> PublishReport | None:
        """Wait for it.

        Raises:
            RankKilled, DeadlineExceeded: a rank is lost.
        """
        while self._last is not None and not wait([self._last], timeout=_POLL_S).done:
            self._wait_on()
        return self.report()

    def look_after_servers(self) -> None:
        """The thread does; its failure is raised here."""
        self.report()

    def close(self) -> None:
        """Wait a while for what is under way, and end the thread."""
        self._orders.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while True:
            try:
                order = self._orders.get(timeout=_POLL_S)
            except queue.Empty:
                self._load_joined()
                continue
            if order is None:
                return
            self._fulfil(order)

    def _fulfil(self, order: _Order) -> None:
        try:
            with self._in_use:
                report = self._load(order.policy_version)
            self._policy_version = order.policy_version
            order.settle()
        except Exception as error:  # noqa: BLE001 - raised where the training thread asks for it
            order.done.set_exception(error)
        else:
            order.done.set_result(report)

    def _load_joined(self) -> None:
        try:
            with self._in_use:
                if self._policy_version >= 0 and _has_joined(self._registry):
                    self._load(self._policy_version)
        except Exception as error:  # noqa: BLE001 - raised where the training thread asks for it
            self._failure = error

    def _load(self, policy_version: int) -> PublishReport:
        return _load(self._publisher, self._copy, policy_version, self._note)

    def _note(self, sentence: str) -> None:
        self._noted = sentence

    def _wait_on(self) -> None:
        """Report progress, if the thread makes any: a publish that hangs is to be found. And look
        for lost ranks: the thread may wait for the answer of one, and a message shows the loss."""
        self._ranks.look()
        noted, self._noted = self._noted, ""
        if noted:
            self._on_wait(noted)


def _has_joined(registry: Registry) -> bool:
    """Whether a server waits for its first weights."""
    return any(e.policy_version is None and not e.is_quarantined for e in registry.servers())


def _do_nothing() -> None:
    """The default of `again`."""


def _load(
    publisher: Publisher,
    source: TensorSource,
    policy_version: int,
    on_wait: OnWait,
    *,
    again: Callable[[], None] = _do_nothing,
) -> PublishReport:
    """Send the weights to every server; once more when none was left, for one that restarts.

    Args:
        again: called before the second time.

    Raises:
        PublishFailed: no server took them the second time either.
    """
    try:
        return publisher.publish(source, policy_version, on_wait=on_wait)
    except PublishFailed as error:
        _log.warning("publish_repeated", policy_version=policy_version, reason=str(error))
    again()
    return publisher.publish(source, policy_version, on_wait=on_wait)
