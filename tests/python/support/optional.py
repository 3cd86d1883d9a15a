"""Packages that some tests need."""

from __future__ import annotations

import importlib.util

import pytest

needs_safetensors = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="safetensors is not installed"
)
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="DeepSpeed is not installed (.venv/bin/pip install deepspeed)"
)
