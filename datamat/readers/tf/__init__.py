"""Reads shards as a `tf.data.Dataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat import _lazy

if TYPE_CHECKING or not _lazy(__name__):
    from datamat.readers.options import TfOptions as TfOptions
    from datamat.readers.tf.fields import TfField as TfField
    from datamat.readers.tf.fields import in_python as in_python
    from datamat.readers.tf.fields import tf_field as tf_field
    from datamat.readers.tf.service import serving as serving
