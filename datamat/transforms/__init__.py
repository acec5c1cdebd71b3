"""How the copies of a sample are drawn: the writer's `augment`, then the transform of the run.

    sample ── augment(sample, rng) ──> samples ── transform ──> samples        seeded by (seed, key, copy) alone

A transform is a callable `(sample, rng) -> sample | iterable of samples`, or an albumentations pipeline. A pipeline
is recognised by its methods (albumentations is never imported here) and gets images, masks and boxes under the
names it knows. Every source of chance that code may draw from is set anew for each copy: the `rng` that is handed
over, the generators of the pipeline, and the global ones of `random` and `numpy.random`.

    augmenter   `Augmenter`: which stages there are, and how samples go through them    <- start reading here
    pipeline    the stage that is an albumentations pipeline: fields by keyword, boxes in its formats
    stages      what a stage is; the one that is a callable
"""

from __future__ import annotations

from datamat.transforms.augmenter import Augmenter
from datamat.transforms.pipeline import forbid_update_check

__all__ = ["Augmenter", "forbid_update_check"]
