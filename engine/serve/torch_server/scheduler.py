"""Continuous batching: the thread that owns model, cache and weights.

Everything is changed by the engine's thread between passes, so that a pass sees one set of weights.
After weights change, nothing computed before is reused for other requests.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
import torch

from outloop.engine.serve.torch_server.kv_cache import KVCache
from outloop.engine.serve.torch_server.requests import Running, abort_reason
from outloop.engine.serve.torch_server.sampling import BadRequest, RowParams, sample
from outloop.engine.serve.torch_server.schemas import MemoryTag
from outloop.engine.serve.torch_server.tokenizer import Text
from outloop.engine.serve.torch_server.transformer import Transformer
from outloop.engine.serve.torch_server.weight_update import UpdateRefused, UpdateSession
from outloop.engine.serve.torch_server.weights import Weights

PauseMode = Literal["abort", "in_place", "retract"]
Notify = Callable[[list[Running]], None]
_MAX_PREFILL_TOKENS = 8192
"""Padded ids of one prefill pass, unless a single request has more."""
_IDLE_WAKE_S = 1.0
_T = TypeVar("_T")
_log = structlog.get_logger()


class Engine:
    """Samples tokens for many requests at once.

    `submit`, `abort` and `call` may be used from any thread; everything else runs in the
    engine's own.
    """

    def __init__(
        self,
        weights: Weights,
        text: Text,
        *,
        max_running: int,
        max_tokens: int,
        weight_version: str,
        notify: Notify,
        seed: int | None = None,
        make_update: Callable[[Weights], UpdateSession] = UpdateSession,
    ) -> None:
        self.text = text
        self.max_tokens = max_tokens
        self.weight_version = weight_version
        self.update = make_update(weights)
        self.cache = KVCache(
            weights.config,
            max_running=max_running,
            max_tokens=max_tokens,
            dtype=weights.dtype,
            device=weights.device,
        )
        self.num_sampled = 0
        self._model = Transformer(weights.config, max_tokens=max_tokens + 1, device=weights.device)
        self._params = RowParams(self.cache.num_slots)
        self._token: npt.NDArray[np.int64] = np.zeros(self.cache.num_slots, dtype=np.int64)
        self._running: dict[int, Running] = {}
        """By slot."""
        self._waiting: deque[Running] = deque()
        self._paused: PauseMode | None = None
        self._released: set[MemoryTag] = set()
        self._notify = notify
        self._random = random.Random(seed)
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="torch-server-engine", daemon=True)

    # -- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Abort what runs and end the thread; False if it did not end in time."""
        self._post(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """True while the engine can sample."""
        return self._thread.is_alive() and self.failure is None

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    def submit(self, request: Running) -> None:
        """Queue a request; it ends by its `on_progress` with `finish` set."""
        self._post(lambda: self._waiting.append(request))

    def abort(self, rids: set[str] | None) -> None:
        """End the requests named, or all; they keep what was sampled."""
        self._post(lambda: self._abort(rids))

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run `function` in the engine's thread between two passes."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - raised where the future is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        self._post(run)
        return future

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    # -- for `call` -----------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Sample nothing until `resume`; what happens to running requests depends on the mode."""
        self._paused = mode
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            retracted = list(self._running.values())
            for request in retracted:
                self._release(request)
                request.num_retractions += 1
            self._waiting.extendleft(reversed(retracted))

    def resume(self) -> None:
        """Sample again.

        Raises:
            UpdateRefused: some of the memory is released.
        """
        if self._released:
            raise UpdateRefused(
                f"continue_generation: {sorted(self._released)} are released; "
                "resume_memory_occupation first"
            )
        self._paused = None

    def flush(self) -> bool:
        """Forget every cached prefix; False, and nothing is done, while requests run, or wait
        without a pause."""
        if self._running or (self._waiting and self._paused is None):
            return False
        self.cache.forget()
        return True

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give the memory of these parts back; nothing is sampled until all is resumed.

        Raises:
            UpdateRefused: the engine is not paused, requests run, or a part is released already.
        """
        if self._paused is None or self._running:
            raise UpdateRefused(
                f"release_memory_occupation: {len(self._running)} requests run and paused="
                f"{self._paused is not None}; pause with mode retract or abort first"
            )
        if self._released & set(tags):
            raise UpdateRefused(f"release_memory_occupation: {sorted(tags)} holds released parts")
        self._released |= set(tags)
        if "kv_cache" in tags:
            self.cache.give_back()
        if "weights" in tags:
            self.update.give_back()

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these parts again. Weights come back without their values.

        Raises:
            UpdateRefused: a part is not released.
        """
        if missing := sorted(set(tags) - self._released):
            raise UpdateRefused(f"resume_memory_occupation: {missing} are not released")
        self._released -= set(tags)
        if "kv_cache" in tags:
            self.cache.take_again()
        if "weights" in tags:
            self.update.take_again()

    def weights_changed(self) -> None:
        """New weights are in place: cached prefixes are of use to their owners alone."""
        self.cache.forget()

    def set_version(self, weight_version: str) -> None:
        """Name the weights in place; tokens sampled from now on carry the name."""
        self.weight_version = weight_version

    # -- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._run_posted()
                progressed: list[Running] = []
                if self._paused is None:
                    with torch.inference_mode():
                        progressed += self._prefill()
                        progressed += self._decode()
                if progressed:
                    self._notify(progressed)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: recorded and shown by /health
            _log.exception("engine_failed")
            self.failure = error
        finally:
            self._end(
                [*self._running.values(), *self._waiting],
                abort_reason("the server's engine has ended", 503),
            )

    def _run_posted(self) -> None:
        """Run what was posted; wait if there is nothing to do."""
        with self._wake:
            while not (self._inbox or self._has_work()):
                self._wake.wait(_IDLE_WAKE_S)
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            action()

    def _has_work(self) -> bool:
        return self._paused is None and bool(self._running or self._waiting)

    def _stop(self) -> None:
        self._is_stopping = True

    def _admit(self) -> list[Running]:
        """Give slots to waiting requests, as many as fit into one pass."""
        admitted: list[Running] = []
        longest = 0
        while self._waiting and len(self._running) < self.cache.max_running:
            request = self._waiting[0]
            ids = np.array(request.prompt_ids + request.output_ids, dtype=np.int32)
            slot, num_cached = self.cache.acquire(ids, request.extra_key)
            longest = max(longest, len(ids) - num_cached)
            if admitted and longest * (len(admitted) + 1) > _MAX_PREFILL_TOKENS:
                self.cache.release(slot)
                break
            self._waiting.popleft()
            request.slot = slot
            if not request.has_run:
                request.has_run, request.num_cached = True, num_cached
                seed = request.params.sampling_seed
                request.seed = self._random.getrandbits(64) if seed is None else seed
            self._params.set(
                slot,
                request.params,
                seed=request.seed % 2**64,
                num_sampled=len(request.output_ids),
                num_top=request.num_top,
                wants_support=request.wants_support,
                constraint=request.constraint,
            )
            self._running[slot] = request
            admitted.append(request)
        return admitted

    def _prefill(self) -> list[Running]:
        """Admit requests and sample the first token of each."""
        if not self._waiting:
            return []
        admitted = self._admit()
        if not admitted:
            return []
        slots = np.array([request.slot for request in admitted], dtype=np.int64)
        starts = self.cache.length[slots]
        new_ids = [
            (request.prompt_ids + request.output_ids)[start:]
            for request, start in zip(admitted, starts.tolist(), strict=True)
        ]
        lengths = np.array([len(ids) for ids in new_ids], dtype=np.int64)
        padded = np.zeros((len(admitted), int(lengths.max())), dtype=np.int64)
        for row, ids in zip(padded, new_ids, strict=True):
            row[: len(ids)] = ids
        sampled, logprobs = self._pass(padded, slots, starts, lengths)
        self.cache.length[slots] = starts + lengths
        return self._take(admitted, slots, sampled, logprobs)

    def _decode(self) -> list[Running]:
        """Sample one more token of every running request."""
        if not self._running:
            return []
        slots = np.fromiter(self._running, dtype=np.int64, count=len(self._running))
        requests = list(self._running.values())
        starts = self.cache.length[slots]
        self.cache.reserve(int(starts.max()) + 1)
        tokens = self._token[slots]
        sampled, logprobs = self._pass(tokens[:, None], slots, starts, np.ones_like(starts))
        self.cache.append(slots, tokens)
        return self._take(requests, slots, sampled, logprobs)

    def _pass(
        self,
        ids: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        device = self.update.live.device
        logits = self._model.forward(
            self.update.live,
            self.cache,
            torch.from_numpy(ids).to(device),
            torch.from_numpy(slots).to(device),
            torch.from_numpy(starts).to(device),
            torch.from_numpy(lengths).to(device),
            num_seen=int((starts + lengths).max()),
        )
        return sample(logits, self._params, slots)

    def _take(
        self,
        requests: list[Running],
        slots: npt.NDArray[np.int64],
        sampled: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
    ) -> list[Running]:
        """Record what was sampled; returns the requests whose owners are to be notified."""
        self._token[slots] = sampled
        self.num_sampled += len(requests)
        version, text = self.weight_version, self.text
        progressed: list[Running] = []
        all_finite = bool(np.isfinite(logprobs).all())
        for request, token, logprob in zip(
            requests, sampled.tolist(), logprobs.tolist(), strict=True
        ):
            if not (all_finite or np.isfinite(logprob)):
                reason: dict[str, Any] | None = abort_reason(
                    f"logits are not finite under weight_version={version!r}; publish sane weights",
                    500,
                )
            else:
                top = self._params.top.get(request.slot)
                support = self._params.support.get(request.slot)
                request.add(token, logprob, version, top, support)
                reason = request.end_reason(text)
            if reason is not None:
                self._finish(request, reason)
                progressed.append(request)
            elif request.is_streamed:
                progressed.append(request)
        return progressed

    def _finish(self, request: Running, reason: dict[str, Any]) -> None:
        if request.routes_from is not None and request.slot >= 0:
            rows = self.cache.routed_experts(request.slot, request.routes_from)
            request.routed_experts = rows.tobytes()
        self._release(request)
        request.final_version = self.weight_version
        request.finish = reason

    def _release(self, request: Running) -> None:
        if request.slot >= 0:
            del self._running[request.slot]
            self.cache.release(request.slot)
            request.slot = -1

    def _abort(self, rids: set[str] | None) -> None:
        chosen = [
            request
            for request in [*self._running.values(), *self._waiting]
            if rids is None or request.rid in rids
        ]
        self._end(chosen, abort_reason())

    def _end(self, requests: list[Running], reason: dict[str, Any]) -> None:
        """End requests from outside; they keep what was sampled."""
        gone = set(requests)
        self._waiting = deque(request for request in self._waiting if request not in gone)
        for request in requests:
            self._finish(request, reason)
        if requests:
            self._notify(requests)


def check_lengths(prompt_ids: list[int], max_new_tokens: int, engine: Engine) -> None:
    """Refuse prompts that cannot be served.

    Raises:
        BadRequest: empty, an id outside the vocabulary, or more tokens than the context holds.
    """
    vocab_size = engine.update.live.config.vocab_size
    if not prompt_ids:
        raise BadRequest("input_ids is empty; at least one id is needed")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        bad = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise BadRequest(f"input_ids holds id={bad}; allowed: 0 to {vocab_size - 1}")
    total = len(prompt_ids) + max_new_tokens
    if total > engine.max_tokens:
        raise BadRequest(
            f"num_prompt_tokens={len(prompt_ids)} plus max_new_tokens={max_new_tokens} is {total}; "
            f"the context holds {engine.max_tokens}. Shorten the prompt or ask for fewer tokens."
        )
