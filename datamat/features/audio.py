"""Audio files, stored untouched or encoded from arrays."""

from __future__ import annotations

import importlib.util
import io
import struct
from typing import Any, Literal

import numpy as np

from datamat.errors import InputError, MissingDependencyError, SchemaError, count_of
from datamat.features.base import (
    ArrowType,
    Column,
    Feature,
    Shape,
    array_of,
    check_array,
    mismatch,
    one_bytes,
    set_positive,
    shape_text,
)
from datamat.features.protocols import Preview
from datamat.features.registry import built_in
from datamat.features.statistics import FieldStatistics, Numbers
from datamat.values import frozen

_SOUNDS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg"}
"""Formats of files that are stored untouched, as soundfile names them, with their extensions."""
_MOST_FLAC_CHANNELS, _MOST_FLAC_RATE = 8, 65_535
_WAVE_WIDTH, _WAVE_HEIGHT = 320, 100
_WAVE_INK, _WAVE_PAPER = (40, 90, 160), 255
_SPECTRUM_HEIGHT, _SPECTRUM_GAP = 96, 4
_SPECTRUM_WINDOW = 4 * _SPECTRUM_HEIGHT  # samples, so that each row is the mean of two frequencies
_SPECTRUM_DB = 80.0
_SPECTRUM_COLOURS = ((8, 8, 40), (70, 20, 110), (170, 45, 110), (240, 120, 70), (255, 240, 170))
"""Colours from silence to the maximum level, increasingly light, so that they are readable in grey, too."""


