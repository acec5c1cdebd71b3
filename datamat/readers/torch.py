"""Batches as PyTorch wants them: tensors on the memory of the arrays, shared among the workers of a `DataLoader`."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from datamat.errors import MissingDependencyError

__all__ = ["Torch", "default_rank", "register_iterable"]


@final
class Torch:
    """Batches of tensors."""

    def convert(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with each array as a tensor on the same memory; text stays `str`."""
        return {name: _tensor(value) for name, value in batch.items()}

    def lane(self) -> tuple[int, int]:
        """Return which worker of a `DataLoader` this process is, and how many there are."""
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)


def _tensor(value: Any) -> Any:
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return torch.from_numpy(np.asarray(value))
    return [_tensor(item) for item in value] if isinstance(value, list) else value


def default_rank() -> tuple[int, int]:
    """Return rank and world size of the process group, if there is one."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def register_iterable(kind: type) -> None:
    """Have torch's `DataLoader` take objects of `kind` for an `IterableDataset`.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    try:
        from torch.utils.data import IterableDataset
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "to_torch needs the package torch; install it with: pip install 'datamat[torch]'"
        ) from error
    IterableDataset.register(kind)  # an abstract base class: what it asks for, `__iter__`, is there
