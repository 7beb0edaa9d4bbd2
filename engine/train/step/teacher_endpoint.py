"""A teacher that is served elsewhere: its servers score the rows of a take.

Only rank 0 asks. A take is scored whole or not at all: a step whose scores do not come within their
deadline is refused before any weight was touched.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from outloop.buffer.errors import (
    DeadlineExceeded,
    PublishFailed,
    ServerUnavailable,
    SettingsError,
    UpdateRefused,
)
from outloop.buffer.records import Float32, Int32
from outloop.buffer.settings import Settings
from outloop.buffer.settings.trainer import TeacherSettings
from outloop.engine.publish.server_client import ServerClient
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.step.teacher import Columns, Contexts, behind_contexts, check_tokens

_RETRY_S = 1.0
_POLL_S = 0.5
_START_TIMEOUT_S = 30.0
_UNANSWERED = (DeadlineExceeded, ServerUnavailable)
Scores = tuple[Float32, Int32, Float32]
"""Of one row of P ids: logprobs [P], most probable ids [P, K] and their logprobs [P, K]."""


class TeacherEndpoint:
    """The servers of trainer.teacher.urls; one caller at a time."""

    def __init__(
        self, teacher: TeacherSettings, *, vocab_size: int, stop: threading.Event | None = None
    ) -> None:
        """`vocab_size`: of the policy; `stop`: ends the waits between two attempts."""
        self._teacher = teacher
        self._vocab_size = vocab_size
        self._stop = stop or threading.Event()
        key = _read_key(teacher.api_key_file) if teacher.api_key_file is not None else None
        self._clients: queue.Queue[ServerClient] = queue.Queue()
        for index in range(teacher.max_concurrent_requests):
            url = teacher.urls[index % len(teacher.urls)]
            self._clients.put(ServerClient(f"teacher {url}", url, key=key))
        self._threads = ThreadPoolExecutor(
            teacher.max_concurrent_requests, thread_name_prefix="teacher"
        )

    def close(self) -> None:
        """Close the connections, once the requests under way have ended."""
        self._threads.shutdown(cancel_futures=True)
        while not self._clients.empty():
            self._clients.get().close()

    def check(self, settings: Settings) -> None:
        """Have every server score the policy's highest id before anything is played.

        Raises:
            SettingsError: one does not answer, does not score ids, or has other tokens.
        """
        named = f"trainer.teacher.urls={list(self._teacher.urls)}"
        deadline = time.monotonic() + min(_START_TIMEOUT_S, self._teacher.timeout_s)
        probe = [0, self._vocab_size // 2, self._vocab_size - 1]
        for url in self._teacher.urls:
            client = self._clients.get()
            while client.url != url:
                self._clients.put(client)
                client = self._clients.get()
            try:
                folder = Path(str(client.model_info(deadline).get("tokenizer_path", "")))
                self._ask(client, probe, deadline)
            except _UNANSWERED as error:
                raise SettingsError(
                    f"{named}: {url} does not answer: {_reason(error)}. Start it "
                    "first, or correct the url"
                ) from error
            except (PublishFailed, UpdateRefused) as error:
                raise SettingsError(
                    f"{named}: {url} does not score the policy's ids up to {probe[-1]}: {error}. A "
                    "server of SGLang's /generate with the policy's tokenizer is allowed"
                ) from error
            finally:
                self._clients.put(client)
            if folder.is_dir():
                check_tokens(
                    settings.model.path, folder, f"{named}: tokenizer_path={str(folder)!r}"
                )

    def columns(
        self, batch: TrainBatch, contexts: Contexts, *, on_wait: Callable[[str], None]
    ) -> Columns:
        """What the servers make of the trained tokens of a batch.

        Args:
            on_wait: called at least every second with what is awaited.

        Raises:
            UpdateRefused: the rows were not all scored in time, or not at temperature 1, or the
                answers are of other ids; the sentence names the server.
        """
        if (batch.temperature[batch.loss_mask] != 1.0).any():
            raise UpdateRefused(
                "trainer.teacher.urls score at temperature 1, but tokens of this take were sampled "
                'at another one; set sampling.governance = "enforce" with temperature 1, or give '
                "the teacher's folder in trainer.teacher.path"
            )
        seen, is_own = behind_contexts(batch, contexts)
        prompts = [row.token_ids.tolist() for row in seen]
        scores = self._score_all(prompts, on_wait)
        logprobs, ids, top = (np.concatenate(parts)[is_own] for parts in zip(*scores, strict=True))
        mask = batch.loss_mask
        logprobs[~mask] = 0.0
        if not np.isfinite(logprobs).all():
            raise UpdateRefused(
                "the teacher gave logprobs that are not finite; look at its servers' weights"
            )
        columns: Columns = {"teacher_logprobs": logprobs}
        if self._teacher.top_k:
            columns |= {"teacher_top_ids": ids, "teacher_top_logprobs": top}
        return columns

    def _score_all(
        self, prompts: Sequence[Sequence[int]], on_wait: Callable[[str], None]
    ) -> list[Scores]:
        deadline = time.monotonic() + self._teacher.timeout_s
        found: dict[int, Scores] = {}
        waiting: dict[Future[Scores], int] = {
            self._threads.submit(self._score, prompts[index], deadline): index
            for index in range(len(prompts))
        }
        try:
            while waiting:
                done, _ = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    found[waiting.pop(future)] = future.result()
                on_wait(f"the teacher's scores ({len(found)} of {len(prompts)} rows)")
        except (*_UNANSWERED, PublishFailed) as error:
            raise UpdateRefused(
                f"the teacher did not score the take within trainer.teacher.timeout_s="
                f"{self._teacher.timeout_s:g}: {_reason(error)}. No weight was changed; start "
                "its servers, and the run again: it goes on from its last checkpoint"
            ) from error
        finally:
            for future in waiting:
                future.cancel()
        return [found[index] for index in range(len(prompts))]

    def _score(self, ids: Sequence[int], deadline: float) -> Scores:
        """One row, by whichever connection is free; repeated while the deadline allows it."""
        while True:
            client = self._clients.get()
            try:
                return self._ask(client, ids, deadline)
            except _UNANSWERED:
                if time.monotonic() + _RETRY_S >= deadline or self._stop.wait(_RETRY_S):
                    raise
            finally:
                self._clients.put(client)

    def _ask(self, client: ServerClient, ids: Sequence[int], deadline: float) -> Scores:
        top_k = self._teacher.top_k
        answer = client.generate(
            {
                "input_ids": list(ids),
                "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": top_k,
            },
            deadline,
        )
        try:
            meta = answer["meta_info"]
            entries = meta["input_token_logprobs"]
            tops = meta["input_top_logprobs"] if top_k else [None] * len(ids)
            scored = [int(entry[1]) for entry in entries]
            logprobs = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
            top_ids, top_logprobs = self._read_tops(tops)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UpdateRefused(
                f"{client.server_id} gave no {'top ' if top_k else ''}logprobs of its input "
                f"({error!r}); it needs SGLang's /generate"
            ) from error
        if scored != list(ids) or len(tops) != len(ids):
            raise UpdateRefused(
                f"{client.server_id} scored {len(scored)} ids and gave {len(tops)} distributions "
                f"for {len(ids)} ids that were sent, or other ids than those"
            )
        return np.array(logprobs, np.float32), top_ids, top_logprobs

    def _read_tops(self, tops: Sequence[Any]) -> tuple[Int32, Float32]:
        """Ids and logprobs [P, K]; -inf where the server named fewer.

        Raises:
            UpdateRefused: an id is outside the policy's vocabulary.
        """
        top_k = self._teacher.top_k
        ids = np.zeros((len(tops), top_k), np.int32)
        logprobs = np.full((len(tops), top_k), -np.inf, np.float32)
        for place, entries in enumerate(tops):
            chosen = list(entries or ())[:top_k]
            ids[place, : len(chosen)] = [int(entry[1]) for entry in chosen]
            logprobs[place, : len(chosen)] = [float(entry[0]) for entry in chosen]
        highest = int(ids.max(initial=0))
        if highest >= self._vocab_size:
            raise UpdateRefused(
                f"the teacher named id {highest} as probable; the policy has vocab_size="
                f"{self._vocab_size}: they have other vocabularies. Give a teacher with the "
                "policy's tokenizer"
            )
        return ids, logprobs


def _reason(error: Exception) -> str:
    if isinstance(error, DeadlineExceeded):
        return f"{error.peer} did not answer {error.phase} within {error.after_s:.1f} s"
    return str(error).rstrip(".")


def _read_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise SettingsError(
            f"trainer.teacher.api_key_file={str(path)!r} cannot be read: {error}"
        ) from error
