"""Logs and metrics of every part: the names of all metrics, where they are written, the log format.

A metric that is not declared in METRICS is refused, so that each has a meaning; what a run's own
verifier, tasks and code give is open, behind a prefix. `metrics.jsonl` is always written, and
everything else reads it.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import structlog

from outloop.buffer import json_lines
from outloop.buffer.foreign_text import printable
from outloop.buffer.room import wait_for_room

_DROP_REASONS = ("stale", "no_signal", "filtered", "failed", "overlong", "malformed")
"""records.DropReason, without loading numpy."""
LEDGER_COLUMNS: dict[str, str] = {
    "trained": "attempts whose update was published",
    "evaluated": "attempts of evaluations that were scored",
    **{f"dropped/{why}": f"attempts of groups that were dropped as {why}" for why in _DROP_REASONS},
    "discarded": "attempts cut off by their group's deadline, or given up; not played again",
    "replaced": "attempts that ended without a result and were played again",
    "open": "attempts in flight, waiting to be resumed, or scored in a group that is not settled",
}
"""Every column of the ledger of attempts, with its meaning."""
LEDGER_METRICS: dict[str, str] = {
    "buffer/ledger/started": "attempts started since the run began, evaluations included; the sum "
    "of all other buffer/ledger/",
    **{f"buffer/ledger/{name}": text for name, text in LEDGER_COLUMNS.items()},
    "buffer/length/trained_s": "mean duration of training attempts that the trainer saw in time",
    "buffer/length/ended_s": "mean duration of all training attempts that ended",
    "buffer/length/trained_tokens": "mean number of tokens sampled in those that it saw in time",
    "buffer/length/slow_share_ratio": "share of slow ones (the slowest tenth or so, by duration) "
    "among the attempts that the trainer saw in time, over that among all that ended; 1: none lost",
    "buffer/length/slow_lost_share": "share of the slow attempts that ended, but did not reach the "
    "trainer in time",
    "buffer/length/slow_lost_z": "by how many standard errors that exceeds the share of the others",
    "buffer/discarded_time_share": "share of the time of training attempts that ended which the "
    "trainer did not see",
    "buffer/length/ended_tokens": "mean number of tokens sampled in all that ended",
}
GAP_AGES: tuple[tuple[str, int, float, str], ...] = (
    ("age_0", 0, 0, "of the current version, as train/logprob_gap_mean"),
    ("age_1", 1, 1, "one version old: from here on the policy's own movement is in it"),
    ("age_2", 2, 2, "two versions old"),
    ("age_3_4", 3, 4, "three or four versions old"),
    ("age_5_8", 5, 8, "five to eight versions old"),
    ("age_9_up", 9, math.inf, "of nine versions ago or more"),
)
"""Metrics of the logprob gap by age: name, first and last age in versions, meaning."""
_MASKED_FOR = {
    "low": "a ratio below correction_floor",
    "high": "a ratio above correction_cap",
    "veto": "a token of their sequence below correction_veto",
}
DEPTH_CAUSES: dict[str, str] = {
    "raised": "takes at which the controller had more groups started: too few were ready",
    "lowered": "takes at which it had fewer started: groups were left over, or slow ones were what "
    "the trainer waited for",
    "kept": "takes at which it left the depth as it was",
    "limited_by_age": "takes at which too few were ready, and max_staleness allowed no more",
    "limited_by_servers": "takes at which too few were ready, and turns waited for busy servers",
    "limited_by_places": "takes at which too few were ready, and runners had no place for more",
}
"""What the controller of pipeline_depth = "auto" decides."""
ADMISSION_METRICS: dict[str, str] = {
    "buffer/pipeline_depth": "steps ahead of the trainer that groups may start, as it is in force",
    "buffer/live_groups": "groups started and not trained or dropped",
    "buffer/wait/short_s": "seconds that the trainer waited for too few ready groups, all together",
    "buffer/wait/slow_groups_s": "seconds that it waited, with enough groups ready, for slow ones "
    "that would have become too old",
    **{f"buffer/depth/{cause}": text for cause, text in DEPTH_CAUSES.items()},
}

METRICS: dict[str, str] = {
    "train/reward_mean": "mean reward of the taken episodes, before filters",
    "train/reward_std": "standard deviation of the same",
    "train/return_mean": "mean reward of the taken episodes with what their turns, branches and "
    "tokens earned; where any did",
    "train/last_clip_share": "of a take's last update, where it made several: as train/clip_share",
    "train/last_clip_low_share": "of a take's last update: as train/clip_low_share",
    "train/last_clip_high_share": "of a take's last update: as train/clip_high_share",
    "train/last_ratio_p01": "of a take's last update: as train/ratio_p01",
    "train/last_ratio_p99": "of a take's last update: as train/ratio_p99",
    "train/last_ratio_max": "of a take's last update: as train/ratio_max",
    "train/last_grad_norm": "of a take's last update: as train/grad_norm",
    "train/groups_with_signal_share": "share of taken groups whose rewards differ",
    "train/episodes": "episodes taken",
    "train/groups": "groups trained",
    "train/samples": "samples of taken groups trained (one per branch with trained tokens)",
    "train/turns_per_episode": "mean turns of the taken episodes",
    "train/branches_per_episode": "mean branches of the taken episodes",
    "train/truncated_share": "share of taken episodes that any limit ended, a cut answer included",
    "train/length_cut_share": "share of taken episodes with a last answer cut at its limit",
    "train/generated_tokens_mean": "mean tokens that the policy generated in a taken episode",
    "train/generated_tokens_max": "the same, largest",
    "train/length_reward_correlation": "correlation of those tokens with the reward",
    "train/failed_share": "share of taken episodes with outcome failed",
    "train/staleness_mean": "trainer version minus that of the oldest trained token, mean",
    "train/staleness_max": "the same, largest",
    "train/value_mean": "mean of what the critic expected, over its targets, before its update",
    "train/value_target_mean": "mean of what it should have expected",
    "train/value_explained_variance": "1 - variance of targets less values over that of targets; "
    "1: the critic knows all, 0 or less: nothing",
    "train/value_loss": "the critic's loss at its first update of the step",
    "train/critic_grad_norm": "the critic's gradient norm before clipping",
    "train/critic_learning_rate": "of the critic's update",
    "train/advantage_std": "deviation of the critic's advantages before they are normalized",
    "train/loss": "loss of the update",
    "train/grad_norm": "gradient norm before clipping",
    "train/entropy": "mean entropy of the policy at trained tokens, nats",
    "train/ratio_mean": "mean importance ratio policy / behavior at the first update",
    "train/ratio_max": "largest importance ratio at the first update",
    "train/ratio_p01": "1st percentile of the importance ratio at the first update",
    "train/ratio_p99": "99th percentile of the same",
    "train/clip_share": "share of trained tokens whose ratio was clipped",
    "train/clip_low_share": "of trained tokens, those clipped with a ratio below 1",
    "train/clip_high_share": "of trained tokens, those clipped with a ratio above 1",
    "train/proximal_ratio_mean": "mean ratio policy / recomputed proximal at the first update",
    "train/proximal_ratio_max": "largest such ratio; before the first update 1 to rounding",
    "train/correction_ratio_mean": "mean ratio proximal / behavior, by token or by sequence",
    "train/correction_ratio_p01": "1st percentile of the same",
    "train/correction_ratio_p99": "99th percentile of the same",
    "train/correction_ratio_max": "largest such ratio",
    "train/correction_truncated_share": "share of trained tokens whose weight was cut to the cap",
    "train/correction_masked_share": "share of trained tokens that the correction masked",
    "train/correction_vetoed_share": "share of sequences masked whole for one token's ratio",
    "train/correction_effective_share": "effective sample size of the correction's weights over "
    "the number of trained tokens; 0: all are masked",
    **{
        f"train/masked_{why}_share": f"share of trained tokens masked for {text}"
        for why, text in _MASKED_FOR.items()
    },
    **{
        f"train/masked_{why}_share_{name}": f"as train/masked_{why}_share, over tokens {age}"
        for why in _MASKED_FOR
        for name, _, _, age in GAP_AGES
    },
    "train/ratio_p50": "median of the ratio policy / behavior over tokens, at the first update",
    "train/opsm_masked_share": "share of trained tokens that off-policy sequence masking left out",
    "train/kl": "mean behavior - reference logprob over trained tokens (k1)",
    "train/kl_coefficient": "weight of the pull towards the reference in this step",
    "train/entropy_coefficient": "bonus per nat of entropy in this step, with entropy_target",
    "train/kl_penalty_mean": "mean taken off an episode's reward for its distance to the reference",
    "train/teacher_kl": "mean behavior - teacher logprob over trained tokens: the distance to the "
    "teacher",
    "train/teacher_top_mass": "mean probability of the teacher's top_k tokens under the teacher",
    "train/teacher_wait_s": "time in which the teacher's servers scored the take",
    "reward_model/accuracy": "share of the update's pairs that the reward model orders rightly "
    "before it",
    "reward_model/pairs": "pairs of that update",
    "reward_model/held_out_accuracy": "the same over held-out comparisons",
    "reward_model/held_out_loss": "loss over held-out comparisons",
    "reward_model/held_out_pairs": "pairs of these",
    "train/overlong_penalty_mean": "mean taken off an episode's reward for its length",
    "train/logprob_gap_mean": "mean |policy - behavior| logprob over tokens of the current version",
    "train/logprob_gap_max": "largest such gap",
    **{
        f"train/logprob_gap_{name}": f"mean |policy - behavior| logprob over tokens {text}"
        for name, _, _, text in GAP_AGES
    },
    "train/effective_share": "effective sample size of the ratios policy / behavior over the "
    "number of trained tokens, at the first update; 1: all weigh the same",
    **{
        f"train/{measure}_{name}": f"{what}, {text.partition(',')[0].partition(':')[0]}"
        for measure, what in (
            ("tokens_share", "share of the trained tokens that are"),
            ("ratio_p01", "1st percentile of the ratio policy / behavior over tokens"),
            ("ratio_p50", "its median over tokens"),
            ("ratio_p99", "99th percentile of the ratio policy / behavior over tokens"),
            ("masked_opsm_share", "as train/opsm_masked_share, over tokens"),
            ("effective_share", "as train/effective_share, over tokens"),
            ("clip_share", "share clipped by the loss, of tokens"),
            (
                "masked_share",
                "share masked or vetoed by a correction or left out by OPSM, of tokens",
            ),
        )
        for name, _, _, text in GAP_AGES
    },
    "train/tokens": "tokens in the batch, context included",
    "train/trained_tokens": "tokens with loss",
    "train/tokens_per_s": "batch tokens over the time from one step's end to the next",
    "train/tokens_per_s_per_rank": "batch tokens of the updates over the time of scoring and "
    "updates and the number of trainer ranks, which on GPUs is that of GPUs",
    "train/mfu": "operations that the model needs for the updates over what the GPUs could have "
    "made in that time; where their peak is known",
    "train/memory_peak_bytes": "of the rank with most: the most that torch held on its GPU in the "
    "step; on the CPU what was resident at its end",
    "train/padding_share": "padding over all tokens computed",
    "train/replayed_routes_share": "mixtures of experts: share of the trained tokens whose "
    "prediction is computed by the experts that the server took (trainer.routing_replay)",
    "train/imitated_share": "share of the trained tokens that are imitated "
    "(trainer.sources.NAME.loss = sft)",
    "train/imitated_nll": "of these tokens: mean negative logprob",
    "train/support_share": "share of the trained tokens that were sampled among some ids of the "
    "vocabulary (top_p, top_k, min_p, a grammar)",
    "train/support_ids_mean": "of these tokens: mean number of ids",
    "train/imbalance": "estimated cost of the busiest data-parallel rank over the mean, less one",
    "train/learning_rate": "learning rate of the update",
    "train/step_s": "time from one step's end to the next",
    "train/wait_s": "of that, time waited for groups",
    "train/update_s": "of that, time in forward, backward and optimizer",
    "train/evaluation_wait_s": "of that, time that the update waited for an evaluation",
    "train/publish_wait_s": "of that, time waited for publishes, copying the weights included",
    "train/policy_version": "version published after the step",
    "publish/duration_s": "time of the publish transaction",
    "publish/bytes": "weight bytes moved to each server",
    "publish/pause_s": "time that servers were paused",
    "publish/peak_extra_buckets": "the most that staging held at once, in buckets; two at most",
    "publish/wrong_in_a_row": "the most publishes in a row after which publish.verify found wrong "
    "weights on one server",
    "eval/sampled_reward": "mean reward of evaluation episodes at the run's sampling",
    "eval/sampled_se": "its standard error",
    "eval/greedy_reward": "mean reward of evaluation episodes at temperature 0",
    "eval/greedy_se": "its standard error",
    "eval/episodes": "evaluation episodes per sampling",
    "eval/duration_s": "time of the evaluation",
    "eval/oldest_version": "first version that sampled one of its tokens",
    "eval/newest_version": "last version that sampled one of its tokens",
    "eval/num_publishes": "publishes from its version to the newest that sampled one of its tokens",
    "eval/mixed_share": "share of its episodes with tokens of later versions than its own",
    "test/sampled_reward": "of the chosen weights on the test split, at the run's sampling",
    "test/sampled_se": "its standard error",
    "test/greedy_reward": "of the chosen weights on the test split, at temperature 0",
    "test/greedy_se": "its standard error",
    "test/episodes": "test episodes per sampling",
    "test/duration_s": "time of that evaluation",
    "buffer/dropped_groups": "groups dropped since the run began, all reasons",
    "buffer/replaced_attempts": "attempts replaced since the run began",
    **{
        f"buffer/dropped/{why}": f"groups dropped as {why} since the run began"
        for why in _DROP_REASONS
    },
    **LEDGER_METRICS,
    **ADMISSION_METRICS,
}

METRIC_PREFIXES: dict[str, str] = {
    "reward/": "and a component's name: its mean over the taken episodes that have it",
    "refused/": "and a code: model calls of the taken episodes that the router refused",
    "source/": "and the name of one of several lists of tasks: `reward_mean` and `episodes` of the "
    "taken episodes from it, `reward/COMPONENT` their means of a component; with "
    "`trainer.curriculum` the smoothed `pass_rate` and the `weight` that follows from it",
    "eval/": "and `sampled`, `greedy` or the name of a suite: `reward`, `pass_at_K`, "
    "`majority_at_K`, `component/NAME`, `source/NAME/reward`, `change` since the one "
    "before, each with its standard error by task as `_se`; `tasks`, `episodes`, "
    "`generated_tokens_mean`, `turns_mean`, `truncated_share`; see evaluation.md",
    "test/": "and `sampled` or `greedy`: the same of the test split",
    "user/": "and a name of your own: what `outloop.Run.record` was given",
}
"""What the names begin with that a run's own verifier and tasks give."""


