"""What other readers find in a finished directory: small files beside the shards, in the form that each of them wants.

    tfds          features.json, dataset_info.json, FIELD.labels.txt     TensorFlow Datasets: TFRecord, ArrayRecord
    huggingface   README.md                                              Hugging Face `datasets`: Parquet, tar
    wids          NAME-SPLIT.json                                        wids: tar
    dali          SHARD.tar.idx                                          NVIDIA DALI: tar
    litdata       index.json                                             litdata: Parquet
    croissant     croissant.json                                         mlcroissant, search engines

Each module turns a manifest into the content of its files, and imports no client. `exporting` puts them on the disk.
datamat itself reads none of them.
"""

from __future__ import annotations

from datamat.interop.exporting import (
    ExportReport,
    export,
    sidecar_names,
    sidecar_problems,
    withdraw_sidecars,
    write_sidecars,
)

__all__ = ["ExportReport", "export", "sidecar_names", "sidecar_problems", "withdraw_sidecars", "write_sidecars"]
