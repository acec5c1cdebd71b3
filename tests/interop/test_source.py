"""Raw data in a bucket: the bytes of a run over a local folder, whatever the server does."""

import hashlib
import io
import logging

import cv2
import numpy as np
import pytest
from breaking_proxy import SECRET
from PIL import Image
from prepared import Prepared
from store_servers import KINDS

from datamat import DatasetWriter, Features, IndexRow, SampleError, ShardOptions, Text, load
from datamat import Image as Picture
from datamat.writers.table import TableWriter

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


class Drawn(DatasetWriter):
    """Reads its pictures through a library that opens files by itself."""

    name = "drawn"
    features = Features({"image": Picture()})
    file_fields = ("image",)
    files = ("list",)

    def index(self, source):
        """Return a row for each line of a list."""
        with open(f"{source}/list") as lines:
            return [IndexRow(line.strip().removesuffix(".png"), "train", {"image": line.strip()}) for line in lines]

    def read(self, row):
        """Return the picture."""
        found = cv2.imread(row.fields["image"])
        if found is None:
            raise ValueError("no picture")
        return {"image": found}


def png(number):
    """Return a picture."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def raw(server, proxy, tmp_path):
    """Raw data in a folder and in a bucket, with the options of a proxy before it, and the filesystem itself."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for number in range(24):
        (folder / f"p{number:02d}.png").write_bytes(png(number))
    (folder / "list").write_text("".join(f"p{number:02d}.png\n" for number in range(24)))
    files = server.files()
    bucket = f"b{hashlib.md5(str(tmp_path).encode()).hexdigest()}"
    files.mkdir(bucket)
    files.put(f"{folder}/", f"{bucket}/raw/", recursive=True)
    return folder, f"{server.kind}://{bucket}/raw", server.options(proxy.server_port), files


def made(source, output, **more):
    """Run a job; return the digests of its shards."""
    Prepared(Drawn, source, output, shards=ShardOptions(num_shards=3), **more).run(progress=False)
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in output.glob("*.tfrecord")}


def test_bucket_gives_the_bytes_of_a_folder(raw, proxy, tmp_path, caplog):
    """Each third request fails in one of six ways, and nothing shows it; no file and no message holds the key."""
    folder, url, options, _ = raw
    expected = made(folder, tmp_path / "local")
    faults = (500, 503, "cut", "lose", "hang", "slow")
    proxy.meet = lambda number, handler: None if number % 3 else faults[number // 3 % len(faults)]
    options = {**options, "config_kwargs": {"read_timeout": 1}}

    with caplog.at_level(logging.DEBUG):
        found = made(url, tmp_path / "out", source_options=options, scratch=tmp_path / "scratch")

    assert found == expected
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_object_with_another_etag_is_read_again(raw, tmp_path):
    """Or generation, or MD5: one shard of three is made again, and holds what is there now."""
    folder, url, options, files = raw
    more = {"source_options": options, "scratch": tmp_path / "scratch"}
    before = made(url, tmp_path / "out", **more)
    for place in (folder / "p03.png", f"{url}/p03.png"):
        (files.pipe_file if isinstance(place, str) else type(place).write_bytes)(place, png(99))

    after = made(url, tmp_path / "out", **more)

    assert after == made(folder, tmp_path / "local")
    assert sum(before[name] != after[name] for name in before) == 1


def test_object_that_vanishes_fails_its_row(raw, proxy, tmp_path):
    """Its error names the object, and the policy for bad samples decides."""
    _, url, options, files = raw
    job = Prepared(Drawn, url, tmp_path / "out", source_options=options, scratch=tmp_path / "scratch")

    def meet(number, handler):
        if "p05" in handler.path and handler.command == "GET":
            files.rm_file(f"{url}/p05.png")
            proxy.meet = lambda number, handler: None

    proxy.meet = meet
    with pytest.raises(SampleError, match=r"p05.*raw/p05\.png has gone since it was listed"):
        job.run(progress=False)


def test_table_of_urls_of_a_bucket_and_of_its_web_address(raw, proxy, tmp_path):
    """A row may name an object by `s3://` or by a signed address; options are by scheme; a changed ETag is seen."""
    _, url, options, files = raw
    signed = files.sign(f"{url}/p01.png")
    table = tmp_path / "table.csv"
    table.write_text(f"url,text\n{url}/p00.png,bucket\n{signed},web\n{url}/none.png,none\n")
    writer = TableWriter(features={"image": Picture(), "text": Text()}, files={"image": "url"})

    def run():
        more = {"shards": ShardOptions(num_shards=1, identity="content"), "errors": "skip"}
        report = Prepared(writer, table, tmp_path / "out", source_options={"s3": options}, **more).run(progress=False)
        return report, {str(sample["text"]): bytes(sample["image"]) for sample in load(tmp_path / "out", "train")}

    (_, first), (second, _) = run(), run()
    files.pipe_file(f"{url}/p01.png", png(99))
    _, third = run()

    assert sorted(first) == ["bucket", "web"]
    assert second.num_shards_written == 0
    assert first["bucket"] == third["bucket"]
    assert first["web"] != third["web"]
    assert "Signature" not in (tmp_path / "out/.datamat/ledger.jsonl").read_text()