@frozen()
class Audio(Feature, Preview):
    """A recording: float32 (num_samples, num_channels) from -1 to 1, stored as an encoded file.

    A sample holds the `bytes` of a WAV, FLAC, MP3 or Ogg file, which are stored untouched, or an array of float32 or
    int16 (num_samples, num_channels), mono also as (num_samples,). A file that does not decode completely is refused.
    Needs the package soundfile, which the extra `audio` installs.

    Args:
        sample_rate: samples per second; a file with another rate is refused. None accepts files of any rate, but no
            arrays: if the rate varies, store it in a separate field.
        num_channels: 1 for mono, 2 for stereo; None for any number.
        encoding: how arrays are stored. "exact" stores 16- or 24-bit FLAC if that holds every value exactly, else WAV
            of 32-bit floats; "flac" stores 16-bit FLAC, which rounds to steps of 1/32768.

    Example:
        >>> Audio(16_000, num_channels=1).declared()
        'float32 (?, 1) at 16000 Hz'
    """

    sample_rate: int | None = None
    num_channels: int | None = None
    encoding: Literal["exact", "flac"] = "exact"

    preview = "image"

    def __post_init__(self) -> None:
        set_positive(self, ("sample_rate", "num_channels"))
        if self.encoding not in {"exact", "flac"}:
            raise SchemaError(f"Audio: encoding is {self.encoding!r}; want 'exact' or 'flac'")

    @property
    def type(self) -> ArrowType:
        return ArrowType("binary")

    def value_type(self) -> tuple[str, Shape]:
        return "float32", (None, self.num_channels)

    def encode(self, value: Any) -> Column:
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            samples, rate = decoded_sound(data)
            if self.sample_rate not in {None, rate} or self.num_channels not in {None, samples.shape[1]}:
                found = f"a file of {rate} Hz with {samples.shape[1]} channels"
                raise mismatch(self, found, "resample or mix it in read, or change the declaration")
            return data
        return self._encoded(self._samples(value))

    def decode(self, column: Column) -> np.ndarray:
        return decoded_sound(one_bytes(column))[0]

    def prepare(self, value: Any) -> Any:
        return decoded_sound(value)[0] if isinstance(value, bytes) else value

    def encoded_value(self, column: Column) -> bytes:
        return one_bytes(column)

    def packages(self, *, drawn: bool) -> frozenset[str]:
        del drawn  # files and arrays may be mixed
        return frozenset({"soundfile"})

    def observe(self, column: Any) -> FieldStatistics:
        if importlib.util.find_spec("soundfile") is None:
            return {}
        seconds = [_duration(data) for data in column]
        return {"seconds": Numbers.of(np.array([one for one in seconds if one is not None], np.float64))}

    def declared(self) -> str:
        return f"float32 {shape_text((None, self.num_channels))}" + (
            "" if self.sample_rate is None else f" at {self.sample_rate} Hz"
        )

    def display(self, value: Any) -> np.ndarray:
        """Return the waveform of all channels above the spectrogram of their mean: uint8 (200, 320, 3).

        The spectrogram shows 80 dB below its loudest place, low tones at the bottom, in equal steps up to half of the
        sample rate.
        """
        picture = np.full((_WAVE_HEIGHT + _SPECTRUM_GAP + _SPECTRUM_HEIGHT, _WAVE_WIDTH, 3), _WAVE_PAPER, np.uint8)
        for column, part in enumerate(np.array_split(value, _WAVE_WIDTH)):
            low, high = (float(part.min()), float(part.max())) if part.size else (0.0, 0.0)
            top, bottom = (round((1 - np.clip(level, -1, 1)) / 2 * (_WAVE_HEIGHT - 1)) for level in (high, low))
            picture[top : bottom + 1, column] = _WAVE_INK
        picture[-_SPECTRUM_HEIGHT:] = _spectrogram(value.mean(axis=1) if value.size else np.zeros(0, np.float32))
        return picture

    def _samples(self, value: Any) -> np.ndarray:
        """Return an array as float32 (num_samples, num_channels)."""
        array = array_of(self, value)
        if self.sample_rate is None:
            found = f"an array, {array.dtype.name} {shape_text(array.shape)}"
            raise mismatch(self, found, "declare its rate: Audio(sample_rate=...)")
        array = array[:, None] if array.ndim == 1 else array
        if array.dtype == np.int16:
            array = array.astype(np.float32) / np.float32(1 << 15)
        check_array(self, array.dtype, array.shape, (None, self.num_channels), np.dtype(np.float32))
        if not array.shape[1] or not np.isfinite(array).all():
            found = "no channels" if not array.shape[1] else "a sample that is not finite"
            raise mismatch(self, found, "repair it in read")
        return array

    def _encoded(self, samples: np.ndarray) -> bytes:
        assert self.sample_rate is not None, "`_samples` refuses arrays without it"
        if self.encoding == "flac":
            if not len(samples) or np.abs(samples).max() > 1:
                found = "no samples" if not len(samples) else f"the level {np.abs(samples).max():.3g}, beyond 1"
                raise mismatch(self, found, "scale it in read, or declare encoding='exact'")
            if samples.shape[1] > _MOST_FLAC_CHANNELS or self.sample_rate > _MOST_FLAC_RATE:
                raise mismatch(self, f"{samples.shape[1]} channels", "declare encoding='exact': FLAC has 8 at most")
            levels = np.rint(samples * np.float32(1 << 15)).clip(-(1 << 15), (1 << 15) - 1)
            return _flac(levels.astype(np.int16), self.sample_rate, "PCM_16")
        if len(samples) and samples.shape[1] <= _MOST_FLAC_CHANNELS and self.sample_rate <= _MOST_FLAC_RATE:
            for bits, dtype in ((16, np.int16), (24, np.int32)):
                levels = samples.astype(np.float64) * (1 << (bits - 1))
                if (
                    (levels == np.rint(levels)).all()
                    and levels.min() >= -(1 << (bits - 1))
                    and levels.max() < 1 << (bits - 1)
                ):
                    shift = 8 * np.dtype(dtype).itemsize - bits  # soundfile takes the upper bits
                    return _flac(np.left_shift(levels.astype(dtype), shift), self.sample_rate, f"PCM_{bits}")
        return _float_wav(samples, self.sample_rate)


