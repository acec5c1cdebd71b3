"""Keras: pictures become shards, and `fit` trains on them.

    python examples/train_keras.py

The pictures are the discs and squares of `shapes.py`.
"""

import keras
from shapes import SIZE, write_shapes

from datamat import load

write_shapes("out", 1200)
train, val = load("out", "train"), load("out", "val")

keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.layers.Input((SIZE, SIZE, 3)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
        keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(2, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
pairs = ("image", "label")  # a tuple (inputs, targets) in place of a dict
history = model.fit(
    train.to_tf(32, shuffle=True, seed=1, as_supervised=pairs),
    validation_data=val.to_tf(64, as_supervised=pairs),
    epochs=10,
    verbose=0,
)
print(f"{len(train)} pictures, {len(val)} more; accuracy on these {history.history['val_accuracy'][-1]:.2f}")
