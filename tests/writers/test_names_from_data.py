"""Names and URLs that somebody's data holds open nothing outside of its own folder."""

import json
import os

import numpy as np
import pytest
from prepared import Prepared

from datamat import Image, ImportWriter, Materializer, OutputError, SampleError, SourceError
from datamat.codecs import encode_png
from datamat.directory.files import default_scratch
from datamat.testing import InlineExecutor
from datamat.writers.coco import CocoWriter
from datamat.writers.table import TableWriter

OUTSIDE = ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "", "nul\0", 7, None]


def mds(folder, name):
    shard = {"column_names": ["x"], "column_encodings": ["bytes"], "column_sizes": [None], "samples": 1}
    shard |= {"raw_data": {"basename": name}, "zip_data": None, "compression": None, "format": "mds", "version": 2}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return ImportWriter()


def mds_packed(folder, name):
    shard = {"column_names": ["x"], "column_encodings": ["bytes"], "column_sizes": [None], "samples": 1}
    shard |= {"raw_data": {"basename": "shard.0.mds"}, "zip_data": {"basename": name}, "compression": "zstd"}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard | {"format": "mds", "version": 2}]}))
    return ImportWriter()


def litdata(folder, name):
    config = {"compression": None, "data_format": ["bytes"], "data_spec": json.dumps([1, {"type": None}])}
    chunk = {"filename": name, "chunk_size": 1, "chunk_bytes": 9, "dim": None}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))
    return ImportWriter()


def coco(folder, name):
    image = {"id": 1, "file_name": name, "height": 4, "width": 4}
    found = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (folder / "instances_train.json").write_text(json.dumps(found))
    return CocoWriter()


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
@pytest.mark.parametrize("index", [mds, mds_packed, litdata, coco])
def test_index_that_names_a_file_elsewhere_is_refused(tmp_path, index, name):
    """Before it is opened, with the name."""
    if index is mds_packed and name is None:
        pytest.skip("null says that there is none")
    (tmp_path / "secret.bin").write_bytes(b"secret")
    source = tmp_path / "set"
    source.mkdir()
    writer = index(source, name)

    with pytest.raises(SourceError, match=r"names the file|relative path|is none of|COCO format"):
        Materializer(writer, source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    assert not [*tmp_path.glob("out/*.tfrecord")]


def table_job(tmp_path, value, **options):
    (tmp_path / "rows.csv").write_text(f"key,url\na,{value}\n")
    writer = TableWriter(features={"image": Image((4, 4, 3))}, files={"image": "url"})
    output = tmp_path / "out"
    return Prepared(writer, tmp_path / "rows.csv", output, executor=InlineExecutor(), **options)


@pytest.mark.parametrize(
    "chain", ["zip://k::file://{path}", "tar://k::{path}", "reference://k::http://127.0.0.1:9/r.json", "http://h/x::y"]
)
@pytest.mark.parametrize("more", ["file://{path}", "local://{path}", "memory://x", "ftp://h/x", "github://o:r@m/x"])
def test_table_uses_no_scheme_of_this_machine_and_no_chain(tmp_path, chain, more):
    picture = tmp_path / "secret.png"
    for url in (chain, more):
        with pytest.raises(SampleError, match=r"tables of URLs must not use|%3A%3A"):
            table_job(tmp_path, url.format(path=picture)).run(progress=False)


def test_absolute_path_of_a_table_is_read_only_if_the_user_says_so(tmp_path):
    picture = tmp_path / "secret.png"
    picture.write_bytes(encode_png(np.zeros((4, 4, 3), np.uint8)))

    with pytest.raises(SampleError, match=r"absolute path; .*follow_links=True"):
        table_job(tmp_path, picture).run(progress=False)

    assert table_job(tmp_path, picture, follow_links=True).run(progress=False).num_records == 1


def test_default_scratch_is_private(tmp_path, monkeypatch):
    """Made for its user alone, closed where it was open, and refused where it is somebody else's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    folder = default_scratch()
    assert folder.stat().st_mode & 0o777 == 0o700

    folder.chmod(0o777)
    assert default_scratch().stat().st_mode & 0o777 == 0o700

    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(OutputError, match=r"belongs to another user.*scratch="):
        default_scratch()
    monkeypatch.undo()

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is not a folder"):
        default_scratch()