def _spectrogram(samples: np.ndarray) -> np.ndarray:
    """Return the spectrogram of one channel, float32 (n,), as a picture: uint8 (96, 320, 3)."""
    padded = np.pad(samples.astype(np.float64), _SPECTRUM_WINDOW // 2)
    starts = np.linspace(0, len(samples), _WAVE_WIDTH).astype(np.int64)
    frames = padded[starts[:, None] + np.arange(_SPECTRUM_WINDOW)] * np.hanning(_SPECTRUM_WINDOW)
    power = np.abs(np.fft.rfft(frames)[:, : 2 * _SPECTRUM_HEIGHT]) ** 2
    rows = power.reshape(_WAVE_WIDTH, _SPECTRUM_HEIGHT, 2).mean(axis=2).T[::-1]
    loudest = max(float(rows.max()), 1e-12)
    levels = 1 + np.clip(10 * np.log10(np.maximum(rows / loudest, 1e-30)) / _SPECTRUM_DB, -1, 0)
    steps = np.linspace(0, 1, len(_SPECTRUM_COLOURS))
    colours = [np.interp(levels, steps, channel) for channel in zip(*_SPECTRUM_COLOURS, strict=True)]
    return np.stack(colours, axis=2).astype(np.uint8)


def sound_extension(data: bytes) -> str:
    """Return the extension of a sound file's format by its first bytes; "" if it is not a sound file."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] in {b"fLaC", b"OggS"}:
        return "flac" if data[:1] == b"f" else "ogg"
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0  # 11 bits, which begin a frame of MPEG
    return "mp3" if data[:3] == b"ID3" or is_frame else ""


def _duration(data: bytes) -> float | None:
    """Return the duration of a sound file in seconds, from its header; None if it cannot be read."""
    try:
        info = _soundfile().info(io.BytesIO(data))
    except RuntimeError:
        return None
    return float(info.frames / info.samplerate)


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # the latter where libsndfile is missing
        raise MissingDependencyError(
            "Audio needs the package soundfile; install it with: pip install 'datamat[audio]'"
        ) from error
    return soundfile


def decoded_sound(data: bytes) -> tuple[np.ndarray, int]:
    """Return the samples of a file, float32 (num_samples, num_channels), and its rate.

    Raises:
        InputError: its format is not supported, or it does not decode to its end.
        MissingDependencyError: soundfile is not installed.
    """
    soundfile = _soundfile()
    wanted = "want a complete WAV, FLAC, MP3 or Ogg file"
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            kind, rate, num_samples = file.format, file.samplerate, file.frames
            file.seek(0)  # as `soundfile.read` does: without it, the last bits of MP3 differ
            samples = file.read(dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise InputError(
            f"the field: {len(data)} bytes do not decode as sound ({error.error_string}); {wanted}"
        ) from error
    if kind not in _SOUNDS:
        raise InputError(f"the field holds a sound file of the format {kind}; {wanted}")
    missing = _missing_bytes(data) if _SOUNDS[kind] == "wav" else 0
    if missing or len(samples) != num_samples:
        found = (
            f"{missing} bytes are missing"
            if missing
            else f"{len(samples)} of {count_of(num_samples, 'sample')} are there"
        )
        raise InputError(f"the field holds a {kind} file that is cut short: {found}; {wanted}")
    return samples, int(rate)


def _missing_bytes(data: bytes) -> int:
    """Return the number of bytes missing at the end of a WAV file, which soundfile ignores."""
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4] == b"data":
            is_open = size >= 0xFFFFFF00  # streaming programs do not know the size
            return 0 if is_open else max(place + 8 + size - len(data), 0)
        place += 8 + size + size % 2
    return 0


def _flac(levels: np.ndarray, rate: int, subtype: str) -> bytes:
    file = io.BytesIO()
    _soundfile().write(file, levels, rate, subtype, format="FLAC")
    return file.getvalue()


def _float_wav(samples: np.ndarray, rate: int) -> bytes:
    """Return a WAV file of 32-bit floats; soundfile would write the time of day into it."""
    data = samples.astype("<f4").tobytes()
    num_channels = samples.shape[1]
    head = struct.pack("<HHIIHHH", 3, num_channels, rate, 4 * num_channels * rate, 4 * num_channels, 32, 0)  # 3: floats
    chunks = [(b"fmt ", head), (b"fact", struct.pack("<I", len(samples))), (b"data", data)]
    body = b"WAVE" + b"".join(kind + struct.pack("<I", len(content)) + content for kind, content in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


built_in(Audio)
