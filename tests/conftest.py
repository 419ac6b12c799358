"""Shared by all tests: helper modules in this folder are importable, nothing reaches a hub, threads do not fight."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
