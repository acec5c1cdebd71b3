"""A folder of recordings becomes shards that keep the files, and a training loop reads waveforms from them.

    pip install 'datamat[audio]'
    python examples/audio.py [FOLDER]

Without a folder, it records a few tones first, as FLAC files of 16 kHz.
"""

import pathlib
import sys

import numpy as np
import soundfile

from datamat import Audio, Scalar, load, materialize

RATE = 16_000


def record_tones(folder: pathlib.Path) -> None:
    """Write what a microphone would: HERTZ-NUMBER.flac."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(20):
        hertz, seconds = int(rng.integers(200, 900)), rng.uniform(0.1, 0.4)
        wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(RATE * seconds)) / RATE)
        soundfile.write(folder / f"{hertz}-{number:02d}.flac", wave, RATE)


def read(path: pathlib.Path) -> dict[str, object]:
    return {"sound": path.read_bytes(), "hertz": int(path.name.partition("-")[0])}


def shift(sample: dict, rng: np.random.Generator) -> dict:
    """Begin somewhere in the first half: another place in each epoch."""
    start = int(rng.integers(len(sample["sound"]) // 2))
    return {**sample, "sound": sample["sound"][start:]}


folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tones")
if not folder.exists():
    record_tones(folder)
features = {"sound": Audio(RATE, num_channels=1), "hertz": Scalar("int64")}
print(materialize(read, sorted(folder.glob("*.flac")), "sounds", features=features, progress=False))

dataset = load("sounds")
dataset.preview(4).save("waves.png")
num_samples = sum(len(sample["sound"]) for sample in dataset)
print(f"{len(dataset)} recordings, {num_samples} samples")
for batch in dataset.to_numpy(batch_size=4, shuffle=True, seed=1, transform=shift, pad={"sound": 0.0}):
    waves = batch["sound"][..., 0]
    print(f"a batch {waves.dtype} {waves.shape[0]} x {waves.shape[1]}, {batch['hertz'].tolist()} Hz")
    break
