"""Objects of the libraries that dataset code holds on `self`, for real."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from datamat.parallel import PathosExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Augmenting:
    """Holds a pipeline of albumentations, as a writer does."""

    def __init__(self):
        import albumentations

        self.logger = logging.getLogger("augment")
        self.pipeline = albumentations.Compose(
            [albumentations.HorizontalFlip(p=1.0), albumentations.Lambda(image=lambda image, **_: image + 1)], seed=1
        )

    def augment(self, value):
        image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3) + np.uint8(value)
        return self.pipeline(image=image)["image"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_albumentations_pipeline_works_in_workers(method):
    """Lambdas in it included."""
    augmenting = Augmenting()

    with PathosExecutor(2, start_method=method) as pool:
        images = list(pool.map(augmenting.augment, range(4)))

    assert all(np.array_equal(image, augmenting.augment(i)) for i, image in enumerate(images))


class Network:
    """Holds TensorFlow objects that are in use, and what cannot travel."""

    def __init__(self):
        import tensorflow as tf

        self.weights = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
        self.bias = tf.constant([10.0, 20.0])
        self.dataset = tf.data.Dataset.range(3)

    def predict(self, x):
        import tensorflow as tf

        return tf.matmul([x], self.weights).numpy()[0] + self.bias.numpy()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_live_tensorflow_is_not_forked():
    """A matmul in a forked child would hang; the policy takes a forkserver."""
    network = Network()

    with pytest.warns(UserWarning, match=r"self\.dataset: .*Dataset"), PathosExecutor(1) as pool:
        result = pool.submit(network.predict, [1.0, 1.0]).result(timeout=100)

    assert pool.stats().start_method == "forkserver"
    assert result.tolist() == [14.0, 26.0]
