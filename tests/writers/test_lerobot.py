"""Datasets of LeRobot: an episode is a record, with the videos of its cameras, cut out of those of several episodes."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from foreign_files import lerobot_kind, write_lerobot
from pyarrow import parquet

from datamat import (
    CorruptDataError,
    Image,
    Json,
    ListOf,
    Materializer,
    SampleError,
    Scalar,
    SourceError,
    Tensor,
    Text,
    Video,
    load,
)
from datamat.codecs import encode_png
from datamat.testing import InlineExecutor
from datamat.writers import ImportWriter

LENGTHS = [4, 1, 6, 3, 5]
CAMERA = "observation.images.top"
HEIGHT, WIDTH = 32, 48


def picture(number, time):
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([rows * 3 + time * 9, columns * 2 + number * 30, rows + columns], axis=-1).astype(np.uint8)


def frame(number, time):
    return {
        "observation.state": [number + time / 2, -time, 0.5],
        "action": [time, number],
        "matrix": [[time, 1, 2], [3, 4, number]],
        "next.reward": time / 4,
        "next.done": time == LENGTHS[number] - 1,
        "note": f"größer {number}-{time}",
        "still": {"bytes": encode_png(picture(number, time)), "path": None},
        CAMERA: picture(number, time),
        "task": "pick" if time < 2 else f"place {number}",
    }


FIELDS = {
    "observation.state": lerobot_kind("float32", 3, names=["x", "y", "z"]),
    "action": lerobot_kind("float32", 2),
    "matrix": lerobot_kind("float32", 2, 3),
    "next.reward": lerobot_kind("float32"),
    "next.done": lerobot_kind("bool"),
    "note": lerobot_kind("string"),
}
CAMERAS = {CAMERA: lerobot_kind("video", HEIGHT, WIDTH, 3, names=["height", "width", "channels"])}
TYPES = {"observation.state": pa.list_(pa.float32(), 3), "next.reward": pa.float32()}
EPISODES = [[frame(number, time) for time in range(count)] for number, count in enumerate(LENGTHS)]


def encoded(episodes, *, each_begins=True):
    """An MP4 of several episodes; each begins with a key frame, as LeRobot joins them, or only the first."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10, options={"g": "60", "sc_threshold": "1000000000"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.codec_context.thread_count = 1
        for pictures in episodes:
            for time, pixels in enumerate(pictures):
                shown = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                shown.pict_type = 1 if each_begins and not time else 0
                container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return file.getvalue()


def ran(source, output, writer="lerobot", **options):
    Materializer(writer, source, output, **options).run(executor=InlineExecutor(), progress=False)
    return load(output)


def by_number(dataset):
    return {int(sample["episode_index"]): sample for sample in dataset}


def plainly_decoded(data):
    import av

    with av.open(io.BytesIO(data)) as container:
        return np.stack([shown.to_ndarray(format="rgb24") for shown in container.decode(video=0)])


