"""Recordings: files are kept, arrays are stored exactly, and what does not decode is refused with its place."""

from __future__ import annotations

import io

import numpy as np
import pytest
from round_trip import materialize

from datamat import Audio, Features, InputError, SchemaError
from datamat.formats.webdataset import tar_form

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

    stored = feature.encode(data)

    assert stored == data
    assert np.array_equal(feature.decode(stored), soundfile.read(io.BytesIO(data), dtype="float32")[0])
    assert feature.prepare(data).shape == feature.decode(stored).shape
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

    stored = feature.encode(array)

    found = feature.decode(stored)
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted)
    assert (tar_form(feature).extension(stored), feature.encode(array)) == (extension, stored)
    assert soundfile.info(io.BytesIO(stored)).samplerate == 16_000
    assert len(stored) < array.nbytes + 200 or extension == "wav"


def test_flac_rounds_where_it_is_asked_to():
    feature = Audio(16_000, encoding="flac")
    wave = np.sin(np.arange(3000, dtype=np.float32))

    found = feature.decode(feature.encode(wave))

    assert 0 < np.abs(found[:, 0] - wave).max() <= 1 / 32768
    with pytest.raises(SchemaError, match="the level 3, beyond 1; scale it in read, or declare encoding='exact'"):
        feature.encode(wave / np.abs(wave).max() * 3)


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
        feature.encode(value)


BROKEN = {
    "nothing": (b"", "0 bytes do not decode as sound"),
    "text": (b"no sound at all", "do not decode as sound"),
    "a cut wav": (FILES["wav"][:-10], "holds a WAV file that is cut short: 10 bytes are missing; want a complete WAV"),
    "a cut flac": (FILES["flac"][:-3000], "do not decode|cut short"),
    "another format": (
        encoded(kind="AIFF"),
        "a sound file of the format AIFF; want a complete WAV, FLAC, MP3 or Ogg file",
    ),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN)
def test_files_that_do_not_decode_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        Audio().encode(data)


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
    )

    found = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))

    assert isinstance(found.features["sound"], datasets.Audio)
    rows = list(found.cast_column("sound", datasets.Audio(decode=False)))
    assert len(rows) == 4
    for row in rows:
        samples, rate = soundfile.read(io.BytesIO(row["sound"]["bytes"]), dtype="int16")
        assert (rate, np.array_equal(samples, STEREO[: 50 + row["number"]])) == (16_000, True)
