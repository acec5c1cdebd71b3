"""Videos: files are kept, frames come as FFmpeg decodes them, and what does not decode is refused with its place."""

from __future__ import annotations

import fractions
import functools
import io
import os

import numpy as np
import pytest
from round_trip import materialize

from datamat import Features, InputError, SampleError, Scalar, SchemaError, Video, load
from datamat.formats.webdataset import tar_form
from datamat.readers.tf import tf_field
from datamat.transforms.targets import target_of

av = pytest.importorskip("av")
av.logging.set_level(None)

HEIGHT, WIDTH = 32, 48


def drawn(number, height=HEIGHT, width=WIDTH):
    """A frame of which each differs."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5 + number * 9, columns * 4 + number * 3, rows + columns], axis=-1).astype(np.uint8)


def encoded(frames, kind="mp4", codec="mpeg4", pixels="yuv420p", rate=25, rotation=None, options=None):
    """A file as other programs write it."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        stream.codec_context.thread_count = 1
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def plainly_decoded(data):
    """All frames by a plain loop, uint8 (num_frames, height, width, 3)."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames)


FRAMES = [drawn(number) for number in range(20)]
MPEG4 = encoded(FRAMES)
KINDS = {
    "mp4": ("mp4", "libx264", "yuv420p", "mp4"),
    "mov": ("mov", "mpeg4", "yuv420p", "mov"),
    "webm": ("webm", "libvpx-vp9", "yuv420p", "webm"),
    "webm of VP8": ("webm", "libvpx", "yuv420p", "webm"),
    "mkv": ("matroska", "libx264", "yuv444p", "mkv"),
    "avi": ("avi", "mjpeg", "yuvj420p", "avi"),
    "ts": ("mpegts", "mpeg2video", "yuv420p", "ts"),
    "mpg": ("vob", "mpeg2video", "yuv420p", "mpg"),
    "flv": ("flv", "flv", "yuv420p", "flv"),
    "wmv": ("asf", "wmv2", "yuv420p", "wmv"),
}


@functools.cache
def of_kind(name):
    kind, codec, pixels, _ = KINDS[name]
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg does not encode {codec}")
    return encoded(FRAMES, kind, codec, pixels)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_kept_and_decode_as_ffmpeg_does(kind):
    data, feature = of_kind(kind), Video((HEIGHT, WIDTH))

    stored = feature.encode(data)

    found, wanted = feature.decode(stored), plainly_decoded(data)
    assert stored == data
    assert tar_form(feature).extension(data) == KINDS[kind][3]
    assert (found.dtype, found.shape) == (np.uint8, wanted.shape)
    assert len(found) in {20, 19}  # B-frames at the edges of some formats
    assert np.array_equal(found, wanted)
    assert np.array_equal(feature.prepare(data), wanted)
    assert type(Features.infer({"x": data})["x"]) is Video


CHOICES = {
    "all": (Video(), range(20)),
    "every third": (Video(stride=3), range(0, 20, 3)),
    "evenly spread": (Video(num_frames=4), [0, 6, 12, 19]),
    "one": (Video(num_frames=1), [0]),
    "more than there are": (Video(num_frames=40), [place * 19 // 39 for place in range(40)]),
    "in the middle": (Video(num_frames=4, stride=3), [5, 8, 11, 14]),
    "over the end": (Video(num_frames=4, stride=9), [0, 9, 18, 19]),
}


@pytest.mark.parametrize(("feature", "numbers"), CHOICES.values(), ids=CHOICES)
def test_frames_are_chosen_when_a_sample_is_read(feature, numbers):
    """The file is stored whole, and a transform that writes gets all of it."""
    every = plainly_decoded(MPEG4)

    stored = feature.encode(MPEG4)

    assert stored == MPEG4
    assert np.array_equal(feature.decode(stored), every[list(numbers)])
    assert np.array_equal(feature.frames(MPEG4), every[list(numbers)])
    assert feature.value_type()[1][0] in {None, len(list(numbers))}
    assert np.array_equal(feature.prepare(MPEG4), every)


@pytest.mark.parametrize("kind", ["mp4", "webm of VP8", "mkv", "ts"])
def test_frames_are_read_by_their_numbers(kind):
    """Also where packets hold no frame, as some of VP8 do."""
    data = of_kind(kind)
    every = plainly_decoded(data)
    counts = []

    def last_two(num_frames):
        counts.append(num_frames)
        return [num_frames - 1, num_frames - 2]

    assert np.array_equal(Video().frames(data, [5, 3, 3, 0]), every[[5, 3, 3, 0]])
    assert np.array_equal(Video().frames(data, last_two), every[[-1, -2]])
    assert counts[-1] == len(every)
    assert Video().frames(data, []).shape == (0, HEIGHT, WIDTH, 3)
    for number in (len(every), -1):
        with pytest.raises(IndexError, match=f"frame {number} of a video with {len(every)}; frames are numbered from"):
            Video().frames(data, [number])


SOUGHT = {
    "h264": ("mp4", "libx264", "yuv420p", {"g": "5", "bf": "2"}),
    "h264, one key frame": ("matroska", "libx264", "yuv420p", {"g": "250"}),
    "open groups": ("mp4", "libx264", "yuv420p", {"x264-params": "open-gop=1:keyint=4:min-keyint=2:bframes=2"}),
    "hevc": ("mp4", "libx265", "yuv420p", {"x265-params": "keyint=4:log-level=none"}),
    "av1": ("mp4", "libsvtav1", "yuv420p", {"g": "2", "preset": "12", "svtav1-params": "lp=1"}),
    "vp9": ("webm", "libvpx-vp9", "yuv420p", {"g": "6", "auto-alt-ref": "1", "lag-in-frames": "12"}),
    "vp8, not sought": ("webm", "libvpx", "yuv420p", {"g": "6"}),
    "mpeg4, not sought": ("mp4", "mpeg4", "yuv420p", {"g": "4", "bf": "2"}),
    "mjpeg": ("mov", "mjpeg", "yuvj420p", {}),
    "ffv1": ("matroska", "ffv1", "bgr0", {}),
    "ts, not sought": ("mpegts", "libx264", "yuv420p", {"g": "5"}),
}


@functools.cache
def of_codec(name):
    kind, codec, pixels, options = SOUGHT[name]
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg does not encode {codec}")
    data = encoded([drawn(number, 64, 64) for number in range(24)], kind, codec, pixels, options=options)
    if hasattr(os, "sched_setscheduler"):
        # For root, SVT-AV1 gives the calling thread real-time priority, and all later tests would starve others.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return without_frame(data, 9) if codec == "libvpx" else data


def without_frame(data, number):
    """A file of VP8 in which a frame is for others alone, as encoders hide some: a bit of its head says so."""
    with av.open(io.BytesIO(data)) as container:
        packet = [bytes(packet) for packet in container.demux(video=0)][number]
    return data.replace(packet, bytes([packet[0] & ~0x10]) + packet[1:])


@pytest.mark.parametrize("name", SOUGHT)
def test_frames_that_are_sought_are_those_of_a_plain_loop(name):
    """By any numbers, in any order, wherever the key frames are."""
    data = of_codec(name)
    every, rng = plainly_decoded(data), np.random.default_rng(0)

    assert len(every) == (23 if "vp8" in name else 24)
    for _ in range(12):
        numbers = rng.integers(0, len(every), rng.integers(1, 5)).tolist()
        assert np.array_equal(Video().frames(data, numbers), every[numbers])
    assert np.array_equal(Video().frames(data), every)


@pytest.fixture
def decoded_times(monkeypatch):
    """When each frame is shown that PyAV has decoded since."""
    times, opened = [], av.open

    class Container:
        def __init__(self, *arguments, **options):
            self.container = opened(*arguments, **options)

        def __getattr__(self, name):
            return getattr(self.container, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.container.close()

        def decode(self, stream):
            for frame in self.container.decode(stream):
                times.append(frame.pts)
                yield frame

    monkeypatch.setattr(av, "open", Container)
    return times


@pytest.mark.parametrize(
    ("numbers", "most"), {(50,): 6, (0, 59): 7, (30, 31, 32): 3, (29, 30): 7, (): 60, tuple(range(60)): 60}.items()
)
def test_only_frames_behind_the_last_key_frame_are_decoded(decoded_times, numbers, most):
    """Not all of an episode for a step of it."""
    if "libx264" not in av.codecs_available:
        pytest.skip("this FFmpeg does not encode libx264")
    data = encoded([drawn(number) for number in range(60)], codec="libx264", options={"g": "6", "bf": "0"})

    found = Video().frames(data, numbers)

    assert len(found) == len(numbers)
    assert 0 < len(decoded_times) <= most


def test_files_may_stay_as_they_are():
    feature = Video((HEIGHT, WIDTH), decoded=False)

    stored = feature.encode(memoryview(MPEG4))

    assert (feature.decode(stored), feature.prepare(MPEG4)) == (MPEG4, MPEG4)
    assert (feature.value_type(), target_of(feature), tf_field(feature).needs_python) == (("bytes", ()), None, False)
    assert feature.declared() == "video file (?, 32, 48, 3)"


@pytest.mark.parametrize("rotation", [90, -90, 180])
def test_frames_are_turned_as_the_file_says(tmp_path, rotation):
    """As phones write them, and as OpenCV shows them."""
    cv2 = pytest.importorskip("cv2")
    (tmp_path / "phone.mp4").write_bytes(data := encoded(FRAMES[:3], rotation=rotation))

    found = Video((WIDTH, HEIGHT) if rotation % 180 else (HEIGHT, WIDTH))

    frame = found.decode(found.encode(data))[0]
    capture = cv2.VideoCapture(str(tmp_path / "phone.mp4"))
    is_there, wanted = capture.read()
    capture.release()
    assert np.array_equal(frame, np.rot90(Video().frames(encoded(FRAMES[:3]), [0])[0], rotation // 90))
    if is_there:  # where OpenCV was built with FFmpeg
        assert np.abs(frame.astype(int) - wanted[..., ::-1]).max() <= 4


@pytest.mark.parametrize("fps", [25, 30000 / 1001, 12.5])
def test_arrays_come_back_bit_for_bit(fps):
    """In a file that other programs play, and as the same bytes each time."""
    feature = Video((HEIGHT, WIDTH), fps=fps)
    noise = np.random.default_rng(0).integers(0, 256, (5, HEIGHT, WIDTH, 3), np.uint8)

    stored = feature.encode(noise)

    assert np.array_equal(feature.decode(stored), noise)
    assert feature.encode(noise[:, ::-1][:, ::-1]) == feature.encode(stored) == stored
    assert tar_form(feature).extension(stored) == "mkv"
    with av.open(io.BytesIO(stored)) as file:
        assert float(file.streams.video[0].average_rate) == pytest.approx(fps, rel=1e-3)
        assert "creation_time" not in file.metadata


WRONG = {
    "another size": (
        Video((32, 32)),
        MPEG4,
        r"declared video uint8 \(\?, 32, 32, 3\) but the sample holds a video of \(20, 32, 48, 3\) at 25 fps; scale",
    ),
    "another rate": (Video(fps=24), MPEG4, "declared .* at 24 fps but .* at 25 fps; scale or convert it in read"),
    "no rate": (Video(), np.stack(FRAMES), r"an array, uint8 \(20, 32, 48, 3\); give the bytes of a file, declare fps"),
    "floats": (Video(fps=5), np.zeros((1, 8, 8, 3)), "float64"),
    "grey": (Video(fps=5), np.zeros((1, 8, 8), np.uint8), r"uint8 \(1, 8, 8\)"),
    "no frames": (Video(fps=5), np.zeros((0, 8, 8, 3), np.uint8), "holds no pixels; leave the sample out"),
    "a str": (Video(), "a.mp4", "a str; give a numpy array"),
}


@pytest.mark.parametrize(("feature", "value", "message"), WRONG.values(), ids=WRONG)
def test_values_that_do_not_fit_are_refused(feature, value, message):
    with pytest.raises(SchemaError, match=message):
        feature.encode(value)


def sound_alone():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def damaged(data):
    """The file with a frame in its middle overwritten."""
    middle = len(data) // 2
    return data[:middle] + b"\xff" * 300 + data[middle + 300 :]


NOISE = [np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8) for number in range(12)]
BROKEN = {
    "nothing": (b"", "0 bytes are not a video; want a complete MP4, MOV, WebM"),
    "text": (b"no video at all, but some text", "30 bytes are not a video"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(600), "bytes are not a video"),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "bytes are not a video"),
    "sound": (sound_alone(), "mp4 file without a video that FFmpeg decodes"),
    "a header": (MPEG4[:40], "mp4 file that does not decode"),
    "a cut mp4": (MPEG4[:-10], "mp4 file that (is cut short: 10 bytes are missing|does not decode)"),
    "a cut mkv": (encoded(FRAMES, "matroska")[:-500], "mkv file that is cut short: 500 bytes are missing"),
    "a cut avi": (encoded(FRAMES, "avi")[:-500], "avi file (that is cut short: 500 bytes|whose frame|that fails)"),
    "a damaged frame": (damaged(encoded(NOISE)), r"mp4 file (whose frame \d+ is damaged|that fails at frame \d+)"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("decoded", [True, False])
def test_files_that_do_not_decode_are_refused(data, message, decoded):
    with pytest.raises(InputError, match=f"the field.*{message}"):
        Video(decoded=decoded).encode(data)


def test_every_cut_of_a_file_is_refused():
    """However much is left; the first formats say how long they are, the others lose frames."""
    for kind in ("mp4", "matroska", "avi"):
        data = encoded(FRAMES[:4], kind)
        for size in range(0, len(data) - 1, 97):
            with pytest.raises(InputError):
                Video().encode(data[:size])


def test_frames_of_two_sizes_are_refused():
    """As a stream holds whose sender changed its size."""
    parts = [encoded([drawn(0, size, size)] * 2, "mpegts", "mpeg2video") for size in (32, 64)]

    with pytest.raises(SchemaError, match=r"a video of \(32, 32\) in which frame \d is \(64, 64\); scale it in read"):
        Video().encode(b"".join(parts))


def test_strip_of_four_frames_is_displayed():
    every = plainly_decoded(MPEG4)
    gap = np.full((HEIGHT, max(WIDTH // 40, 1), 3), 255, np.uint8)
    wanted = np.concatenate([every[0], gap, every[6], gap, every[12], gap, every[19]], axis=1)

    for feature in (Video(), Video(decoded=False)):
        sheet = feature.display(feature.decode(MPEG4))
        assert np.array_equal(sheet, wanted)
    assert Video().display(every[:1]).shape == wanted.shape


LENGTHS = [1, 4, 9, 2, 20, 3]


@functools.cache
def of_length(number):
    return encoded(FRAMES[: LENGTHS[number]])


def test_batches_hold_what_is_asked_for(tmp_path):
    """Files beside arrays, of several lengths; all frames, some, and the file."""
    arrays = np.stack(FRAMES[:3])

    def recording(number):
        return {"all": of_length(number) if number else arrays, "some": of_length(number), "file": of_length(number)}

    features = {"all": Video((HEIGHT, WIDTH), fps=25), "some": Video((HEIGHT, WIDTH), num_frames=2)}
    features["file"] = Video(decoded=False)
    materialize(recording, range(6), tmp_path / "out", features=Features(features))

    dataset = load(tmp_path / "out")
    wanted = {of_length(n): plainly_decoded(of_length(n)) if n else arrays for n in range(6)}
    batches = [*dataset.to_numpy(batch_size=3), *dataset.to_numpy(batch_size=6, num_workers=1)]
    for batch in batches:
        assert batch["some"].shape == (len(batch["file"]), 2, HEIGHT, WIDTH, 3)
        for file, every, some in zip(batch["file"], batch["all"], batch["some"], strict=True):
            assert np.array_equal(every, wanted[file])
            assert np.array_equal(some, plainly_decoded(file)[[0, -1]])
    assert sum(len(batch["file"]) for batch in batches) == 12
    assert dataset.preview(4).array.std() > 1
    assert dataset.columns("file").preview(2).array.std() > 1


def test_transforms_choose_clips_that_follow_the_seed(tmp_path):
    """Other frames in each epoch, the same for any number of workers."""
    videos = Video(decoded=False)

    def clip(sample, rng):
        def numbers(num_frames):
            start = rng.integers(max(num_frames - 3, 0) + 1)
            return range(start, min(start + 3, num_frames))

        return {**sample, "video": videos.frames(sample["video"], numbers)}

    materialize(
        lambda n: {"video": of_length(n), "n": n},
        range(6),
        tmp_path / "out",
        features=Features({"video": videos, "n": Scalar("int64")}),
    )
    epochs = load(tmp_path / "out").to_numpy(transform=clip, seed=1)
    first, second = ({int(row["n"]): row["video"] for row in epochs} for _ in range(2))
    found = load(tmp_path / "out").to_numpy(transform=clip, seed=1, num_workers=2)
    workers = {int(row["n"]): row["video"] for row in found}

    assert {n: len(frames) for n, frames in first.items()} == {n: min(size, 3) for n, size in enumerate(LENGTHS)}
    assert any(not np.array_equal(frames, second[n]) for n, frames in first.items())
    assert {n: frames.tobytes() for n, frames in workers.items()} == {n: one.tobytes() for n, one in first.items()}


def test_broken_file_of_a_run_is_quarantined(tmp_path):
    """Whatever else works, the one that does not is named with its file, and kept."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.mp4").write_bytes(b"" if number == 2 else of_length(number))

    def run(errors):
        return materialize(
            lambda path: {"video": path.read_bytes()},
            sorted(folder.iterdir()),
            tmp_path / "out",
            features=Features({"video": Video()}),
            errors=errors,
        )

    with pytest.raises(SampleError, match=r"(?s)video.*0 bytes are not a video.*videos/2\.mp4"):
        run("raise")
    run("quarantine")
    assert len(load(tmp_path / "out")) == 3
    assert [path.name for path in (tmp_path / "out/.datamat/quarantine").rglob("*.mp4")] != []


def test_rates_of_television_are_those_of_the_file():
    rate = fractions.Fraction(30000, 1001)
    data = encoded(FRAMES[:5], "matroska", rate=rate)

    for fps in (29.97, 30000 / 1001):
        assert Video(fps=fps).encode(data) == data
    with pytest.raises(SchemaError, match=r"at 29\.97 fps"):
        Video(fps=25).encode(data)