def packets_of(data):
    import av

    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].start_time == 0
        return {bytes(packet) for packet in container.demux(video=0) if packet.size}


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_episode_is_a_record(version, tmp_path):
    """Every field of every frame, in the types that LeRobot gives; two tasks in an episode."""
    source = write_lerobot(tmp_path / "pusht", FIELDS, EPISODES, version=version, types=TYPES)

    data = ran(source, tmp_path / "out", None)

    assert sorted(data.keys()) == [f"episode-{number:06d}" for number in range(5)]
    assert {name: data.features[name] for name in data.features if name != "key"} == {
        "observation.state": Tensor((None, 3), "float32"),
        "action": Tensor((None, 2), "float32"),
        "matrix": Tensor((None, 2, 3), "float32"),
        "next.reward": Tensor((None,), "float32"),
        "next.done": Tensor((None,), "bool"),
        "note": ListOf(Text()),
        "timestamp": Tensor((None,), "float32"),
        **dict.fromkeys(["frame_index", "index", "task_index"], Tensor((None,), "int64")),
        "episode_index": Scalar("int64"),
        "task": ListOf(Text()),
    }
    for number, sample in by_number(data).items():
        for name in ("observation.state", "action", "matrix", "next.reward", "next.done"):
            assert np.array_equal(sample[name], np.array([one[name] for one in EPISODES[number]], sample[name].dtype))
        for name in ("note", "task"):
            assert sample[name] == [one[name] for one in EPISODES[number]]
        assert np.allclose(sample["timestamp"], np.arange(LENGTHS[number]) / 10)
        assert sample["index"].tolist() == [sum(LENGTHS[:number]) + time for time in range(LENGTHS[number])]


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_video_of_an_episode_has_its_frames(version, tmp_path):
    """The packets of the file that holds several, as they are."""
    source = write_lerobot(tmp_path / "pusht", CAMERAS, EPISODES, version=version, encode=encoded)
    videos = sorted(source.glob("videos/**/*.mp4"))
    every = np.concatenate([plainly_decoded(path.read_bytes()) for path in videos])
    packets = {packet for path in videos for packet in packets_of(path.read_bytes())}

    data = ran(source, tmp_path / "out")

    assert data.features[CAMERA] == Video((HEIGHT, WIDTH), fps=10, decoded=False)
    assert len(videos) == (3 if version == "v3.0" else 5)
    for number, sample in by_number(data).items():
        start, count = sum(LENGTHS[:number]), LENGTHS[number]
        assert np.array_equal(Video().frames(sample[CAMERA]), every[start : start + count])
        assert np.array_equal(Video().frames(sample[CAMERA], [count - 1]), every[start + count - 1 : start + count])
        assert packets_of(sample[CAMERA]) <= packets


def test_video_that_begins_between_key_frames_is_decoded(tmp_path):
    """And stored without loss, where packets could not be shown alone."""
    source = write_lerobot(
        tmp_path / "pusht", CAMERAS, EPISODES, encode=lambda episodes: encoded(episodes, each_begins=False)
    )
    every = np.concatenate([plainly_decoded(path.read_bytes()) for path in sorted(source.glob("videos/**/*.mp4"))])

    found = by_number(ran(source, tmp_path / "out"))

    for number, sample in found.items():
        start = sum(LENGTHS[:number])
        assert np.array_equal(Video().frames(sample[CAMERA]), every[start : start + LENGTHS[number]])


def test_pictures_of_frames_keep_their_bytes(tmp_path):
    """As LeRobot stores them without videos, with its note for Hugging Face in each table."""
    source = write_lerobot(tmp_path / "pusht", {"still": lerobot_kind("image", HEIGHT, WIDTH, 3)}, EPISODES)
    noted = {"info": {"features": {"still": {"_type": "Image"}}}}
    for path in source.glob("data/*/*.parquet"):
        table = parquet.read_table(path)
        parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(noted)}), path)

    data = ran(source, tmp_path / "out")

    assert data.features["still"] == ListOf(Image())
    for number, sample in by_number(data).items():
        assert np.array_equal(sample["still"], [picture(number, time) for time in range(LENGTHS[number])])


def test_splits_are_those_of_the_dataset(tmp_path):
    source = write_lerobot(tmp_path / "a", FIELDS, EPISODES, types=TYPES, splits={"train": "0:3", "test": "3:5"})

    ran(source, tmp_path / "out")

    assert sorted(load(tmp_path / "out", "train").keys()) == [f"episode-{number:06d}" for number in range(3)]
    assert sorted(load(tmp_path / "out", "test").keys()) == ["episode-000003", "episode-000004"]


@pytest.mark.parametrize(
    ("splits", "message"),
    {
        "gap": ({"train": "0:4"}, "episode 4 is in no split"),
        "twice": ({"train": "0:5", "val": "3:5"}, "episode 3 is in the splits 'train' and 'val'"),
        "words": ({"train": "80%"}, "is damaged"),
    }.values(),
)
def test_splits_that_leave_something_open_are_refused(tmp_path, splits, message):
    source = write_lerobot(tmp_path / "a", FIELDS, EPISODES, types=TYPES, splits=splits)

    with pytest.raises(SourceError, match=message):
        Materializer("lerobot", source, tmp_path / "out")


