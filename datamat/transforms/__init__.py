"""Transforms samples: the writer's `augment` first, then the transform of the run or of the reader.

    sample ── augment(sample, rng) ──> samples ── transform ──> samples        seeded by (seed, key, copy) alone

A transform is an albumentations pipeline, or a callable of `(sample)` or `(sample, rng)`. One contract holds for
writing, which draws copies, and for reading, which draws anew in each epoch. A pipeline is recognised by its methods
(albumentations is never imported here) and gets images, masks and boxes by the keywords it knows. Every generator that
code may draw from is seeded for each copy: `rng`, the pipeline's own, and the global ones of `random` and
`numpy.random`. Transforms of torchvision, kornia and audiomentations, recognised by their module, get such fields too;
they draw from global generators only.

    augmenter        `Augmenter` draws copies, `SampleTransform` transforms samples as they are read   <- start here
    albumentations   the stages for a callable and for an albumentations pipeline
    adapters         the stages for torchvision, kornia and audiomentations
    seeding          the random streams of copies and rows, and which callables ask for one
"""

from __future__ import annotations

from datamat.transforms.albumentations import forbid_update_check
from datamat.transforms.augmenter import Augmenter

__all__ = ["Augmenter", "forbid_update_check"]

OUTPUT_VERSION = 1
"""Incremented when copies are drawn differently: shards of augmented splits are then rebuilt."""
