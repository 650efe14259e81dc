"""Proves: a trainer's step is AdamW on the straight-through gradient, micro-batches only add up, a saved trainer goes
on
bit for bit, and a bad loss changes nothing.

One rank. Not here: several ranks, losses (tests/rl), equality with the engine (tests/parity/test_trainer_engine.py).
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.errors import CheckpointError, NonFiniteLossError, TrainerError
from rollforward.model.precision import pack_published, unpack_published
from rollforward.model.scoring import ScoringBatch, target_logprobs
from rollforward.model.shapes import param_specs
from rollforward.model.train_config import AdamW
from rollforward.model.trainer import LossFunction, LossPart, Trainer
from rollforward.model.transformer import Transformer
from rollforward.model.weights import build_weights, published_tensors
from tests.helpers.ranks import join_alone
from tests.helpers.tiny import random_params, random_tokens, tiny_config

LENGTHS = (5, 40, 17, 33)


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> None:
    join_alone(tmp_path)


def _batch(config: ModelConfig, lengths: Sequence[int], seed: int) -> ScoringBatch:
    token_ids_T = random_tokens(config, (sum(lengths),), seed=seed)
    scored = torch.ones(token_ids_T.shape, dtype=torch.bool)
    scored[torch.tensor(lengths).cumsum(0) - 1] = False
    return ScoringBatch(
        token_ids_T=token_ids_T,
        sequence_lengths=tuple(lengths),
        target_ids_T=token_ids_T.roll(-1),
        scored_mask_T=scored,
    )


def _parts(whole: ScoringBatch) -> list[ScoringBatch]:
    """Each sequence of a batch as a batch of its own."""
    bounds = [0, *torch.tensor(whole.sequence_lengths).cumsum(0).tolist()]
    return [
        ScoringBatch(
            token_ids_T=whole.token_ids_T[a:b],
            sequence_lengths=(b - a,),
            target_ids_T=whole.target_ids_T[a:b],
            scored_mask_T=whole.scored_mask_T[a:b],
        )
        for a, b in itertools.pairwise(bounds)
    ]


def _negative_sum(scale: float = 1e-2) -> LossFunction:
    return lambda index, logprobs_T, _entropy_T: LossPart(loss=-logprobs_T.sum() * scale, name=f"micro-batch {index}")


def _trainer(config: ModelConfig, **optim: float) -> Trainer:
    settings = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5} | optim
    return Trainer(config, random_params(config), precision="native", optim=AdamW(**settings))


def _values(trainer: Trainer) -> dict[str, Tensor]:
    return {name: unpack_published(packed) for name, packed in trainer.published().items()}


def _adamw_step(
    config: ModelConfig, batches: list[ScoringBatch], max_norm: float
) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """The same step by plain torch: masters, gradient norm and gradients."""
    masters = random_params(config)
    trained = [spec.name for spec in param_specs(config) if spec.trained]
    for name in trained:
        masters[name].requires_grad_(True)
    transformer = Transformer(config, "native")
    for batch in batches:
        weights = build_weights(config, published_tensors(config, masters))
        (-target_logprobs(transformer, weights, batch, temperature=1.0)[0].sum() * 1e-2).backward()
    gradients = {name: masters[name].grad.clone() for name in trained if masters[name].grad is not None}
    norm = float(torch.nn.utils.clip_grad_norm_([masters[name] for name in trained], max_norm))
    decayed = [masters[name] for name in trained if masters[name].dim() >= 2]
    plain = [masters[name] for name in trained if masters[name].dim() < 2]
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    ).step()
    return {name: tensor.detach() for name, tensor in masters.items()}, norm, gradients


@pytest.mark.parametrize("max_norm", [0.5, float("inf")])
def test_a_step_is_adamw_on_the_straight_through_gradient(max_norm: float) -> None:
    """Where a gradient is near 0 Adam's first step is its sign, so rounding decides; such elements are left out."""
    config = tiny_config()
    batches = _parts(_batch(config, LENGTHS, seed=5))
    trainer = _trainer(config, max_grad_norm=max_norm)
    result = trainer.train_step(batches, _negative_sum())
    masters, norm, gradients = _adamw_step(config, batches, max_norm)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    got = trainer.masters()
    for name, gradient in gradients.items():
        clear = gradient.abs() > 1e-6 * norm
        difference = (got[name] - masters[name]).abs()[clear]
        assert difference.numel() == 0 or float(difference.max()) <= 2e-6, name
        before = random_params(config)[name]
        assert float((got[name] - before).abs().max()) > 1e-4, f"{name} did not move"


