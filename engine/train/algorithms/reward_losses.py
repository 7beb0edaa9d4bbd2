"""What a reward model is trained on: the loss of its scores, and the gradient by each of them.

Scores of rows that are compared may lie in different microbatches and on different ranks, so the
gradient by each score is computed from all of them first, and the model's follows row by row.

Shape letters: M scored rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreLoss:
    """A loss over scored rows."""

    loss: float
    gradient: Float64
    """[M]: d loss / d score."""
    accuracy: float
    """Share of pairs of a set whose better row has the higher score, equal scores half; NaN without
    pairs."""
    num_pairs: int


def bradley_terry(scores: Float64, targets: Float64, sets: Sequence[int]) -> ScoreLoss:
    """The mean over sets of the mean over their pairs of -log sigmoid(better - worse).

    Bradley and Terry 1952; Ouyang et al., InstructGPT, arXiv:2203.02155, equation 1, where all
    comparisons of a prompt weigh 1 / (K choose 2). Differs in that pairs of equal targets are left
    out of a set, and sets without any pair of the mean.

    Args:
        scores: [M] of the model.
        targets: [M]: the row with the higher one is better.
        sets: [M]: rows are compared within a set.
    """
    labels = np.asarray(sets)
    gradient = np.zeros(len(scores))
    losses: list[float] = []
    num_right, num_pairs = 0.0, 0
    for label in dict.fromkeys(labels.tolist()):
        rows = np.flatnonzero(labels == label)
        better, worse = np.nonzero(targets[rows][:, None] > targets[rows][None, :])
        if not len(better):
            continue
        gaps = scores[rows][better] - scores[rows][worse]
        # log(1 + exp(-gap)) without overflow.
        losses.append(float(np.logaddexp(0.0, -gaps).mean()))
        pull = -np.exp(-np.logaddexp(0.0, gaps)) / len(gaps)
        np.add.at(gradient, rows[better], pull)
        np.add.at(gradient, rows[worse], -pull)
        num_right += float((gaps > 0).sum() + 0.5 * (gaps == 0).sum())
        num_pairs += len(gaps)
    return ScoreLoss(
        loss=float(np.mean(losses)) if losses else 0.0,
        gradient=gradient / max(1, len(losses)),
        accuracy=num_right / num_pairs if num_pairs else float("nan"),
        num_pairs=num_pairs,
    )


def regression(scores: Float64, targets: Float64, sets: Sequence[int]) -> ScoreLoss:
    """The mean over rows of half the squared difference of score and target; accuracy and pairs as
    for `bradley_terry`."""
    pairs = bradley_terry(scores, targets, sets)
    errors = scores - targets
    return ScoreLoss(
        loss=float(0.5 * np.square(errors).mean()) if len(errors) else 0.0,
        gradient=errors / max(1, len(errors)),
        accuracy=pairs.accuracy,
        num_pairs=pairs.num_pairs,
    )


SCORE_LOSSES = {"bradley_terry": bradley_terry, "regression": regression}
