"""Proves: 1, 2 and 4 data-parallel ranks take the same steps to the bit, for both optimizers, with expert gradients
rounded
or not, and however many ranks share the dense matrices; a checkpoint of two ranks goes on with one and with four; ranks
stop together where one of them has a bad loss.

Each step has five micro-batches of different lengths, so that ranks have unequal shares, and one step has a single one,
so that three of four ranks have none.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollforward.model.errors import NonFiniteLossError
from rollforward.model.gradient_tree import subtree_bounds
from rollforward.model.precision import PackedTensor
from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import AdamW, BalanceConfig, HybridMuon, OptimConfig
from rollforward.model.trainer import LossPart, Trainer
from tests.helpers.ranks import join_alone, run_on_ranks
from tests.helpers.tiny import random_params, random_tokens, tiny_config

STEPS = ((9, 40, 17, 33, 12), (21,), (8, 30, 5))
"""Lengths of the micro-batches of each step."""

VARIANTS: dict[str, OptimConfig] = {
    "adamw": AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5),
    "muon": HybridMuon(lr=1e-3, weight_decay=0.1, stochastic_rounding=False, zero_size=1),
    "muon, rounded": HybridMuon(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5),
}
TWO_SHARE = "muon, dense matrices on two ranks"
BALANCE = BalanceConfig(bias_update_speed=1e-2, loss_weight=1e-2)


def _leaf(length: int, seed: int) -> ScoringBatch:
    token_ids_T = random_tokens(tiny_config(), (length,), seed=seed)
    scored_mask_T = torch.arange(length) < length - 1
    return ScoringBatch(
        token_ids_T=token_ids_T,
        sequence_lengths=(length,),
        target_ids_T=token_ids_T.roll(-1),
        scored_mask_T=scored_mask_T,
        sequence_weights=(length / 100,),
    )


def _trainer(optim: OptimConfig) -> Trainer:
    config = tiny_config()
    return Trainer(config, random_params(config), precision="native", optim=optim, balance=BALANCE, seed=3)


def _loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
    return LossPart(loss=-logprobs_T.sum() * 1e-2, name=f"micro-batch {index}")


def _take(trainer: Trainer, steps: Sequence[int], rank: int, num_ranks: int) -> float:
    """Take some of the steps on this rank's share and return the last gradient norm."""
    norm = 0.0
    for step in steps:
        lengths = STEPS[step]
        start, stop = subtree_bounds(len(lengths), num_ranks)[rank]
        share = [_leaf(lengths[leaf], seed=100 * step + leaf) for leaf in range(start, stop)]
        norm = trainer.train_step(share, _loss, num_leaves=len(lengths)).grad_norm
    return norm


def _digest(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in tensors.items()}


def _bytes_digest(tensors: dict[str, PackedTensor]) -> dict[str, str]:
    """Published bytes by name, data and scales."""
    found = {f"bytes of {name}": packed.data.view(torch.uint8) for name, packed in tensors.items() if packed.data.dim()}
    scales = {f"scales of {name}": packed.scale for name, packed in tensors.items() if packed.scale is not None}
    return _digest({**found, **scales})


def _outcome(trainer: Trainer, norm: float) -> dict[str, str]:
    return {"norm": norm.hex(), **_digest(trainer.masters()), **_bytes_digest(trainer.published())}


def _variants(num_ranks: int) -> dict[str, OptimConfig]:
    if num_ranks < 4:
        return VARIANTS
    # Two groups of two: the tree goes on across groups. What one rank holds alone is the reference.
    two_share = HybridMuon(lr=1e-3, weight_decay=0.1, stochastic_rounding=False, zero_size=2)
    return {**VARIANTS, TWO_SHARE: two_share}


def steps_on_a_rank(rank: int, num_ranks: int, directory: str) -> None:
    """Take all steps with every variant; then go on after the second step from a checkpoint of two ranks."""
    found: dict[str, Any] = {}
    for label, optim in _variants(num_ranks).items():
        trainer = _trainer(optim)
        found[label] = _outcome(trainer, _take(trainer, (0, 1, 2), rank, num_ranks))
    saved = Path(directory) / "saved"
    trainer = _trainer(VARIANTS["muon, rounded"])
    if num_ranks == 2:
        _take(trainer, (0, 1), rank, num_ranks)
        saved.mkdir(exist_ok=True)
        trainer.save(saved)
        trainer = _trainer(VARIANTS["muon, rounded"])
        torch.distributed.barrier()
    trainer.load(saved)
    assert trainer.num_steps == 2
    found["resumed"] = _outcome(trainer, _take(trainer, (2,), rank, num_ranks))
    (Path(directory) / f"{num_ranks}-{rank}.json").write_text(json.dumps(found))


def bad_loss_on_one_rank(rank: int) -> None:
    """Rank 1 has a loss that is not a number; both must raise and keep their masters."""
    trainer = _trainer(VARIANTS["muon, rounded"])
    before = trainer.masters()

    def loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
        factor = float("nan") if (rank, index) == (1, 1) else 1.0
        return LossPart(loss=logprobs_T.sum() * factor, name=f"micro-batch {index}", worst=("s0-p0-m1 (nan)",))

    share = [_leaf(9, seed=rank), _leaf(11, seed=2 + rank)]
    # The rank whose loss is fine says what the other one found: a driver may hear of it first.
    with pytest.raises(
        NonFiniteLossError, match=r"^step 0, micro-batch 1: the loss is nan.*s0-p0-m1 \(nan\)\. Nothing"
    ):
        trainer.train_step(share, loss, num_leaves=4)
    for name, tensor in trainer.masters().items():
        assert torch.equal(tensor, before[name]), name


def test_steps_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    for num_ranks in (2, 4):
        run_on_ranks(steps_on_a_rank, num_ranks, tmp_path, num_ranks, str(tmp_path))
    join_alone(tmp_path)
    torch.set_num_threads(1)
    steps_on_a_rank(0, 1, str(tmp_path))
    alone = json.loads((tmp_path / "1-0.json").read_text())
    assert alone["muon"] != alone["muon, rounded"] != alone["adamw"]
    assert alone["resumed"] == alone["muon, rounded"], "going on from a checkpoint differs from not stopping"
    for num_ranks in (2, 4):
        for rank in range(num_ranks):
            found = json.loads((tmp_path / f"{num_ranks}-{rank}.json").read_text())
            assert found.pop(TWO_SHARE, alone["muon"]) == alone["muon"], (num_ranks, rank)
            assert found == alone, (num_ranks, rank)


def test_ranks_stop_together_at_a_bad_loss(tmp_path: Path) -> None:
    run_on_ranks(bad_loss_on_one_rank, 2, tmp_path)
