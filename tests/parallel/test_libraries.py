"""Objects of the libraries that dataset code holds on `self`, for real."""

import logging
import textwrap
import threading

import numpy as np
import pytest
from fresh import python

from datamat.parallel import PathosExecutor

pytestmark = [pytest.mark.timeout(120)]


class Augmenting:
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
    augmenting = Augmenting()

    with PathosExecutor(2, start_method=method) as pool:
        images = list(pool.map(augmenting.augment, range(4)))

    assert all(np.array_equal(image, augmenting.augment(i)) for i, image in enumerate(images))


class Learner:
    def __init__(self, torch):
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = torch.utils.data.DataLoader(list(range(4)), batch_size=2)
        self.generator = torch.Generator().manual_seed(3)
        self.lock = threading.RLock()

    def look(self, values):
        import torch

        with self.lock, torch.no_grad():
            shown = self.model(torch.tensor(values)).tolist()
        return shown, [batch.tolist() for batch in self.batches], torch.rand(2, generator=self.generator).tolist()


@pytest.mark.parametrize("chosen", [None, "fork", "spawn"])
def test_torch_objects_work_in_workers(chosen):
    """Models, optimizers, loaders and generators arrive in the state that they have in the caller."""
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    torch.set_num_threads(2)
    learner = Learner(torch)
    learner.model(torch.ones(100_000, 3)).sum().backward()

    with PathosExecutor(1, start_method=chosen) as pool:
        found = pool.submit(learner.look, [1.0, 2.0, 3.0]).result(timeout=100)

    assert chosen in (None, pool.stats().start_method)
    assert found == learner.look([1.0, 2.0, 3.0])


@pytest.mark.long  # TensorFlow takes seconds to import; test_native_threads.py has another program that uses it
def test_live_tensorflow_is_not_forked():
    """A matmul in a forked child would hang, so the pool takes a forkserver; what cannot travel says so."""
    program = """
        import warnings

        import tensorflow as tf
        from datamat.parallel import PathosExecutor

        class Network:
            def __init__(self):
                self.weights = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
                self.bias = tf.constant([10.0, 20.0])
                self.dataset = tf.data.Dataset.range(3)

            def predict(self, x):
                return tf.matmul([x], self.weights).numpy()[0] + self.bias.numpy()

        with warnings.catch_warnings(record=True) as caught, PathosExecutor(1) as pool:
            warnings.simplefilter("always")
            result = pool.submit(Network().predict, [1.0, 1.0]).result(timeout=100)
        print(result.tolist(), pool.stats().start_method, any("self.dataset: " in str(each.message) for each in caught))
    """

    done = python("-c", textwrap.dedent(program), timeout=110)

    assert done.stdout == "[14.0, 26.0] forkserver True\n", done.stderr
