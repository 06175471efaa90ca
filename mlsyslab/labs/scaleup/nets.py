"""The models: a multilayer perceptron for digits, and one that reads six characters for prose."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from mlsyslab.labs.scaleup.config import CLASSES, Config
from mlsyslab.labs.scaleup.data import CONTEXT, PAD

WIDTH = 64
EMBEDDING = 16


def build(config: Config, seed: int) -> nn.Module:
    """The model with its initial weights drawn from `seed`: normal, `gain` times Kaiming's deviation, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    classes = CLASSES[config.task]
    layers: list[nn.Module] = []
    if config.task == "prose":
        layers += [nn.Embedding(classes, EMBEDDING), nn.Flatten(-2)]
    sizes = [CONTEXT * EMBEDDING if config.task == "prose" else 64, *[WIDTH] * 3]
    for before, after in itertools.pairwise(sizes):
        layers.append(nn.Linear(before, after))
        if config.norm != "none":
            layers.append(nn.BatchNorm1d(after) if config.norm == "batch" else nn.GroupNorm(8, after))
        layers.append(nn.ReLU())
    layers.append(nn.Linear(WIDTH, classes))
    model = nn.Sequential(*layers)
    for layer in model:
        if isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, generator=generator)
        elif isinstance(layer, nn.Linear):
            wide = layer.in_features
            if config.gain:
                nn.init.normal_(layer.weight, 0.0, config.gain * math.sqrt(2 / wide), generator=generator)
                nn.init.zeros_(layer.bias)
            else:  # as torch.nn.Linear does, from our own generator
                nn.init.uniform_(layer.weight, -1 / math.sqrt(wide), 1 / math.sqrt(wide), generator=generator)
                nn.init.uniform_(layer.bias, -1 / math.sqrt(wide), 1 / math.sqrt(wide), generator=generator)
    return model


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the targets that count."""
    return nn.functional.cross_entropy(
        output.float().reshape(-1, output.shape[-1]), target.reshape(-1), ignore_index=PAD, reduction="sum"
    )


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Mean loss and accuracy on a test set, by the running statistics where there is BatchNorm."""
    model.eval()
    output = model(x)
    model.train()
    counted = y != PAD
    right = (output.argmax(-1) == y)[counted].float().mean().item()
    return loss_sum(output, y).item() / int(counted.sum()), right


def sharpness(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, iterations: int = 15) -> float:
    """The largest eigenvalue of the loss' Hessian, by power iteration on Hessian-vector products (Pearlmutter 1994).

    Gradient descent with momentum beta is unstable along its direction where it exceeds 2 (1 + beta) / lr.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    counted = int((y != PAD).sum())
    gradient = torch.autograd.grad(loss_sum(model(x), y) / counted, parameters, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradient])
    vector = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat.device)
    value = 0.0
    for _ in range(iterations):
        vector = vector / vector.norm()
        product = torch.autograd.grad(flat @ vector, parameters, retain_graph=True)
        image = torch.cat([p.reshape(-1) for p in product])
        value = float(vector @ image)
        vector = image
        if not math.isfinite(value) or not float(image.norm()):
            break
    return value
