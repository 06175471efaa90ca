"""The data sets, both real and shipped with a package: handwritten digits, and the prose of Python's own manual.

The digits are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning
Repository, 1998, CC BY 4.0), 1,797 images of 8 x 8 in 17 grey levels, in `digits.npz`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from mlsyslab.labs.scaleup.config import Config

ORIGINALS = 1437  # digits that the training set is drawn from; the other 360 make the test set
TEST_SAMPLES = 4096
NOISE = 0.15  # so that shifted copies are no duplicates; standard deviations
MEAN, DEVIATION = 0.281, 0.400  # of all pixels of the training set, which is what the models see standardised
CONTEXT = 6  # characters that predict the next one
PARAGRAPH = (5, 200)  # shortest and longest paragraph in characters
PAD = -100  # a target that counts for nothing, as torch's cross_entropy has it


class Batch(NamedTuple):
    """Samples of one step: ids (n,), x (n, ...) and y, which is (n,) or (n, length) with PAD."""

    ids: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor

    def weight(self) -> int:
        """Targets that count: samples, or tokens."""
        return int((self.y != PAD).sum())


class Tensors(Dataset[Batch]):
    """Tensors as a data set that is fetched a batch at a time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        """What DataLoader calls where it is there."""
        ids = torch.tensor(indices)
        return Batch(ids, self.x[ids], self.y[ids])


@lru_cache(maxsize=2)
def digits(samples: int) -> tuple[Tensors, Tensors]:
    """Training and test set: originals shifted by up to a pixel, with noise; the test originals are never trained on."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images = torch.from_numpy(stored["images"].astype(np.float32)).reshape(-1, 8, 8) / 16
        labels = torch.from_numpy(stored["labels"].astype(np.int64))
    generator = torch.Generator().manual_seed(1998)
    order = torch.randperm(len(images), generator=generator)

    def drawn(chosen: torch.Tensor, count: int) -> Tensors:
        pick = chosen[torch.randint(len(chosen), (count,), generator=generator)]
        shift = torch.randint(0, 3, (count, 2), generator=generator)
        padded = torch.nn.functional.pad(images[pick], (1, 1, 1, 1))
        rows = (shift[:, :1] + torch.arange(8)).unsqueeze(2)
        columns = (shift[:, 1:] + torch.arange(8)).unsqueeze(1)
        moved = padded[torch.arange(count).reshape(-1, 1, 1), rows, columns].reshape(count, 64)
        return Tensors(
            (moved + NOISE * torch.randn(count, 64, generator=generator) - MEAN) / DEVIATION, labels[pick]
        )

    return drawn(order[:ORIGINALS], samples), drawn(order[ORIGINALS:], TEST_SAMPLES)


@lru_cache(maxsize=2)
def prose(samples: int) -> tuple[Tensors, Tensors]:
    """Paragraphs of Python's help topics, each with its own length: x are the CONTEXT characters before each target.

    The text differs between versions of Python. Where more samples are asked for than there are paragraphs, they repeat.
    """
    from pydoc_data.topics import topics

    short, long = PARAGRAPH
    text = "\n\n".join(topics[name] for name in sorted(topics))
    found = [" ".join(part.split())[:long] for part in text.split("\n\n")]
    found = [part for part in found if len(part) >= short]
    held_out = len(found) // 10
    x = torch.zeros(len(found), long, CONTEXT, dtype=torch.int64)
    y = torch.full((len(found), long), PAD, dtype=torch.int64)
    for at, part in enumerate(found):
        codes = torch.tensor([0] * CONTEXT + [ord(c) - 31 if 32 <= ord(c) < 127 else 96 for c in part])
        y[at, : len(part)] = codes[CONTEXT:]
        x[at, : len(part)] = codes[:-1].unfold(0, CONTEXT, 1)
    train = (torch.arange(samples) % (len(found) - held_out)) + held_out
    return Tensors(x[train], y[train]), Tensors(x[:held_out], y[:held_out])


def data_sets(config: Config) -> tuple[Tensors, Tensors]:
    """Training and test set of a config."""
    return {"digits": digits, "prose": prose}[config.task](config.samples)


class Short(Sampler[int]):
    """Another sampler without its last `missing` samples: a shard that is a batch short."""

    def __init__(self, sampler: Any, missing: int) -> None:
        self.sampler, self.missing = sampler, missing

    def __len__(self) -> int:
        return len(self.sampler) - self.missing

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), len(self))


def batches(data: Tensors, config: Config, rank: int, world: int) -> Iterator[Batch]:
    """The batches of one rank, epoch after epoch without an end, with the fault of the config if it sits in the data."""
    sampler: Any = DistributedSampler(data, world, rank, shuffle=True, seed=config.seed)
    epoch_of = sampler
    if config.cause == "samples duplicated":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(config.seed))
    elif config.cause == "samples skipped" and rank == config.fault_rank:
        sampler = Short(sampler, config.per_rank)
    loader = DataLoader(
        data, batch_size=config.whole_batch // world, sampler=sampler, drop_last=True, collate_fn=lambda batch: batch
    )  # fmt: skip
    for epoch in itertools.count():
        if config.cause != "set_epoch forgotten":
            epoch_of.set_epoch(epoch)
        yield from loader
