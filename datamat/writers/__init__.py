"""Reads raw data: the writers that datamat knows by name, each a short module to copy from, and how to write one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat import _lazy

if TYPE_CHECKING or not _lazy(__name__):
    from datamat.sources.rows import IndexRow as IndexRow
    from datamat.sources.rows import RowBlock as RowBlock
    from datamat.writers.base import DatasetWriter as DatasetWriter
    from datamat.writers.base import DataSource as DataSource
    from datamat.writers.camvid import CamVidWriter as CamVidWriter
    from datamat.writers.cityscapes import CityscapesWriter as CityscapesWriter
    from datamat.writers.coco import CocoWriter as CocoWriter
    from datamat.writers.dataset import ImportWriter as ImportWriter
    from datamat.writers.image_folder import ImageFolderWriter as ImageFolderWriter
    from datamat.writers.index import Index as Index
    from datamat.writers.labelme import LabelmeWriter as LabelmeWriter
    from datamat.writers.pedestrian import PedestrianWriter as PedestrianWriter
    from datamat.writers.table import TableWriter as TableWriter
    from datamat.writers.voc import VocWriter as VocWriter
    from datamat.writers.yolo import YoloWriter as YoloWriter
