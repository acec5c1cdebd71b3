"""What every store that runs write to has to do, as a test class: each store inherits it, and gives `store`."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os

import pytest
from datamat.directory.stores import ObjectStore

from datamat import OutputError


class StoreCases:
    """The fixture `store` is a folder of the store; `secret` is what no text may hold."""

    secret = "none"

    @pytest.mark.parametrize("size", [0, 5, (8 << 20) + 1])
    def test_file_becomes_an_object(self, store, tmp_path, size):
        """It is whole, has our checksum where the store keeps one, and is not sent twice."""
        path = tmp_path / "file"
        path.write_bytes(os.urandom(size))

        made = store.upload(path, "deep/file", "abc")
        again = store.upload(path, "deep/file", "abc")

        assert (made.num_bytes, made.checksum) in {(size, "abc"), (size, "")}
        assert again.num_bytes == size and (again == made or not made.checksum)
        assert store.head("deep/file") == again
        assert hashlib.md5(store.get("deep/file")).digest() == hashlib.md5(path.read_bytes()).digest()
        assert not store.listed(".datamat")

    def test_other_bytes_replace_an_object(self, store, tmp_path):
        """The condition is that it is still the object that was looked at."""
        path = tmp_path / "file"
        for content in (b"one", b"three", bytes(9 << 20)):
            path.write_bytes(content)
            store.upload(path, "file", hashlib.md5(content).hexdigest())

            assert store.get("file") == content
        assert not store.listed(".datamat")

    def test_name_is_granted_to_one(self, store):
        """Whoever asks at once."""
        if not store.keeps_conditions:
            pytest.skip("tasks share nothing there")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            granted = list(pool.map(lambda number: store.create("lease", f"{number}".encode()), range(8)))

        store.check_conditions("conditions")

        assert sum(granted) == 1

    def test_listing_tells_names_and_ages(self, store):
        """By the clock of the store; and an object that is written again has another identity."""
        if not store.keeps_conditions:
            pytest.skip("tasks share nothing there")
        store.put("folder/one", b"1")
        store.put("folder/deep/two", b"2")
        store.put("folders", b"3")
        before = store.listed("folder")

        store.put("folder/one", b"4")

        assert [*before] == ["deep/two", "one"]
        assert store.listed("folder")["deep/two"] == before["deep/two"]
        assert store.listed("folder")["one"] == store.head("folder/one").identity != before["one"]
        assert {*store.ages("folder")} == {*before}
        assert all(-1 <= age <= 60 for age in store.ages("folder").values())
        assert store.listed("nothing") == {}

    def test_copy_and_delete(self, store, tmp_path):
        """Both happen in the store; the copy has the checksum; what is missing is None, and deleted without harm."""
        (tmp_path / "one").write_bytes(b"content")
        made = store.upload(tmp_path / "one", "one", "abc")

        store.copy("one", "two")
        store.delete_known("one", made.identity)
        store.delete(["one", "nothing"])

        assert (store.head("one"), store.get("one"), store.get("two")) == (None, None, b"content")
        assert store.head("two").checksum == made.checksum

    def test_missing_bucket_is_refused_at_once(self, store):
        """The error says place and remedy, and no secret."""
        if not store.keeps_conditions:
            pytest.skip("there are no buckets")
        url = f"{store.url.partition('://')[0]}://nowhere/out"

        with pytest.raises(OutputError, match=rf"{url}/x cannot be written: .* make the bucket") as caught:
            ObjectStore(url, store.options).put("x", b"")

        assert self.secret not in str(caught.value)
