"""Made-up clicks whose keys follow Zipf's law and whose labels follow a planted model, so that an AUC means something."""

from __future__ import annotations

import numpy as np

from clicks import Clicks, cross_keys

__all__ = ["make_clicks"]

FEATURES = 8
DENSE = 4


def make_clicks(examples: int, zipf: float, seed: int) -> tuple[Clicks, np.ndarray]:
    """Make `examples` clicks; also return the planted logits, the best that any model could say.

    Each feature draws from ``examples // 8`` keys; the key of rank r has probability proportional to r ** -zipf. Ranks
    are hidden behind a hash, so keys are spread over all of int64. The logit is a bias plus one normal effect a key plus
    a linear function of the dense numbers.
    """
    random = np.random.default_rng(seed)
    ranks = max(examples // 8, 16)
    ceiling = np.cumsum(np.arange(1, ranks + 1, dtype=np.float64) ** -zipf)
    dense = random.standard_normal((examples, DENSE)).astype(np.float32)
    logits = -1.5 + dense @ random.normal(0, 0.3, DENSE)
    keys = np.empty((FEATURES, examples), np.int64)
    for feature in range(FEATURES):
        rank = np.searchsorted(ceiling, random.random(examples) * ceiling[-1]).astype(np.int64)
        logits += random.normal(0, 0.5, ranks)[rank]
        keys[feature] = cross_keys(np.full(examples, feature, np.int64), rank)
    labels = random.random(examples) < 1 / (1 + np.exp(-logits))
    names = [f"feature_{i}" for i in range(FEATURES)]
    return Clicks(names, dense, keys, labels.astype(np.float32)), logits
