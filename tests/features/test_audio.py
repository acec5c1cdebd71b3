"""Recordings: files are kept, arrays are stored exactly, and what does not decode is refused with its place."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from datamat import Audio, Features, InputError, SampleError, SchemaError, load, materialize
from datamat.features import Features as Schema

soundfile = pytest.importorskip("soundfile")

WAVE = (np.sin(np.arange(3000) / 7) * 20_000).astype(np.int16)
STEREO = np.stack([WAVE, WAVE[::-1]], axis=1)
SHARES = STEREO.astype(np.float32) / 32768


def encoded(samples=STEREO, rate=16_000, kind="WAV", **options):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


FILES = {
    "wav": encoded(),
    "wav of 24 bits": encoded(subtype="PCM_24"),
    "wav of floats": encoded(SHARES, subtype="FLOAT"),
    "flac": encoded(kind="FLAC"),
    "mp3": encoded(kind="MP3"),
    "ogg": encoded(kind="OGG"),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_files_are_kept_and_decode_as_soundfile_does(data):
    feature = Audio(16_000, 2)

    columns = feature.encode("x", data)

    assert columns == {"x": data}
    assert np.array_equal(feature.decode("x", columns), soundfile.read(io.BytesIO(data), dtype="float32")[0])
    assert feature.prepare("x", data).shape == feature.decode("x", columns).shape
    assert type(Features.infer({"x": data})["x"]) is Audio


ARRAYS = {
    "16 bits": (STEREO, "flac"),
    "mono": (WAVE, "flac"),
    "floats of 16 bits": (SHARES, "flac"),
    "24 bits": ((np.arange(-3000, 3000, dtype=np.float32) * 1001 / (1 << 23))[:, None], "flac"),
    "bounds": (np.array([-1, 1 - 2**-15, 0], np.float32), "flac"),
    "floats": (np.sin(np.arange(3000, dtype=np.float32)), "wav"),
    "loud": (SHARES * 3, "wav"),
    "nothing": (np.zeros((0, 2), np.float32), "wav"),
    "many channels": (np.zeros((5, 12), np.int16), "wav"),
}


@pytest.mark.parametrize(("array", "extension"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_come_back_bit_for_bit(array, extension):
    """In the smallest form that holds them, and as the same bytes each time."""
    feature = Audio(16_000)
    wanted = array.astype(np.float32) / 32768 if array.dtype == np.int16 else array
    wanted = wanted[:, None] if wanted.ndim == 1 else wanted

    columns = feature.encode("x", array)

    found = feature.decode("x", columns)
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted)
    assert (feature.extension(columns["x"]), feature.encode("x", array)) == (extension, columns)
    assert soundfile.info(io.BytesIO(columns["x"])).samplerate == 16_000
    assert len(columns["x"]) < array.nbytes + 200 or extension == "wav"


def test_flac_rounds_where_it_is_asked_to():
    feature = Audio(16_000, encoding="flac")
    wave = np.sin(np.arange(3000, dtype=np.float32))

    found = feature.decode("x", feature.encode("x", wave))

    assert 0 < np.abs(found[:, 0] - wave).max() <= 1 / 32768
    with pytest.raises(SchemaError, match="the level 3, beyond 1; scale it in read, or declare encoding='exact'"):
        feature.encode("x", wave / np.abs(wave).max() * 3)


WRONG = {
    "another rate": (
        Audio(8_000),
        FILES["wav"],
        "declared .* at 8000 Hz but .* a file of 16000 Hz with 2 channels; res",
    ),
    "other channels": (Audio(None, 1), FILES["flac"], r"declared float32 \(\?, 1\) but .* with 2 channels"),
    "no rate": (Audio(), WAVE, r"an array, int16 \(3000,\); declare its rate: Audio\(sample_rate=...\)"),
    "float64": (Audio(9), WAVE / 2, "float64"),
    "NaN": (Audio(9), np.full(4, np.nan, np.float32), "a sample that is not finite; repair it in read"),
    "a str": (Audio(9), "a.wav", "a str; give a numpy array"),
}


@pytest.mark.parametrize(("feature", "value", "message"), WRONG.values(), ids=WRONG)
def test_values_that_do_not_fit_are_refused(feature, value, message):
    with pytest.raises(SchemaError, match=message):
        feature.encode("x", value)


BROKEN = {
    "nothing": (b"", "0 bytes do not decode as sound"),
    "text": (b"no sound at all", "do not decode as sound"),
    "a cut wav": (FILES["wav"][:-10], "holds a WAV file that is cut short: 10 bytes are missing; want a whole WAV"),
    "a cut flac": (FILES["flac"][:-3000], "do not decode|cut short"),
    "another format": (
        encoded(kind="AIFF"),
        "a sound file of the format AIFF; want a whole WAV, FLAC, MP3 or Ogg file",
    ),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN)
def test_files_that_do_not_decode_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        Audio().encode("x", data)


def test_declarations_are_checked():
    for arguments, message in (
        ({"sample_rate": 0}, "sample_rate is 0; want a positive number"),
        ({"num_channels": "two"}, "num_channels is 'two'; want an int"),
        ({"encoding": "mp3"}, "encoding is 'mp3'; want 'exact' or 'flac'"),
    ):
        with pytest.raises(SchemaError, match=message):
            Audio(**arguments)
    assert Schema.from_json(Features({"x": Audio(9, 1)}).to_json())["x"] == Audio(9, 1)


def test_waveform_and_spectrogram_are_displayed():
    loud = Audio().display(SHARES)

    assert (loud.shape, loud.dtype) == ((200, 320, 3), np.uint8)
    assert (loud[:100] != 255).any(axis=(0, 2)).all()
    assert (loud[104:] != 255).any(axis=2).all()
    assert (Audio().display(np.zeros((0, 1), np.float32))[50] != 255).any()


@pytest.mark.parametrize(("share", "row"), [(0.02, 94), (0.25, 71), (0.5, 47), (0.95, 4)])
def test_spectrogram_shows_a_tone_at_its_height(share, row):
    """A tone at a share of the highest frequency is a bright line as far up; both halves show what each holds."""
    times = np.arange(16_000, dtype=np.float32)
    tone = (0.5 * np.sin(np.pi * share * times)).astype(np.float32)
    tone[8_000:] = 0

    spectrum = Audio().display(tone[:, None])[104:].astype(int).sum(axis=2)

    assert abs(int(spectrum[:, 80].argmax()) - row) <= 1
    assert spectrum[:, 80].max() > 550
    assert spectrum[:, 240].max() < 100


@pytest.mark.parametrize("name", ["tfrecord", "parquet", "webdataset"])
def test_every_format_and_reader_gives_the_samples(tmp_path, name):
    """Files beside arrays, of several lengths."""

    def recording(number):
        return {"sound": FILES["mp3"] if number == 0 else STEREO[: 100 * number], "text": str(number)}

    features = Features({"sound": Audio(16_000, 2), "text": Features.infer({"text": ""})["text"]})
    materialize(recording, range(6), tmp_path / "out", features=features, format=name, progress=False)

    dataset = load(tmp_path / "out")
    wanted = {str(n): Audio(16_000).decode("x", Audio(16_000).encode("x", recording(n)["sound"])) for n in range(6)}
    batches = [*dataset.to_numpy(batch_size=3), *dataset.to_numpy(batch_size=6, num_workers=1)]
    for batch in batches:
        for text, sound in zip(batch["text"], batch["sound"], strict=True):
            assert np.array_equal(sound, wanted[text])
    assert sum(len(batch["text"]) for batch in batches) == 12
    assert dataset.preview(4).array.std() > 1


def test_torch_and_tf_data_give_the_samples(tmp_path):
    pytest.importorskip("tensorflow")
    features = Features({"sound": Audio(16_000, 2)})
    materialize(lambda n: {"sound": STEREO[: 100 * n]}, range(5), tmp_path / "out", features=features, progress=False)
    dataset = load(tmp_path / "out")

    rows = list(dataset.to_tf().as_numpy_iterator())

    assert sorted(len(row["sound"]) for row in rows) == [0, 100, 200, 300, 400]
    assert all(np.array_equal(row["sound"], SHARES[: len(row["sound"])]) for row in rows)
    torch = pytest.importorskip("torch")
    for row in dataset.to_torch():
        assert torch.equal(torch.as_tensor(row["sound"]), torch.from_numpy(SHARES[: len(row["sound"])]))


def test_broken_file_of_a_run_names_the_sample(tmp_path):
    """Whatever else works, the one that does not is named with its file."""
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.wav").write_bytes(FILES["wav"][: -10 if number == 2 else None])

    with pytest.raises(SampleError, match=r"(?s)sound.*cut short: 10 bytes are missing.*sounds/2\.wav"):
        materialize(
            lambda path: {"sound": path.read_bytes()},
            sorted(folder.iterdir()),
            tmp_path / "out",
            features=Features({"sound": Audio()}),
            progress=False,
        )


def test_features_of_sound_files_are_inferred(tmp_path):
    files = [FILES["wav"], FILES["flac"]]
    materialize(lambda number: {"sound": files[number]}, range(2), tmp_path / "out", progress=False)

    assert load(tmp_path / "out").features["sound"] == Audio()
    assert [sample["sound"].shape for sample in load(tmp_path / "out")] == [(3000, 2)] * 2
    assert json.loads((tmp_path / "out/manifest.json").read_text())["features"]["sound"]["type"] == "Audio"


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_knows_the_files(tmp_path):
    """The card says that they are sound; without its decoder, it gives the bytes."""
    datasets = pytest.importorskip("datasets")
    materialize(
        lambda number: {"sound": STEREO[: 50 + number], "number": number},
        range(4),
        tmp_path / "out",
        features=Features({"sound": Audio(16_000), "number": Features.infer({"n": 1})["n"]}),
        format="parquet",
        progress=False,
    )

    found = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))

    assert isinstance(found.features["sound"], datasets.Audio)
    rows = list(found.cast_column("sound", datasets.Audio(decode=False)))
    assert len(rows) == 4
    for row in rows:
        samples, rate = soundfile.read(io.BytesIO(row["sound"]["bytes"]), dtype="int16")
        assert (rate, np.array_equal(samples, STEREO[: 50 + row["number"]])) == (16_000, True)
