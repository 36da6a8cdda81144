"""How good a set of predictions is: area under the ROC curve, and log loss."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["auc", "log_loss"]


def auc(labels: npt.NDArray[np.float32], scores: npt.NDArray[np.float32]) -> float:
    """Probability that a positive scores above a negative, a tie counting one half (the Mann-Whitney statistic).

    NaN when one of the classes is missing.
    """
    positive = labels > 0.5
    positives = int(positive.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def log_loss(labels: npt.NDArray[np.float32], logits: npt.NDArray[np.float32]) -> float:
    """Mean of -log p(label), from logits, in float64."""
    signed = np.where(labels > 0.5, -logits.astype(np.float64), logits.astype(np.float64))
    return float(np.logaddexp(0, signed).mean())
