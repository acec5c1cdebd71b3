"""Links that lead out of the source: layouts of the Hub's cache, DVC and git-annex, and a link whose target changes."""

import os
import shutil

import numpy as np
import pytest
import small_pairs
from prepared import Prepared

from datamat import DatasetWriter, Features, Index, Materializer, ShardOptions, SourceError, Text, verify
from datamat.codecs import encode_png
from datamat.codecs.files import read_file
from datamat.testing import InlineExecutor


class Notes(DatasetWriter):
    """Reads text files."""

    name = "notes"
    features = Features({"text": Text()})

    def index(self, source):
        return Index.from_folder(source, field="file", suffixes=(".txt",))

    def read(self, row):
        return {"text": read_file(row.fields["file"]).decode()}


NAMES = ["cat/1.txt", "cat/2.txt", "dog/1.txt", "dog/2.txt", "dog/3.txt"]


def _content(name):
    return f"text of {name}"


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _layout(folder, root, blobs, *, is_absolute=False, mode=0o644):
    """Make each file a link to a blob, of which `blobs` gives the path by number and content."""
    for number, name in enumerate(NAMES):
        blob = _write(folder / blobs(number, _content(name)), _content(name))
        blob.chmod(mode)
        link = folder / root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob if is_absolute else os.path.relpath(blob, link.parent))
    return folder / root


def _hub(folder):
    """Each file is a relative link to a blob that has the name of its content."""
    place = "datasets--me--notes"
    return _layout(folder, f"{place}/snapshots/{'c0ffee00' * 5}", lambda number, _: f"{place}/blobs/{number:040x}")


def _dvc(folder):
    """Each file is an absolute link into a cache elsewhere."""
    return _layout(
        folder, "repo/data", lambda number, _: f"cache/files/md5/{number:02x}/{number:030x}", is_absolute=True
    )


def _annex(folder):
    """Each file is a relative link to a file that is read-only, below the `.git` of the repository."""

    def blob(number, content):
        key = f"SHA256E-s{len(content)}--{number:064x}.txt"
        return f"repo/.git/annex/objects/Xx/Yy/{key}/{key}"

    return _layout(folder, "repo/data", blob, mode=0o444)


def _folders(folder):
    """A folder of the source is a link; one of the folders below leads back."""
    root = folder / "source"
    for name in NAMES[:2]:
        _write(root / name, _content(name))
    for name in NAMES[2:]:
        _write(folder / "elsewhere" / name, _content(name))
    (folder / "elsewhere" / "dog" / "back").symlink_to(root)
    (root / "dog").symlink_to(folder / "elsewhere" / "dog")
    return root


LAYOUTS = {"hub": _hub, "dvc": _dvc, "annex": _annex, "folders": _folders}


def _job(source, output, **options):
    shards = ShardOptions(records_per_shard=1)
    return Prepared(Notes, source, output, shards=shards, executor=InlineExecutor(), **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_give_the_bytes_of_what_they_lead_to(tmp_path, layout):
    """A copy without links gives the same directory."""
    source = LAYOUTS[layout](tmp_path)
    for name in NAMES:
        _write(tmp_path / "plain" / name, _content(name))

    _job(source, tmp_path / "out", follow_links=True).run(progress=False)
    _job(tmp_path / "plain", tmp_path / "copied").run(progress=False)

    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "copied")
    assert verify(tmp_path / "out").ok
    assert _job(source, tmp_path / "out", follow_links=True).run(progress=False).num_parts_written == 0


def test_writer_that_is_bound_to_its_source_finds_what_links_lead_to(tmp_path):
    """Its classes may all be links, or their folder."""
    for name in ("cat", "dog"):
        (tmp_path / "elsewhere" / "train" / name).mkdir(parents=True)
        content = encode_png(np.zeros((4, 4, 3), np.uint8))
        (tmp_path / "elsewhere" / "train" / name / "1.png").write_bytes(content)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train").symlink_to(tmp_path / "elsewhere" / "train")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path)

    plan = Materializer("image_folder", tmp_path / "source", tmp_path / "out", follow_links=True).plan()

    assert plan.num_rows == 2


@pytest.mark.parametrize("layout", ["hub", "dvc", "annex"])
def test_links_to_files_are_refused_with_the_name_of_the_option(tmp_path, layout):
    """Somebody else may have made them."""
    with pytest.raises(SourceError, match=r"a link leads out of the source, to .*pass follow_links=True"):
        _job(LAYOUTS[layout](tmp_path), tmp_path / "out").run(progress=False)


def test_links_to_folders_are_not_searched_and_named(tmp_path, caplog):
    """They may be as large as the disk."""
    plan = _job(
        _folders(tmp_path),
        tmp_path / "out",
    ).plan()

    assert plan.num_rows == 2
    (message,) = {record.getMessage() for record in caplog.records}
    assert f"{tmp_path / 'source' / 'dog'} is a link out of the source" in message
    assert message.endswith("pass follow_links=True")


@pytest.mark.parametrize("change", ["another target", "its content"])
def test_changed_target_makes_its_shard_again(tmp_path, change):
    """Also where the other file has the size and the time of the first; and a cache that moved is the same."""
    source = _dvc(tmp_path)
    _job(source, tmp_path / "out", follow_links=True).run(progress=False)
    target = (source / NAMES[1]).resolve()
    other = target if change == "its content" else target.with_name("other")
    before = target.stat()
    other.write_text(_content(NAMES[1]).swapcase())
    if change == "another target":
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        (source / NAMES[1]).unlink()
        (source / NAMES[1]).symlink_to(other)

    report = _job(source, tmp_path / "out", follow_links=True).run(progress=False)
    again = _job(source, tmp_path / "out", follow_links=True).run(progress=False)

    assert (report.num_parts_written, again.num_parts_written) == (1, 0)


def test_cache_that_moved_changes_nothing(tmp_path):
    """Its files have the content that they had."""
    source = _dvc(tmp_path)
    _job(source, tmp_path / "out", follow_links=True).run(progress=False)
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    for name in NAMES:
        target = os.readlink(source / name)
        (source / name).unlink()
        (source / name).symlink_to(target.replace(f"{tmp_path}/cache", f"{tmp_path}/moved"))

    assert _job(source, tmp_path / "out", follow_links=True).run(progress=False).num_parts_written == 0


def test_dangling_link_is_a_missing_file(tmp_path):
    """As without the option: a file that the annex has not fetched, for instance."""
    source = _annex(tmp_path)
    os.unlink((source / NAMES[0]).resolve())

    with pytest.raises(SourceError, match=r"cat/1\.txt.*no such file"):
        _job(source, tmp_path / "out", follow_links=True).run(progress=False)


def test_list_file_may_be_a_link(tmp_path):
    """Writers that read one, such as `Index.from_lists`, follow it, too."""

    class Listed(Notes):
        def index(self, source):
            return Index.from_lists(source, {"train": "train.lst"}, fields=("file",))

    source = _hub(tmp_path)
    (_write(tmp_path / "list", "cat/1.txt\ndog/3.txt\n"))
    (source / "train.lst").symlink_to(tmp_path / "list")

    plan = Materializer(Listed, source, tmp_path / "out", follow_links=True).plan()

    assert plan.num_rows == 2
    with pytest.raises(SourceError, match="pass follow_links=True"):
        Materializer(Listed, source, tmp_path / "out").plan()
