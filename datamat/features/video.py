"""Video files, stored untouched or encoded from arrays."""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import io
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import InputError, MissingDependencyError, SchemaError, count_of
from datamat.features.base import (
    ArrowType,
    Column,
    Feature,
    Shape,
    array_of,
    check_array,
    checked_shape,
    mismatch,
    one_bytes,
    set_positive,
    shape_text,
)
from datamat.features.protocols import Preview
from datamat.features.registry import built_in
from datamat.features.statistics import FieldStatistics, Numbers
from datamat.features.values import side_by_side
from datamat.values import frozen

if TYPE_CHECKING:
    from fractions import Fraction


_DEMUXERS = {
    **dict.fromkeys(["mp4", "mov", "3gp"], "mov"),
    **dict.fromkeys(["mkv", "webm"], "matroska"),
    "avi": "avi",
    "ts": "mpegts",
    "mpg": "mpeg",
    "flv": "flv",
    "wmv": "asf",
}
"""FFmpeg's demuxer for each extension. It is always given, since FFmpeg would otherwise follow playlists anywhere."""
_BRANDS = {b"qt  ": "mov", b"3gp": "3gp", **dict.fromkeys([b"hei", b"hev", b"avi", b"mif", b"msf", b"M4A", b"M4B"], "")}
"""Extensions by the prefix of an ISO file's brand, if not "mp4"; "" for pictures and sound."""
_BOXES = {b"moov", b"mdat", b"free", b"skip", b"wide"}
_MAGIC = {b"FLV\x01": "flv", b"\x00\x00\x01\xba": "mpg", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "wmv"}
_TS_PACKET = 188
_WHOLE = "want a complete MP4, MOV, WebM, MKV, AVI, MPEG, FLV or WMV file"
_RATE_TOLERANCE = 1e-3
"""Relative tolerance: containers round durations, and 29.97 is short for 30000/1001."""
_SHEET = 4  # frames that a preview shows


