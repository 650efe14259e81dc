"""Proves: kernels and model can be imported, and a model computes, where neither Ray nor DeepSpeed nor Hydra is
installed, as on a GPU machine's own Python. Not the trainer, which DeepSpeed is part of."""

import subprocess
import sys

from tests.helpers.source import modules

TRAINER = ("model/trainer.py", "model/optim_adamw.py", "model/optim_hybrid.py")
"""They use DeepSpeed, or what does."""

PROGRAM = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "deepspeed", "hydra", "omegaconf", "tilelang", "tvm_ffi"}:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)

import torch
from rollforward.model.config import preset
from rollforward.model.init import fresh_params
from rollforward.model.transformer import Model

config = preset("tiny")
model = Model(config, fresh_params(config, seed=0), precision="native")
assert torch.isfinite(model.logits(torch.tensor([[1, 2, 3]]))).all()
"""


def test_kernels_and_model_need_no_ray_no_deepspeed_and_no_hydra() -> None:
    paths = [
        module.path
        for module in modules()
        if module.folder in ("kernels", "model")
        and not module.path.endswith(("_tile.py", "__init__.py"))
        and module.path not in TRAINER
    ]
    assert {"model/transformer.py", "model/scoring.py", "kernels/dispatch.py", "kernels/mhc/mix.py"} < set(paths)
    names = ["rollforward." + path.removesuffix(".py").replace("/", ".") for path in paths]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
