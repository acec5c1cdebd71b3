"""`tf.train.Checkpoint` of an iterator of `to_tf`: after SIGKILL, another process gets exactly the batches left."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

import numbered_rows
import pytest

from datamat import OptionError, load
from datamat.readers.tf.pipeline import _Draws, _Seeds

tf = pytest.importorskip("tensorflow")
from tf_reader import WAYS, digest, digests  # noqa: E402 -- imports TensorFlow

pytestmark = pytest.mark.timeout(180)  # two processes import TensorFlow: half a minute beside other work
READER = pathlib.Path(__file__).with_name("tf_reader.py")


def run_reader(mode, folders, checkpoints):
    """Run the reader in a process of its own."""
    command = [sys.executable, str(READER), mode, str(folders["pairs"]), str(folders["rows"]), str(checkpoints)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def wrong_after_a_kill(make_pairs_output, tmp_path, format_name):
    """Return the ways to read that go on otherwise in another process, of all that there are."""
    folders = {"pairs": make_pairs_output(tmp_path / "pairs", format=format_name), "rows": tmp_path / "rows"}
    numbered_rows.written(folders["rows"], 0, 100, 3, format_name)
    wanted = {name: found[WAYS[name][2] :] for name, found in digests(folders).items()}

    killed = run_reader("save", folders, tmp_path / "checkpoints")
    resumed = run_reader("rest", folders, tmp_path / "checkpoints")

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert resumed.returncode == 0, resumed.stderr
    left = json.loads((tmp_path / "checkpoints/left.json").read_text())
    assert all(wanted.values())
    return {name for name, found in left.items() if found != wanted[name]}


@pytest.mark.parametrize("format_name", ["tfrecord", "tfrecord.gz"])
def test_killed_in_mid_epoch_another_process_gets_the_batches_left(make_pairs_output, tmp_path, format_name):
    """Bit for bit and in order: shuffled or not, cached, in later epochs, of pictures, ragged rows and single samples.

    This process has a seed of its own, which must not matter.
    """
    tf.random.set_seed(11)
    assert wrong_after_a_kill(make_pairs_output, tmp_path, format_name) == set()


@pytest.mark.parametrize("ended", [False, True], ids=["last batch", "ended"])
@pytest.mark.parametrize("num_read", [13, 15])
def test_epochs_after_the_restored_one_have_their_own_orders(pairs, tmp_path, num_read, ended):
    """Also where the iterator had ended, or its shuffles had, whose last batches waited to be taken."""
    options = {"batch_size": 4, "shuffle": True, "seed": 1}
    epochs = load(pairs, "train").to_tf(**options)
    wanted = [[digest(batch) for batch in epochs] for _ in range(4)]
    data = load(pairs, "train").to_tf(**options)
    assert [digest(batch) for batch in data] == wanted[0]
    iterator = iter(data)
    for _ in range(num_read):
        next(iterator)
    if ended:
        list(iterator)
    saved = tf.train.Checkpoint(it=iterator).write(str(tmp_path / "checkpoint"))

    again = load(pairs, "train").to_tf(**options)
    iterator = iter(again)
    tf.train.Checkpoint(it=iterator).read(saved).assert_consumed()

    assert [digest(batch) for batch in iterator] == ([] if ended else wanted[1][num_read:])
    assert [[digest(batch) for batch in again] for _ in range(2)] == wanted[2:]


@pytest.mark.parametrize(("options", "reason"), [({"snapshot": "snapshot"}, "drop snapshot")], ids=["snapshot"])
def test_pipelines_that_cannot_be_saved_say_why(pairs, tmp_path, monkeypatch, options, reason):
    """With the remedy; the iterator continues, and TensorFlow refuses those of steps that follow."""
    monkeypatch.chdir(tmp_path)
    data = load(pairs, "train").to_tf(4, **options)
    number = len(list(data))
    iterator, later = iter(data), iter(data.repeat(2))
    next(iterator)

    with pytest.raises(OptionError, match=f"{reason}.*state_dict"):
        tf.train.Checkpoint(it=iterator).write(str(tmp_path / "checkpoint"))
    with pytest.raises(tf.errors.FailedPreconditionError, match="stateful"):
        tf.train.Checkpoint(it=later).write(str(tmp_path / "checkpoint"))

    assert len(list(iterator)) == number - 1


@pytest.mark.parametrize("where", ["memory", "file"])
def test_cache_is_in_the_checkpoint_only_where_it_is_memory(pairs, tmp_path, where):
    """TensorFlow saves the position in a cache with its content; that of a file lies on disk already."""
    sizes = []
    for cache in (False, True if where == "memory" else str(tmp_path / "cache")):
        data, again = (load(pairs, "train").to_tf(4, cache=cache) for _ in range(2))
        wanted = [[digest(batch) for batch in data] for _ in range(3)][2]
        iterator = iter(load(pairs, "train").to_tf(4, cache=cache).repeat(3))
        for _ in range(2 * len(wanted) + 3):
            next(iterator)
        saved = tf.train.Checkpoint(it=iterator).write(str(tmp_path / f"checkpoint-{len(sizes)}"))
        restored = iter(again.repeat(3))
        tf.train.Checkpoint(it=restored).read(saved).assert_consumed()
        assert [digest(batch) for batch in restored] == wanted[3:]
        sizes.append(sum(file.stat().st_size for file in tmp_path.glob(f"checkpoint-{len(sizes)}.data*")))

    assert (sizes[1] > 2 * sizes[0]) == (where == "memory")


def test_numbers_of_epochs_need_no_tuner():
    """The end of an iterator waits for TensorFlow's tuner, up to a minute: programs that have such a one ended late."""
    draws = _Draws(tf, 1)
    draws.number(int(next(iter(_Seeds(tf, 1)._drawn()))))

    assert draws._next._dataset.options().autotune.enabled is False
