"""PyTorch: pictures become shards, a plain training loop reads them, and a checkpoint resumes in mid-epoch.

    pip install 'datamat[torch]'
    python examples/torch_training.py

The pictures are the discs and squares of `shapes.py`. `to_torch` is the whole loader: it decodes in threads, shuffles,
batches, and has a state that goes into the checkpoint, beside those of the model and the optimizer.
"""

import torch
from shapes import write_shapes

from datamat import load

write_shapes("out", 640)
train, val = load("out", "train"), load("out", "val")
torch.manual_seed(1)


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 5, stride=2), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 5, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(400, 2),
    )  # fmt: skip
    return model, torch.optim.Adam(model.parameters(), 3e-3)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> None:
    images = batch["image"].permute(0, 3, 1, 2) / 255  # channels first in shape, last in memory
    loss = torch.nn.functional.cross_entropy(model(images), batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


model, optimizer = make_model()
loader = train.to_torch(32, shuffle=True, seed=1)
before = []
for batch in loader:
    step(model, optimizer, batch)
    before += batch["key"]
    if len(before) == 160:  # the power fails here
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(parts, "checkpoint.pt")
        break

model, optimizer = make_model()  # another process, later
loader = train.to_torch(32, shuffle=True, seed=1)
saved = torch.load("checkpoint.pt")
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
loader.load_state_dict(saved["loader"])
after = []
for batch in loader:  # what was left of the epoch
    step(model, optimizer, batch)
    after += batch["key"]
assert not {*before} & {*after}
print(f"{len(before)} records before, {len(after)} after: {len({*before, *after})} of {len(train)}")
for _ in range(9):
    for batch in loader:
        step(model, optimizer, batch)

with torch.no_grad():
    right = sum(
        int((model(batch["image"].permute(0, 3, 1, 2) / 255).argmax(1) == batch["label"]).sum())
        for batch in val.to_torch(64)
    )
print(f"accuracy {right / len(val):.2f}")