@frozen()
class Video(Feature, Preview):
    """A video: uint8 (num_frames, height, width, 3) in RGB, stored as an encoded file.

    A sample holds the `bytes` of an MP4, MOV, WebM, MKV, AVI, MPEG, FLV or WMV file, which are stored untouched, or an
    array of uint8 (num_frames, height, width, 3), stored as FFV1 in MKV, without loss. A file is decoded when it is
    written: it is refused if a frame is damaged, if it has no frames, or if it is truncated. Frames are rotated, and
    their colour space and range converted, as the file says. Sound in the file is kept, but not read. Needs the package
    av, which the extra `video` installs.

    `num_frames` and `stride` choose frames when a sample is read; the whole file is stored. For a transform that
    chooses different frames in each epoch, declare `decoded=False` and call `frames` in it.

    Args:
        shape: (height, width) of a frame; None for a size that varies.
        fps: frames per second; a file with another rate is refused. None accepts files of any rate, but no arrays.
        num_frames: number of frames to read from each video: spread evenly from the first to the last, or `stride`
            apart in its middle. Frames of a shorter video repeat. None for all.
        stride: distance between the frames to read; None for 1, or as far apart as `num_frames` permits.
        decoded: whether a sample holds frames; False gives transforms and readers the bytes of the file.

    Example:
        >>> Video((240, 320), num_frames=16).declared()
        'video uint8 (16, 240, 320, 3)'
        >>> Video(fps=25, decoded=False).declared()
        'video file (?, ?, ?, 3) at 25 fps'
    """

    shape: Shape = (None, None)
    fps: float | None = None
    num_frames: int | None = None
    stride: int | None = None
    decoded: bool = True

    preview = "image"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Video"))
        if len(self.shape) != 2 or 0 in self.shape:
            raise SchemaError(f"Video: shape is {self.shape}; want (height, width) of a frame, None where one varies")
        if self.fps is not None and not (isinstance(self.fps, (int, float)) and 0 < self.fps < float("inf")):
            raise SchemaError(f"Video: fps is {self.fps!r}; want a positive number, or None")
        set_positive(self, ("num_frames", "stride"))
        if not isinstance(self.decoded, bool):
            raise SchemaError(f"Video: decoded is {self.decoded!r}; want True or False")
        if not self.decoded and (self.num_frames or self.stride):
            raise SchemaError("Video: num_frames and stride choose frames, and decoded=False gives files; drop one")

    @property
    def type(self) -> ArrowType:
        return ArrowType("binary")

    def value_type(self) -> tuple[str, Shape]:
        return ("uint8", (self.num_frames, *self.shape, 3)) if self.decoded else ("bytes", ())

    def encode(self, value: Any) -> Column:
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            self._check(data)
            return data
        frames = array_of(self, value)
        if self.fps is None:
            found = f"an array, {frames.dtype.name} {shape_text(frames.shape)}"
            remedy = "give the bytes of a file, declare fps= to store arrays"
            raise mismatch(self, found, f"{remedy}, or decoded=False where a transform need not see frames")
        check_array(self, frames.dtype, frames.shape, (None, *self.shape, 3), np.dtype(np.uint8))
        if not frames.size:
            raise mismatch(self, "no pixels", "leave the sample out: raise Skip(...)")
        return _ffv1(frames, self.fps)

    def decode(self, column: Column) -> Any:
        data = one_bytes(column)
        return _frames(data, self._numbers) if self.decoded else data

    def prepare(self, value: Any) -> Any:
        # All frames: the transform's result is stored, and `decode` selects among the stored frames.
        return _frames(value, range) if self.decoded and isinstance(value, bytes) else value

    def frames(self, data: bytes, numbers: Sequence[int] | Callable[[int], Iterable[int]] | None = None) -> np.ndarray:
        """Return frames of a file, uint8 (n, height, width, 3), for transforms if `decoded` is False.

        For H.264, HEVC, AV1, VP9, MJPEG and FFV1 in MP4, MOV, MKV and WebM, only these frames, and those back to the
        preceding key frames, are decoded. The frame at `t` seconds has the number `round(t * fps)`.

        Args:
            data: the file.
            numbers: frame numbers, from 0, in any order, or a function that returns them given the number of frames;
                None for those chosen by `num_frames` and `stride`.

        Raises:
            IndexError: there is no frame with this number.
            InputError: the file does not decode.
            MissingDependencyError: av is not installed.

        Example:
            >>> def clip(sample, rng):   # 16 frames in a row, others in each epoch
            ...     def numbers(num_frames):
            ...         start = rng.integers(max(num_frames - 16, 0) + 1)
            ...         return range(start, min(start + 16, num_frames))
            ...
            ...     return {**sample, "video": Video().frames(sample["video"], numbers)}
        """
        if numbers is None:
            return _frames(data, self._numbers)
        return _frames(data, numbers if callable(numbers) else lambda _: numbers)

    def encoded_value(self, column: Column) -> bytes:
        return one_bytes(column)

    def packages(self, *, drawn: bool) -> frozenset[str]:
        del drawn  # files are stored untouched, whatever decodes them
        return frozenset() if self.fps is None else frozenset({"av"})

    def observe(self, column: Any) -> FieldStatistics:
        if importlib.util.find_spec("av") is None:
            return {}
        microseconds = [_asked(data, lambda _, file: file.duration) for data in column]
        known = np.array([one for one in microseconds if one is not None], np.float64)
        return {"seconds": Numbers.of(known / 1_000_000)}

    def declared(self) -> str:
        rate = "" if self.fps is None else f" at {self.fps:g} fps"
        return f"video {'uint8' if self.decoded else 'file'} {shape_text((self.num_frames, *self.shape, 3))}{rate}"

    def display(self, value: Any) -> np.ndarray:
        """Return a strip of four frames, from the first to the last, with gaps: uint8 (height, width of all, 3)."""

        def numbers(num_frames: int) -> list[int]:
            return _spread_over(num_frames, _SHEET)

        frames = value[numbers(len(value))] if self.decoded else self.frames(value, numbers)
        return side_by_side([*frames])

    def _numbers(self, num_frames: int) -> Sequence[int]:
        """Return the numbers of the frames to read from a video with this many."""
        if self.num_frames is None:
            return range(0, num_frames, self.stride or 1)
        if self.stride is None:
            return _spread_over(num_frames, self.num_frames)
        start = max(num_frames - 1 - (self.num_frames - 1) * self.stride, 0) // 2
        return [min(start + place * self.stride, num_frames - 1) for place in range(self.num_frames)]

    def _check(self, data: bytes) -> None:
        """Refuse a file that does not match the declaration, or does not decode to its end."""
        num_frames, size, rate = 0, (0, 0), None
        for frame, average_rate in _decoded_video(data):
            shown = _size_of(frame)
            if num_frames and shown != size:
                found = f"a video of {size} in which frame {num_frames} is {shown}"
                raise mismatch(self, found, "scale it in read")
            num_frames, size, rate = num_frames + 1, shown, average_rate
        if missing := _missing_bytes(data):
            raise InputError(
                f"the field holds a {video_extension(data)} file that is cut short: {missing} bytes are missing; "
                f"{_WHOLE}"
            )
        fits = all(want in (None, found) for want, found in zip(self.shape, size, strict=True))
        if self.fps is not None:
            fits &= rate is not None and abs(float(rate) - self.fps) <= _RATE_TOLERANCE * self.fps
        if not fits:
            at = "" if rate is None else f" at {float(rate):g} fps"
            remedy = "scale or convert it in read, or change the declaration"
            raise mismatch(self, f"a video of {shape_text((num_frames, *size, 3))}{at}", remedy)


