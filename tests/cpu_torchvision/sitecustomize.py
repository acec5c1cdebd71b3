"""Lets torchvision be imported beside a torch for processors alone, where this folder is on PYTHONPATH.

PyPI has torchvision for the torch of CUDA only. Beside torch's build for processors its compiled operators cannot be
loaded, and its import fails at the first of them, `torchvision::nms`. Its transforms need none: once the operators are
declared, everything else of it runs as published. Where they can be loaded, nothing is declared.
"""

import importlib.util
import pathlib
import sys


class _BeforeTorchvision:
    """Finds nothing, but learns when torchvision is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            if spec := importlib.util.find_spec(name):
                _declare_operators(pathlib.Path(spec.origin).parent)


def _declare_operators(folder):
    import torch

    try:
        for path in folder.glob("_C*.so"):
            torch.ops.load_library(path)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
