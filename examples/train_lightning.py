"""Lightning: a `LightningDataModule` whose loaders resume in mid-epoch.

    python examples/train_lightning.py

Lightning saves the state of a loader with its checkpoints, where the loader has `state_dict`, as those of `to_torch`
do. So a run that is killed continues with the batch after its last checkpoint: no record comes twice, and none is left
out. The pictures are the discs and squares of `shapes.py`.
"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from shapes import write_shapes

from datamat import load


class Shapes(lightning.LightningDataModule):
    """Makes the shards once, and reads them on each rank."""

    def prepare_data(self) -> None:
        write_shapes("out", 640)

    def train_dataloader(self):  # rank and world size come from torch.distributed
        return load("out", "train").to_torch(32, shuffle=True, seed=1, drop_last=True)

    def val_dataloader(self):
        return load("out", "val").to_torch(32)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 5, stride=2), torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 5, stride=2), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.LazyLinear(2),
        )  # fmt: skip
        self.seen: list[str] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images.permute(0, 3, 1, 2) / 255)  # channels first in shape, last in memory

    def training_step(self, batch, number):
        self.seen += batch["key"]
        return torch.nn.functional.cross_entropy(self(batch["image"]), batch["label"])

    def validation_step(self, batch, number):
        self.log("accuracy", (self(batch["image"]).argmax(1) == batch["label"]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 3e-3)


def trainer(max_steps: int = -1) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=10,
        max_steps=max_steps,
        accelerator="cpu",
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=5, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


lightning.seed_everything(1)
first = Classifier()
trainer(max_steps=10).fit(first, Shapes())  # it ends in the middle of the first epoch, as if it had been killed

second, rest = Classifier(), trainer()
rest.fit(second, Shapes(), ckpt_path=rest.checkpoint_callback.format_checkpoint_name({"epoch": 0, "step": 10}))
num_train = len(load("out", "train")) // 32 * 32
epoch = first.seen + second.seen[: num_train - len(first.seen)]
print(
    f"{len(first.seen)} records before, the epoch's other {num_train - len(first.seen)} after: {len({*epoch})} in all"
)
print(f"accuracy {float(rest.callback_metrics['accuracy']):.2f}")