def test_cameras_that_are_left_out_need_no_videos(tmp_path):
    """They are most of a download."""
    source = write_lerobot(tmp_path / "a", {**FIELDS, **CAMERAS}, EPISODES, types=TYPES, encode=encoded)
    for path in source.glob("videos/**/*.mp4"):
        path.unlink()

    with pytest.raises(SourceError, match=r"file-000\.mp4 does not exist; copy or download the dataset again"):
        Materializer("lerobot", source, tmp_path / "out")
    assert CAMERA not in ran(source, tmp_path / "out", ImportWriter(drop=[CAMERA])).features


def changed(source, **fields):
    path = source / "meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def without_an_episode(source):
    path = source / "meta/episodes/chunk-000/file-000.parquet"
    table = parquet.read_table(path)
    parquet.write_table(table.filter(pc.not_equal(table["episode_index"], 3)), path)


BROKEN = {
    "version": (lambda source: changed(source, codebase_version="v1.6"), "codebase_version is v1.6; want v3.0 or v2.1"),
    "no version": (lambda source: changed(source, codebase_version=None), "is None; .*Materializer\\('parquet'"),
    "outside": (lambda source: changed(source, data_path="../{chunk_index}"), "want a relative path below"),
    "no tasks": (lambda source: (source / "meta/tasks.parquet").unlink(), r"tasks\.parquet does not exist"),
    "no table": (lambda source: next(source.glob("data/*/*")).unlink(), r"file-00\d\.parquet does not exist"),
    "no episodes": (
        lambda source: next(source.glob("meta/episodes/*/*")).unlink(),
        r"lists no episodes; .*finalize\(\)",
    ),
    "fewer episodes": (without_an_episode, "its tables hold 19 frames, and its episodes have 16"),
    "unknown type": (lambda source: changed(source, features={"action": lerobot_kind("words")}), "is words of LeRobot"),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN)
def test_what_is_incomplete_or_of_another_version_is_refused(tmp_path, broken, message):
    source = write_lerobot(tmp_path / "a", FIELDS, EPISODES, types=TYPES)
    broken(source)

    with pytest.raises(SourceError, match=message):
        Materializer("lerobot", source, tmp_path / "out")


def test_frames_of_another_episode_are_refused(tmp_path):
    """As where files of two downloads lie in one folder."""
    source = write_lerobot(tmp_path / "a", FIELDS, EPISODES, types=TYPES)
    other = write_lerobot(tmp_path / "b", FIELDS, EPISODES[::-1], types=TYPES)
    for path in source.glob("data/*/*.parquet"):
        path.write_bytes((other / path.relative_to(source)).read_bytes())

    with pytest.raises(
        (SampleError, CorruptDataError), match=r"frames 5 to 11 are those of the episodes \[1, 2\], where 2 should"
    ):
        ran(source, tmp_path / "out")


def test_video_of_too_few_frames_is_named(tmp_path):
    source = write_lerobot(
        tmp_path / "a",
        CAMERAS,
        EPISODES,
        encode=lambda episodes: encoded([episodes[0], *[e[:-1] for e in episodes[1:]]]),
    )

    with pytest.raises(SampleError, match=r"file-001\.mp4 has 2 whole frames from 0\.6 s on, where 3 should be"):
        ran(source, tmp_path / "out")


def test_notes_of_frames_are_json(tmp_path):
    """As LeRobot stores what is said in an episode, in a dtype of its own."""
    episodes = [[{"said": [{"role": "user", "time": number / 2}], "task": "t"}] * 2 for number in range(3)]
    source = write_lerobot(tmp_path / "a", {"said": lerobot_kind("language")}, episodes)

    data = ran(source, tmp_path / "out")

    assert data.features["said"] == Json()
    assert by_number(data)[2]["said"] == [[{"role": "user", "time": 1.0}]] * 2