class MetricsWriter:
    """Append one JSON object per call to `metrics.jsonl`; non-finite values become null."""

    def __init__(
        self,
        run_dir: Path,
        *,
        max_full_s: float = 0.0,
        on_full: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`max_full_s`: how long a row waits for room; `on_full`: gets a sentence when it does."""
        self._path = run_dir / "metrics.jsonl"
        self._max_full_s, self._on_full = max_full_s, on_full
        self._file = json_lines.open_for_appending(self._path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` for `step`.

        Raises:
            KeyError: a name is not declared in METRICS or METRIC_PREFIXES.
            DiskFull: there was no room in time.
        """
        prefixes = tuple(METRIC_PREFIXES)
        undeclared = [n for n in values if n not in METRICS and not n.startswith(prefixes)]
        if undeclared:
            raise KeyError(f"undeclared metrics {undeclared}; declare them in buffer/telemetry.py")
        row: dict[str, float | int | None] = {"step": step, "time": time.time()}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps(row).encode()
        wait_for_room(
            lambda: json_lines.append_line(self._file, line),
            self._path,
            max_s=self._max_full_s,
            on_full=self._on_full,
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete row of the run's `metrics.jsonl`."""
    return json_lines.read_rows(run_dir / "metrics.jsonl")


class LossyStream:
    """A stream that drops what it cannot write: a part does not end because its log's disk is
    full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream does, if it can."""
        with suppress(OSError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        """As the stream does, if it can."""
        with suppress(OSError):
            self._stream.flush()


def _without_control(logger: Any, method: str, event: Any) -> Any:
    """Make text of agents and policies harmless, which the renderer for terminals passes on."""
    return {
        key: printable(value) if isinstance(value, str) else value for key, value in event.items()
    }


def configure_logging(part: str, level: str) -> None:
    """Send this process's structlog events to stderr: JSON lines, or colours on a terminal. What a
    full disk does not take is dropped."""
    renderer: Any = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _without_control,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyStream(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(part=part)
