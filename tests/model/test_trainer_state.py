"""Proves: of a saved trainer state nothing is taken that is not the whole state of one save and of this model: every
damage is a TrainerError that names the file, whatever safetensors, torch or Python would have made of it.

One rank. Not here: that a whole state goes on bit for bit (test_trainer.py), on other ranks (tests/parity,
tests/faults), and bytes that changed within their tensor (tests/rl/test_checkpoints.py).
"""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollforward.kernels.errors import NonFiniteError
from rollforward.model.errors import TrainerError
from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import HybridMuon
from rollforward.model.trainer import LossPart, Trainer
from tests.helpers.ranks import join_alone
from tests.helpers.tiny import random_params, random_tokens, tiny_config

ADAMW, BIASES, STATE = "adamw.safetensors", "gate_biases.safetensors", "trainer.json"
DENSE, EXPERTS = "muon.dense.00000.safetensors", "muon.experts.00000.safetensors"
FILES = (ADAMW, BIASES, DENSE, EXPERTS, STATE)


def _trainer() -> Trainer:
    return Trainer(tiny_config(), random_params(tiny_config()), precision="native", optim=HybridMuon(lr=1e-3))


def _loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
    return LossPart(loss=-logprobs_T.sum() * 1e-2, name=f"micro-batch {index}")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One run after its first and after its second step."""
    root = tmp_path_factory.mktemp("saves")
    join_alone(root)
    trainer = _trainer()
    token_ids_T = random_tokens(tiny_config(), (12,), seed=1)
    batch = ScoringBatch(
        token_ids_T=token_ids_T,
        sequence_lengths=(12,),
        target_ids_T=token_ids_T.roll(-1),
        scored_mask_T=torch.arange(12) < 11,
    )
    for name in ("first", "second"):
        trainer.train_step([batch], _loss)
        (root / name).mkdir()
        trainer.save(root / name)
    return root / "first", root / "second"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One for all tests: what it is refused leaves it as good as any to refuse the next."""
    join_alone(tmp_path_factory.mktemp("group"))
    return _trainer()


@pytest.fixture
def state(saves: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first save, to damage."""
    return Path(shutil.copytree(saves[0], tmp_path / "state"))


def _rewritten(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file and keep what it says of itself."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def test_the_files_are_these_and_undamaged_they_load(trainer: Trainer, state: Path) -> None:
    assert sorted(path.name for path in state.iterdir()) == sorted(FILES)
    trainer.load(state)
    assert trainer.num_steps == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 10, -7])
def test_a_file_cut_short_is_refused(trainer: Trainer, state: Path, name: str, length: int) -> None:
    (state / name).write_bytes((state / name).read_bytes()[:length])
    with pytest.raises(TrainerError, match="holds no trainer state that can be read"):
        trainer.load(state)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_refused(trainer: Trainer, state: Path, name: str) -> None:
    (state / name).unlink()
    with pytest.raises(TrainerError, match=r"holds no trainer state|does not hold the state of"):
        trainer.load(state)


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_saves_are_refused(trainer: Trainer, saves: tuple[Path, Path], state: Path, name: str) -> None:
    shutil.copy(saves[1] / name, state / name)
    with pytest.raises(TrainerError, match=r"is of step [12], the state beside it of step [12]; files of one save"):
        trainer.load(state)


@pytest.mark.parametrize(("one", "other"), [p for p in itertools.combinations(FILES[:4], 2) if p != (DENSE, EXPERTS)])
def test_files_under_each_others_names_are_refused(trainer: Trainer, state: Path, one: str, other: str) -> None:
    """Those of Muon alone say themselves which matrices they hold: their names mean nothing."""
    first, second = (state / one).read_bytes(), (state / other).read_bytes()
    (state / one).write_bytes(second)
    (state / other).write_bytes(first)
    with pytest.raises(TrainerError, match=r"does not hold|holds no trainer state|has shape"):
        trainer.load(state)


@pytest.mark.parametrize(
    ("file", "tensor"),
    [(ADAMW, "embed.weight"), (ADAMW, "norm.weight.exp_avg_sq"), (BIASES, "layers.1.ffn.gate.bias")],
)
@pytest.mark.parametrize("damage", ["gone", "short", "one element"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(
    trainer: Trainer, state: Path, file: str, tensor: str, damage: str
) -> None:
    """One element would be stretched over the whole tensor by a copy."""

    def change(tensors: dict[str, Tensor]) -> None:
        found = tensors.pop(tensor)
        if damage != "gone":
            tensors[tensor] = (found[:-1] if damage == "short" else found.flatten()[:1]).clone()

    _rewritten(state / file, change)
    message = (
        f"{file} does not hold {tensor}" if damage == "gone" else rf"{file}: {tensor} has shape \[.*\], this model"
    )
    with pytest.raises(TrainerError, match=message):
        trainer.load(state)


@pytest.mark.parametrize("part", ["masters", "momenta"])
@pytest.mark.parametrize("file", [DENSE, EXPERTS])
def test_a_share_shorter_than_its_matrices_is_refused(trainer: Trainer, state: Path, file: str, part: str) -> None:
    _rewritten(state / file, lambda tensors: tensors.update({part: tensors[part][:-1].clone()}))
    with pytest.raises(TrainerError, match=rf"{file}: {part} has shape"):
        trainer.load(state)


def test_a_file_that_says_nothing_of_itself_is_refused(trainer: Trainer, state: Path) -> None:
    save_file(load_file(state / DENSE), state / DENSE)
    with pytest.raises(TrainerError, match=r"is of step unknown"):
        trainer.load(state)


def test_a_negative_number_of_steps_is_refused(trainer: Trainer, state: Path) -> None:
    (state / STATE).write_text(json.dumps({"num_steps": -3}))
    with pytest.raises(TrainerError, match="holds no trainer state that can be read"):
        trainer.load(state)


@pytest.mark.parametrize("file", [DENSE, EXPERTS])
def test_masters_that_are_not_finite_are_never_published(trainer: Trainer, state: Path, file: str) -> None:
    _rewritten(state / file, lambda tensors: tensors["masters"].__setitem__(5, torch.nan))
    with pytest.raises(NonFiniteError, match="must be finite"):
        trainer.load(state)
