"""Proves: a trainer's step is AdamW, or Muon with AdamW, on the straight-through gradient; micro-batches only add up; a
saved trainer goes on bit for bit; a bad loss changes nothing; gate biases follow the loads.

One rank. Not here: several ranks (tests/parity/test_ranks.py), losses (tests/rl), equality with the engine
(tests/parity/test_trainer_engine.py).
"""

import itertools
import resource
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.model.errors import CheckpointError, NonFiniteLossError, TrainerError
from rollforward.model.fingerprint import with_format
from rollforward.model.precision import pack_published, unpack_published
from rollforward.model.published import PublishedWeights
from rollforward.model.routing import Routing
from rollforward.model.scoring import ScoringBatch, target_logprobs
from rollforward.model.shapes import param_specs, tensor_specs
from rollforward.model.train_config import AdamW, BalanceConfig, HybridMuon, OptimConfig, Precision
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
    config: ModelConfig, batches: list[ScoringBatch], max_norm: float, weight_decay: float = 0.1
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
        [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
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


def test_a_disk_that_refuses_is_told_as_such(tmp_path: Path) -> None:
    """The limit on a file's size stands for a full disk: a real write fails."""
    trainer = _trainer(tiny_config())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(CheckpointError, match=r"cannot be written \(\d+ bytes are free\).*Make room"):
            trainer.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def _assert_polar(moved: Tensor, gradient: Tensor, lr: float) -> None:
    """The first update of Muon against singular value decomposition in float64: along every direction of the gradient
    that is not lost in rounding, lr x 0.18 x sqrt(longer side) whatever its size, within the 1 % of the iteration."""
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    clear = values > 1e-3 * values.square().sum().sqrt()
    assert int(clear.sum()) >= 3
    along = ((left.T @ moved.double()) * right).sum(1)[clear] / (lr * 0.18 * max(gradient.shape) ** 0.5)
    assert float((along - 1).abs().max()) <= 0.011


def test_a_step_of_hybrid_muon_is_the_polar_factor_of_each_whole_matrix() -> None:
    """Against singular value decomposition, for one tensor of each way to fall into matrices; the rest is AdamW's."""
    config = tiny_config()
    batches = _parts(_batch(config, LENGTHS, seed=5))
    trainer = Trainer(
        config,
        random_params(config),
        precision="native",
        optim=HybridMuon(lr=1e-3, max_grad_norm=1e30, eps=1e-8, stochastic_rounding=False),
    )
    trainer.train_step(batches, _negative_sum())
    _, _, gradients = _adamw_step(config, batches, float("inf"))
    before, after = random_params(config), trainer.masters()
    blocks = {
        "layers.0.attn.wq_a.weight": [(slice(None), slice(None))],
        "layers.0.attn.wo_a.weight": [(slice(0, 32), slice(None)), (slice(32, 64), slice(None))],
        "layers.1.attn.compressor.wkv.weight": [(slice(0, 80), slice(None)), (slice(80, 160), slice(None))],
        "layers.2.hc_attn_fn": [(slice(0, 4), slice(None)), (slice(4, 8), slice(None)), (slice(8, 24), slice(None))],
    }
    for name, places in blocks.items():
        for place in places:
            _assert_polar((before[name] - after[name])[place], gradients[name][place], 1e-3)
    expert = gradients["layers.1.ffn.experts.w2.weight"]
    moved = (before["layers.1.ffn.experts.w2.weight"] - after["layers.1.ffn.experts.w2.weight"]).double()
    for index in range(config.n_routed_experts):
        if float(expert[index].abs().max()) > 0:
            singular = torch.linalg.svdvals(moved[index]) / (1e-3 * 0.18 * 128**0.5)
            assert float(singular.max()) < 1.02, index
    masters, _, _ = _adamw_step(config, batches, float("inf"), weight_decay=0.0)
    for name in ("embed.weight", "head.weight", "norm.weight", "layers.0.attn.attn_sink", "layers.1.hc_ffn_base"):
        clear = gradients[name].abs() > 1e-6
        assert float((after[name] - masters[name]).abs()[clear].max()) <= 2e-6, name


@pytest.mark.parametrize("optim", [AdamW(lr=1e-2), HybridMuon(lr=1e-2)])
@pytest.mark.parametrize("precision", ["native", "fp32"])
def test_what_is_published_after_a_step_is_the_masters_in_their_formats(
    optim: OptimConfig, precision: Precision
) -> None:
    """In fp32 precision that is FP32: the forward reads the masters, and what is sampled with is what it reads."""
    config = tiny_config()
    trainer = Trainer(config, random_params(config), precision=precision, optim=optim)
    for seed in range(2):
        trainer.train_step([_batch(config, LENGTHS, seed=seed)], _negative_sum())
        published, masters = trainer.published(), trainer.masters()
        for spec in param_specs(config):
            if spec.trained:
                stored = spec if precision == "native" else with_format(spec, "fp32")
                expected = pack_published(stored, masters[spec.name])
                assert torch.equal(published[spec.name].data.view(torch.uint8), expected.data.view(torch.uint8))
                if expected.scale is not None:
                    assert torch.equal(published[spec.name].scale, expected.scale), spec.name


@pytest.mark.parametrize("precision", ["native", "fp32"])
def test_published_bytes_do_not_change_under_who_holds_them(precision: Precision) -> None:
    """Also those of plain formats after a step: the next one writes to the masters that they equal."""
    config = tiny_config()
    trainer = Trainer(config, random_params(config), precision=precision, optim=HybridMuon(lr=1e-2))
    for _ in range(2):
        held = trainer.published()
        copies = {name: packed.data.clone() for name, packed in held.items()}
        trainer.train_step([_batch(config, (5, 20), seed=1)], _negative_sum())
        for name, packed in held.items():
            assert torch.equal(packed.data.view(torch.uint8), copies[name].view(torch.uint8)), name


def test_gate_biases_follow_the_loads_and_are_saved(tmp_path: Path) -> None:
    config = tiny_config()
    before = random_params(config)

    def build() -> Trainer:
        balance = BalanceConfig(bias_update_speed=0.125)
        return Trainer(config, before, precision="native", optim=AdamW(lr=1e-3), balance=balance)

    trainer, batch = build(), _batch(config, LENGTHS, seed=5)
    routing = Routing(config)
    weights = build_weights(config, published_tensors(config, before))
    target_logprobs(Transformer(config, "native"), weights, batch, temperature=1.0, routing=routing)
    trainer.train_step([batch], _negative_sum())
    mean = sum(LENGTHS) * config.num_experts_per_tok / config.n_routed_experts
    for layer in range(1, config.num_hidden_layers):
        name = f"layers.{layer}.ffn.gate.bias"
        moved = trainer.masters()[name] - before[name]
        expected = 0.125 * torch.sign(mean - routing.load_LE()[layer].float())
        assert torch.allclose(moved, expected, atol=1e-6), layer
        assert float(expected.abs().max()) > 0
    trainer.save(tmp_path)
    other = build()
    other.load(tmp_path)
    for name, packed in trainer.published().items():
        assert torch.equal(packed.data.view(torch.uint8), other.published()[name].data.view(torch.uint8)), name


def test_the_balance_loss_is_part_of_the_gradient() -> None:
    config = tiny_config()
    batch = _batch(config, LENGTHS, seed=5)
    batch = replace(batch, sequence_weights=tuple(1 / len(LENGTHS) for _ in LENGTHS))
    masters = {}
    for weight in (0.0, 0.5):
        balance = BalanceConfig(loss_weight=weight)
        trainer = Trainer(config, random_params(config), precision="native", optim=AdamW(lr=1e-3), balance=balance)
        result = trainer.train_step([batch], _negative_sum())
        masters[weight] = trainer.masters()
        named = {metric.name: metric.value for metric in result.metrics}
        assert ("actor/balance_loss" in named) == (weight > 0)
    router = "layers.1.ffn.gate.weight"
    assert not torch.equal(masters[0.0][router], masters[0.5][router])


def test_recomputing_layers_changes_no_bit() -> None:
    config = tiny_config()
    masters = []
    for recompute in (False, True):
        trainer = Trainer(
            config, random_params(config), precision="native", optim=HybridMuon(lr=1e-2), recompute=recompute
        )
        for seed in range(2):
            trainer.train_step(_parts(_batch(config, LENGTHS, seed=seed)), _negative_sum())
        masters.append(trainer.masters())
    for name, tensor in masters[0].items():
        assert torch.equal(tensor, masters[1][name]), name


def test_a_state_of_another_optimizer_or_none_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(TrainerError, match=r"holds no trainer state that can be read.*another checkpoint"):
        _trainer(config).load(tmp_path)
    muon = Trainer(config, random_params(config), precision="native", optim=HybridMuon(lr=1e-3))
    muon.save(tmp_path)
    with pytest.raises(TrainerError, match=r"does not hold .*\(\d+ in all\).*settings"):
        _trainer(config).load(tmp_path)


def test_a_rank_is_refused_what_is_not_its_share() -> None:
    with pytest.raises(TrainerError, match=r"rank 0 of 1 got 1 micro-batches; of 3 it has 0 to 2"):
        _trainer(tiny_config()).train_step([_batch(tiny_config(), (9,), seed=1)], _negative_sum(), num_leaves=3)


def test_a_value_that_is_not_what_its_bytes_say_is_never_published() -> None:
    config = tiny_config()
    weights = PublishedWeights(config, random_params(config), "native")
    weights.published()
    with torch.no_grad():
        weights.values["layers.3.ffn.experts.w2.weight"][1, 2, 3] += 1e-3
    with pytest.raises(TrainerError, match=r"layers\.3\.ffn\.experts\.w2\.weight: the forward's values"):
        weights.published()


def test_quantised_tensors_are_counted_as_official_ones() -> None:
    config = tiny_config()
    planned = Counter(spec.format for spec in tensor_specs(config))
    counted = PublishedWeights(config, random_params(config), "native").quantised
    assert counted == {name: planned[name] for name in ("mxfp4", "fp8", "bf16")}
    assert counted["mxfp4"] == (config.num_hidden_layers + 1) * 3 * config.n_routed_experts
    assert PublishedWeights(config, random_params(config), "fp32").quantised == {}


def test_flipped_codes_are_counted_by_hand() -> None:
    config = tiny_config()
    weights = PublishedWeights(config, random_params(config), "native")
    name = "layers.0.ffn.experts.w1.weight"
    packed = weights.published()[name]
    data = packed.data.clone()
    data.view(-1)[0] ^= 0x01  # the low code of the first byte
    data.view(-1)[1] ^= -128  # the high code of the second, by its sign bit
    data.view(-1)[2] ^= 0x22  # both codes of the third
    weights.replace(name, msgspec.structs.replace(packed, data=data))
    assert weights.take_flips() == (4, 2 * data.numel())
    assert weights.take_flips() == (0, 0)