def test_frozen_tensors_stay_and_are_published() -> None:
    config = tiny_config()
    trainer = _trainer(config)
    trainer.train_step([_batch(config, LENGTHS, seed=5)], _negative_sum())
    before, after = random_params(config), trainer.published()
    frozen = [spec for spec in param_specs(config) if not spec.trained]
    assert {spec.name.split(".")[0] for spec in frozen} >= {"mtp"}
    for spec in frozen:
        expected = pack_published(spec, before[spec.name])
        assert torch.equal(after[spec.name].data.view(torch.uint8), expected.data.view(torch.uint8)), spec.name


def test_micro_batches_only_add_up() -> None:
    """The same sequences as one, two and four micro-batches: equal loss and gradient norm up to rounding."""
    config = tiny_config()
    whole = _batch(config, LENGTHS, seed=5)
    results = [_trainer(config).train_step(parts, _negative_sum()) for parts in ([whole], _parts(whole))]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)


def test_a_saved_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = tiny_config()
    batches = [_batch(config, LENGTHS, seed=seed) for seed in range(4)]
    whole = _trainer(config, warmup_steps=3)
    for batch in batches:
        whole.train_step([batch], _negative_sum())
    first = _trainer(config, warmup_steps=3)
    for batch in batches[:2]:
        first.train_step([batch], _negative_sum())
    first.save(tmp_path)
    second = _trainer(config, warmup_steps=3)
    second.load(tmp_path)
    assert second.num_steps == 2
    for batch in batches[2:]:
        second.train_step([batch], _negative_sum())
    for name, tensor in whole.masters().items():
        assert torch.equal(tensor, second.masters()[name]), name


def test_two_trainers_take_the_same_bits() -> None:
    config = tiny_config()
    trainers = [_trainer(config), _trainer(config)]
    for trainer in trainers:
        for seed in range(3):
            trainer.train_step(_parts(_batch(config, LENGTHS, seed=seed)), _negative_sum())
    for name, tensor in trainers[0].masters().items():
        assert torch.equal(tensor, trainers[1].masters()[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_loss_changes_nothing_and_names_its_sequences(bad: float) -> None:
    config = tiny_config()
    trainer = _trainer(config)
    good, worse = _batch(config, LENGTHS, seed=1), _batch(config, LENGTHS, seed=2)

    def loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
        factor = bad if index == 1 else 1e-2
        return LossPart(loss=-logprobs_T.sum() * factor, name=f"micro-batch {index}", worst=("s0-p1-m2 (nan)",))

    before = trainer.masters()
    with pytest.raises(NonFiniteLossError, match=r"step 0, micro-batch 1.*s0-p1-m2"):
        trainer.train_step([good, worse], loss)
    assert trainer.num_steps == 0
    for name, tensor in trainer.masters().items():
        assert torch.equal(tensor, before[name]), name
    untouched = _trainer(config)
    for one in (trainer, untouched):
        one.train_step([good], _negative_sum())
    for name, tensor in trainer.masters().items():
        assert torch.equal(tensor, untouched.masters()[name]), f"{name} kept a gradient of the failed step"


def test_a_gradient_that_is_not_finite_stops_the_run_although_the_loss_is_finite() -> None:
    config = tiny_config()
    trainer = _trainer(config)

    def loss(index: int, logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
        return LossPart(loss=(logprobs_T.sum() * 0).sqrt(), name=f"micro-batch {index}")

    before = trainer.masters()
    with pytest.raises(NonFiniteLossError, match=r"step 0: the loss is 0\.0, its gradient is not finite"):
        trainer.train_step([_batch(config, (9,), seed=1)], loss)
    assert trainer.num_steps == 0
    for name, tensor in trainer.masters().items():
        assert torch.equal(tensor, before[name]), name


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(TrainerError, match="no micro-batch"):
        _trainer(tiny_config()).train_step([], _negative_sum())


def test_warm_up_rises_linearly_to_the_rate() -> None:
    config = tiny_config()
    trainer = _trainer(config, warmup_steps=4)
    batch = _batch(config, (9,), seed=1)
    rates = [trainer.train_step([batch], _negative_sum()).learning_rate for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_the_rate_falls_linearly_after_the_warm_up() -> None:
    config = tiny_config()
    trainer = _trainer(config, warmup_steps=2, decay_steps=4)
    batch = _batch(config, (9,), seed=1)
    rates = [trainer.train_step([batch], _negative_sum()).learning_rate for _ in range(6)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert AdamW(lr=1.0, decay_steps=4).rate(4) == 0.0


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(tiny_config())

    def full(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 11413632 vs 11413512")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot be written \(\d+ bytes are free\).*Make room"):
        trainer.save(tmp_path)
