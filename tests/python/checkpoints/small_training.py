"""A small training for checkpoints, and helpers to look into their folder."""

from __future__ import annotations

import os
import pathlib
import random

import annulus.torch as at
import numpy as np
import pytest
import torch
from torch import nn


class Position:
    """The position in the data: numbers, strings, a tuple, a tensor, keys that are not strings."""

    def __init__(self) -> None:
        self.state: dict = {"epoch": 0}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


class Training:
    """Uses everything that a checkpoint holds. Every step depends on random numbers."""

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        head.weight = embedding.weight  # tied
        self.model = nn.Sequential(embedding, nn.Dropout(0.5), nn.LayerNorm(8), head)
        self.model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=100)
        self.generator = torch.Generator().manual_seed(seed)
        self.position = Position()
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
            "position": self.position,
        }

    def step(self, step: int) -> float:
        tokens = torch.randint(11, (4, 5), generator=self.generator)
        logits = self.model(tokens) * (1 + random.random() + np.random.standard_normal() / 100)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.model.count += 1
        self.position.state = {
            "step": step,
            "file": ("a.txt", step * 7),
            3: None,
            "best": float("inf"),
            "order": torch.arange(step),
            "$odd": [True, 0.1],
        }
        return loss.item()


def train(folder: pathlib.Path, steps: int, interval: int = 2, **options: object) -> list[float]:
    training = Training()
    with at.Checkpoints(folder, interval, **options) as checkpoints:
        first = checkpoints.resume(training.state).step + 1
        losses = []
        for step in range(first, steps + 1):
            losses.append(training.step(step))
            checkpoints.step(step, training.state)
    return losses


def names(folder: pathlib.Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".lock")


def resumed(folder: pathlib.Path) -> at.Resumed:
    with at.Checkpoints(folder, None) as checkpoints:
        return checkpoints.resume(Training(1).state)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    records = (r for r in caplog.records if r.name == "annulus.checkpoints")
    return [(record.levelno, record.getMessage()) for record in records]


def only_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    return next((folder / name).glob("*.safetensors"))
