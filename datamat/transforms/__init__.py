"""How samples are transformed: by the writer's `augment`, then by the transform of the run or of the reader.

    sample ── augment(sample, rng) ──> samples ── transform ──> samples        seeded by (seed, key, copy) alone

A transform is an albumentations pipeline, or a callable of `(sample)` or `(sample, rng)`. One contract holds for
writing, which draws copies, and reading, which draws again in each epoch. A pipeline is recognised by its methods
(albumentations is never imported here) and gets images, masks and boxes under the names it knows. Every generator that
code may draw from is seeded for each copy: `rng`, those of the pipeline, and the global ones of `random` and
`numpy.random`. Transforms of torchvision, kornia and audiomentations, recognised by their module, get such fields as
well; they know global generators only.

    augmenter        `Augmenter` draws copies, `SampleTransform` reads through a transform   <- start reading here
    albumentations   the stages: a callable, and a pipeline with its fields by keyword and its boxes
    adapters         the stages of torchvision, kornia and audiomentations
    seeding          the random streams that copies and rows draw from, and which callables ask for one
"""

from __future__ import annotations

from datamat.transforms.albumentations import forbid_update_check
from datamat.transforms.augmenter import Augmenter

__all__ = ["Augmenter", "forbid_update_check"]

OUTPUT_VERSION = 1
"""Incremented when copies are drawn differently: shards of augmented splits are then rebuilt."""