def video_extension(data: bytes) -> str:
    """Return the extension of a video file's format by its first bytes; "" if it is not a video file."""
    if data[4:8] == b"ftyp":
        return next((kind for brand, kind in _BRANDS.items() if data[8:12].startswith(brand)), "mp4")
    if data[:4] == b"\x1a\x45\xdf\xa3":  # EBML, whose header names the kind of document
        return "webm" if b"webm" in data[:64] else "mkv" if b"matroska" in data[:64] else ""
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:1] == b"G" and data[_TS_PACKET : _TS_PACKET + 1] == b"G" == data[2 * _TS_PACKET : 2 * _TS_PACKET + 1]:
        return "ts"
    if data[4:8] in _BOXES:  # QuickTime before it had brands
        return "mov"
    return next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "")


def _missing_bytes(data: bytes) -> int:
    """Return the number of bytes missing at the end of a video file, if its container has its length."""
    kind = video_extension(data)
    if kind == "avi":
        return max(8 + int.from_bytes(data[4:8], "little") - len(data), 0)
    if _DEMUXERS.get(kind) == "matroska":
        return max(_end_of_segment(data) - len(data), 0)
    place = 0
    while _DEMUXERS.get(kind) == "mov" and place + 8 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        if size == 1:
            size = int.from_bytes(data[place + 8 : place + 16], "big")
        if size < 8:  # 0: to the end of the file
            return 0
        place += size
    return max(place - len(data), 0)


def _end_of_segment(data: bytes) -> int:
    """Return the end of the first segment of a Matroska file; 0 if unknown."""
    place = 4  # after the ID of the header
    for id_size in (4, 0):
        if place >= len(data) or not data[place]:
            return 0
        width = 9 - data[place].bit_length()
        size = int.from_bytes(data[place : place + width], "big") & ((1 << 7 * width) - 1)
        is_open = size == (1 << 7 * width) - 1  # written by streaming programs
        place += width + size + id_size
        if is_open:
            return 0
    return place


def _spread_over(num_frames: int, count: int) -> list[int]:
    """Return this many frame numbers, as far apart as possible; the first for one."""
    return [place * (num_frames - 1) // max(count - 1, 1) for place in range(count)]


def _av() -> Any:
    try:
        import av
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            "Video needs the package av; install it with: pip install 'datamat[video]'"
        ) from error
    return av


def _decoded_video(data: bytes) -> Iterator[tuple[Any, Fraction | None]]:
    """Yield each frame of a file as an `av.VideoFrame`, in display order, with the rate.

    Raises:
        InputError: its format is not supported, it has no frames, or one is damaged.
        MissingDependencyError: av is not installed.
    """
    av = _av()
    kind = video_extension(data)
    if not kind:
        raise InputError(f"the field: {len(data)} bytes are not a video; {_WHOLE}")
    number = 0
    try:
        with _opened(av, io.BytesIO(data), kind) as file:
            stream = _stream(av, file)
            if stream is None:
                raise InputError(f"the field holds a {kind} file without a video that FFmpeg decodes; {_WHOLE}")
            stream.codec_context.thread_count = 1  # other cores work on other samples
            for frame in file.decode(stream):
                if frame.is_corrupt:
                    raise InputError(f"the field holds a {kind} file whose frame {number} is damaged; {_WHOLE}")
                yield frame, stream.average_rate
                number += 1
    except (av.FFmpegError, EOFError) as error:
        where = f"fails at frame {number}" if number else "does not decode"
        raise InputError(f"the field holds a {kind} file that {where} ({error}); {_WHOLE}") from error
    if not number:
        raise InputError(f"the field holds a {kind} file without a frame; {_WHOLE}")


