"""Text for a language model: a folder of .txt files becomes shards of token ids, which a training loop reads.

    python examples/tokens.py [FOLDER]

Without a folder, it writes a few texts first. The tokens are bytes, so that the example needs no tokenizer; any other
goes in the place of `tokenize`, with its number of tokens as `vocab_size`.
"""

import pathlib
import sys

from datamat import Text, Tokens, load, materialize

VOCAB_SIZE = 257  # 256 bytes, and the end of the text
END = 256


def write_texts(folder: pathlib.Path) -> None:
    """Write what a crawl or an export would: one text in each file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        words = ("sea", "dusk", "größe", "雪")
        text = " ".join(words[(number + place) % 4] for place in range(number + 1))
        (folder / f"text{number:03d}.txt").write_text(text, encoding="utf-8")


def tokenize(text: str) -> list[int]:
    return [*text.encode(), END]


def read(path: pathlib.Path) -> dict[str, object]:
    return {"tokens": tokenize(path.read_text(encoding="utf-8")), "file": path.name}


folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "texts")
if not folder.exists():
    write_texts(folder)
features = {"tokens": Tokens(vocab_size=VOCAB_SIZE), "file": Text()}
report = materialize(read, sorted(folder.glob("*.txt")), "tokens", features=features, progress=False)
print(report)

dataset = load("tokens")
num_tokens = sum(len(sample["tokens"]) for sample in dataset)
print(f"{len(dataset)} texts, {num_tokens} tokens")
for batch in dataset.to_numpy(batch_size=8, shuffle=True, seed=1, pad={"tokens": END}):
    print(f"a batch {batch['tokens'].dtype} {batch['tokens'].shape}")  # what a model is trained on
    break