def _opened(av: Any, source: Any, kind: str) -> Any:
    # Until version 19, tags that are not UTF-8 raise an error unless they are replaced; later there is no choice.
    tags = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    return av.open(source, format=_DEMUXERS[kind], **tags)


def _stream(av: Any, file: Any) -> Any:
    """Return the first video stream with a known codec that is not a cover picture; None if there is none."""
    cover = av.stream.Disposition.attached_pic
    found = [one for one in file.streams.video if one.codec_context is not None and not one.disposition & cover]
    return found[0] if found else None


def _frames(data: bytes, choose: Callable[[int], Iterable[int]]) -> np.ndarray:
    """Return frames of a file, uint8 (n, height, width, 3).

    Args:
        data: the file.
        choose: returns the wanted frame numbers, given the number of frames.
    """
    reformatter = _av().video.reformatter.VideoReformatter()
    outline = _asked(data, _outline) or _Outline(0)
    count = outline.count  # usually one per frame
    while True:
        wanted = [operator.index(number) for number in choose(count)]
        places: dict[int, list[int]] = {}
        for place, number in enumerate(wanted):
            places.setdefault(number, []).append(place)
        is_sought = bool(outline.keys and places) and 0 <= min(places) <= max(places) < count
        numbered = (
            _sought(data, sorted(places), outline)
            if is_sought
            else enumerate(frame for frame, _ in _decoded_video(data))
        )
        found, total, missing = None, 0, len(places)
        for number, frame in numbered:
            if found is None:
                found = np.empty((len(wanted), *_size_of(frame), 3), np.uint8)
            if number in places:
                found[places[number]] = _pixels(reformatter, frame)
                missing -= 1
            total = number + 1
        if is_sought and missing:
            outline = _Outline(count)
        elif is_sought or total == count:
            break
        else:
            count, outline = total, _Outline(total)  # a packet may contain no frame, or two
    wrong = [] if is_sought else [number for number in places if not 0 <= number < total]
    if wrong:
        raise IndexError(f"frame {wrong[0]} of a video with {total}; frames are numbered from 0")
    assert found is not None, "a video without frames is refused"
    return found


@frozen()
class _Outline:
    """The frames of a file, according to its packets.

    Attributes:
        count: number of packets with frames.
        times: display time of each frame, ascending, in the stream's unit.
        keys: numbers of frames at which decoding may begin; empty if that is unsafe or unknown.
    """

    count: int
    times: Sequence[int] = ()
    keys: Sequence[int] = ()


_SOUGHT = {"h264", "hevc", "av1", "vp9", "mjpeg", "ffv1"}
"""Codecs with exactly one displayed frame per packet, unlike VP8 and MPEG-4."""


def _outline(av: Any, file: Any) -> _Outline:
    stream = _stream(av, file)
    if stream is None:
        return _Outline(0)
    packets = [(one.pts, one.is_keyframe, one.is_discard) for one in file.demux(stream) if one.size]
    times = sorted({time for time, *_ in packets if time is not None})
    is_sought = (
        file.format.name.partition(",")[0] in {"mov", "matroska"}
        and stream.codec.canonical_name in _SOUGHT
        and len(times) == len(packets) > 0
        and packets[0][0] == times[0]  # otherwise the first frames may depend on missing ones
        and not any(is_discarded for *_, is_discarded in packets)
    )
    keys = [bisect.bisect_left(times, time) for time, is_key, _ in packets if is_key] if is_sought else []
    return _Outline(len(packets), times, sorted(keys))


def _sought(data: bytes, numbers: Sequence[int], outline: _Outline) -> Iterator[tuple[int, Any]]:
    """Yield frames with their numbers, decoded from the preceding key frames; stop if one is missing.

    Args:
        data: the file.
        numbers: frame numbers, ascending.
        outline: outline of the file, with keys.
    """
    av, place = _av(), 0

    def key_of(number: int) -> int:
        return outline.keys[bisect.bisect_right(outline.keys, number) - 1]

    with contextlib.suppress(av.FFmpegError, EOFError), _opened(av, io.BytesIO(data), video_extension(data)) as file:
        stream = _stream(av, file)
        stream.codec_context.thread_count = 1
        while place < len(numbers):
            file.seek(outline.times[key_of(numbers[place])], stream=stream)
            for frame in file.decode(stream):
                number = bisect.bisect_left(outline.times, frame.pts)
                if number > numbers[place] or frame.is_corrupt:
                    return
                if number == numbers[place] and frame.pts == outline.times[number]:
                    yield number, frame
                    place += 1
                    if place == len(numbers) or key_of(numbers[place]) > number + 1:
                        break
            else:
                return


def _pixels(reformatter: Any, frame: Any) -> np.ndarray:
    """Return a frame as displayed, uint8 (height, width, 3)."""
    pixels = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    return np.rot90(pixels, _turns(frame))


def stretch_of_video(path: str, start_s: float, num_frames: int, fps: float) -> bytes:
    """Return some frames of a longer video as a separate file.

    Its packets are copied to an MP4. If these do not begin with a key frame, or depend on later ones, the frames are
    decoded and stored losslessly.

    Args:
        path: path of an MP4 file.
        start_s: display time of the first frame, in seconds.
        num_frames: number of frames.
        fps: frames per second.

    Raises:
        InputError: the file is damaged or has fewer frames there.
        MissingDependencyError: av is not installed.
    """
    av = _av()
    try:
        with _opened(av, path, "mp4") as file:
            stream = _stream(av, file)
            if stream is None:
                raise InputError(f"{path} holds no video that FFmpeg decodes; copy it again")
            first, last = ((start_s + (number - 0.5) / fps) / stream.time_base for number in (0, num_frames))
            key = round(start_s / stream.time_base)
            file.seek(key, stream=stream)
            packets = [*_packets_until(file, stream, last)]
            within = [place for place, packet in enumerate(packets) if first <= packet.pts < last]
            if len(within) == num_frames:
                packets = packets[within[0] : within[-1] + 1]
                if len(packets) == num_frames and packets[0].is_keyframe:
                    return _remuxed(av, stream, packets)
            file.seek(key, stream=stream)
            shown = itertools.takewhile(lambda frame: frame.pts < last, file.decode(stream))
            frames = [frame for frame in shown if frame.pts >= first and not frame.is_corrupt]
    except (av.FFmpegError, EOFError) as error:
        raise InputError(f"{path} does not decode at {start_s:g} s ({error}); copy it again") from error
    if len(frames) != num_frames:
        raise InputError(
            f"{path} has {count_of(len(frames), 'whole frame')} from {start_s:g} s on, where {num_frames} should be; "
            "copy it again"
        )
    reformatter = av.video.reformatter.VideoReformatter()
    return _ffv1(np.stack([_pixels(reformatter, frame) for frame in frames]), fps)


def _packets_until(file: Any, stream: Any, last: float) -> Iterator[Any]:
    """Yield the packets of a stream until all later ones are displayed after a time."""
    for packet in file.demux(stream):
        if packet.dts is None or packet.dts >= last:
            return
        yield packet


def _remuxed(av: Any, stream: Any, packets: Sequence[Any]) -> bytes:
    """Return packets of a stream as an MP4 file, with deterministic bytes."""
    file, start = io.BytesIO(), packets[0].pts
    with av.open(file, "w", format="mp4", options={"fflags": "bitexact"}) as container:
        copy = container.add_stream_from_template(stream, opaque=True)  # there may be no encoder for the codec
        for packet in packets:
            packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, copy
            container.mux(packet)
    return file.getvalue()


def _turns(frame: Any) -> int:
    """Return the number of counterclockwise quarter turns for displaying a frame."""
    degrees: int = frame.rotation
    return round(degrees / 90)


def _size_of(frame: Any) -> tuple[int, int]:
    """Return height and width of a frame as displayed."""
    return (frame.width, frame.height) if _turns(frame) % 2 else (frame.height, frame.width)


def _asked(data: bytes, ask: Callable[[Any, Any], Any]) -> Any:
    """Return the result of a function of the opened file; None if it cannot be opened, which decoding will explain."""
    av, kind = _av(), video_extension(data)
    if not kind:
        return None
    try:
        with _opened(av, io.BytesIO(data), kind) as file:
            return ask(av, file)
    except (av.FFmpegError, EOFError):
        return None


def _ffv1(frames: np.ndarray, fps: float) -> bytes:
    """Encode frames as FFV1 in MKV, with deterministic bytes: no time of day or random numbers."""
    from fractions import Fraction

    av = _av()
    file = io.BytesIO()
    with av.open(file, "w", format="matroska", options={"fflags": "bitexact"}) as container:
        stream = container.add_stream("ffv1", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0"
        stream.codec_context.thread_count = 1  # the number of threads would affect the bytes
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


built_in(Video)
