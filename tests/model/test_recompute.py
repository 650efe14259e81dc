"""Activation recompute: the bits of values and gradients are those without it, routes are recorded once and visited
twice, memory grows by a layer's input, and nothing changes without grad or with a cache."""

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

import rollforward.model.transformer as home
from rollforward.model.cache import allocate_cache
from rollforward.model.config import ModelConfig
from rollforward.model.routing import Routing
from rollforward.model.scoring import ScoringBatch, target_logprobs
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.shapes import param_specs
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Transformer, packed_batch
from rollforward.model.weights import build_weights, published_tensors
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.tiny import oracle_config, random_params, random_tokens, tiny_config

LENGTHS = (40, 3, 70)
NUM_TOKENS = sum(LENGTHS)


class Result:
    """Everything that one pass forward and back leaves."""

    def __init__(self, values: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        self.values = values
        self.gradients = gradients

    def check_equal(self, other: "Result") -> None:
        assert self.values.keys() == other.values.keys()
        assert self.gradients.keys() == other.gradients.keys()
        for name, value in (self.values | self.gradients).items():
            assert different_bits((other.values | other.gradients)[name], value) == 0, name


def leaf_params(config: ModelConfig) -> dict[str, Tensor]:
    named = random_params(config)
    for spec in param_specs(config):
        if spec.trained:
            named[spec.name].requires_grad_()
    return named


def run(
    config: ModelConfig, precision: Precision, *, recompute: bool, replay_TLK: Tensor | None = None, spoil: bool = False
) -> Result:
    """Log-probs over kept sets, balance loss, routes and loads; then the gradients of a loss of both."""
    named = leaf_params(config)
    weights = build_weights(config, published_tensors(config, named) if precision == "native" else named)
    token_T = random_tokens(config, (NUM_TOKENS,))
    target_T = token_T.roll(-1)
    other_T = torch.where(target_T < 300, target_T + 1, target_T - 1)
    batch = ScoringBatch(
        token_ids_T=token_T,
        sequence_lengths=LENGTHS,
        target_ids_T=target_T,
        scored_mask_T=torch.arange(NUM_TOKENS) % 3 != 0,
        kept_counts_T=2 * (torch.arange(NUM_TOKENS) % 2),
        kept_ids=torch.stack((target_T, other_T), 1)[torch.arange(NUM_TOKENS) % 2 == 1].flatten(),
    )
    weigh: dict[str, Any] = {"sequence_lengths": LENGTHS, "sequence_weights": (0.5, 0.3, 0.2)}
    routing = Routing(config, replay_TLK=replay_TLK, **weigh)
    transformer = Transformer(config, precision, recompute=recompute)
    logprob_T, entropy_T = target_logprobs(transformer, weights, batch, temperature=0.7, routing=routing)
    balance = routing.balance_loss()
    if spoil:
        for block in weights.blocks:
            if block.ffn.bias is not None:
                block.ffn.bias.copy_(block.ffn.bias.flip(0))
    (logprob_T.mean() + 0.1 * entropy_T.mean() + 0.7 * balance).backward()
    values = {"logprob": logprob_T, "entropy": entropy_T, "balance": balance}
    values |= {"routes": routing.taken_TLK(), "loads": routing.load_LE()}
    return Result(values, {name: value.grad for name, value in named.items() if value.grad is not None})


@pytest.mark.parametrize("precision", ["fp32", "native"])
@pytest.mark.parametrize("is_replayed", [False, True])
def test_no_bit_of_values_and_gradients_changes(precision: Precision, is_replayed: bool) -> None:
    config = tiny_config()
    replay_TLK = None
    if is_replayed:  # another model's routes, and every third token without a record
        size = (NUM_TOKENS, config.num_hidden_layers, config.n_routed_experts)
        order = torch.rand(size, generator=torch.Generator().manual_seed(4)).argsort(-1)
        replay_TLK = order[:, :, : config.num_experts_per_tok].to(torch.int16)
        replay_TLK[::3] = -1
    plain = run(config, precision, recompute=False, replay_TLK=replay_TLK)
    again = run(config, precision, recompute=True, replay_TLK=replay_TLK)
    again.check_equal(plain)
    trained = {spec.name for spec in param_specs(config) if spec.trained}
    assert again.gradients.keys() == trained
    assert all(bool(gradient.any()) for gradient in again.gradients.values())
    if replay_TLK is not None:
        taken_TLK = again.values["routes"]
        known = torch.arange(NUM_TOKENS) % 3 != 0
        assert torch.equal(taken_TLK[known], replay_TLK[known])


@pytest.mark.parametrize("kind", ["flash", "other"])
def test_no_bit_changes_in_other_shapes_and_on_two_threads(kind: str) -> None:
    config = oracle_config(kind)
    with torch_threads(2):
        run(config, "native", recompute=True).check_equal(run(config, "native", recompute=False))


def test_the_second_pass_visits_what_the_first_did() -> None:
    """Selection biases that change in between would send tokens elsewhere; nothing else in a layer reads them."""
    config = tiny_config()
    spoilt = run(config, "fp32", recompute=True, spoil=True)
    spoilt.check_equal(run(config, "fp32", recompute=True))


class _Counting(Transformer):
    """Counts how often each layer runs."""

    def __init__(self, config: ModelConfig, *, recompute: bool) -> None:
        super().__init__(config, "fp32", recompute=recompute)
        self.runs = [0] * config.num_hidden_layers

    def _block(self, block: Any, streams_TMD: Tensor, token_T: Tensor, layer: int, *rest: Any) -> Tensor:
        self.runs[layer] += 1
        return super()._block(block, streams_TMD, token_T, layer, *rest)


def test_each_layer_runs_once_more_and_routes_are_recorded_once() -> None:
    config = tiny_config()
    layers = config.num_hidden_layers
    weights = build_weights(config, leaf_params(config))
    token_T, batch = random_tokens(config, (NUM_TOKENS,)), packed_batch(config, LENGTHS)
    for recompute, runs in ((False, 1), (True, 2)):
        transformer = _Counting(config, recompute=recompute)
        routing = Routing(config)
        streams_TMD = transformer.streams(weights, token_T, batch, routing=routing)
        assert transformer.runs == [1] * layers
        routes_TLK, load_LE = routing.taken_TLK(), routing.load_LE()
        streams_TMD.square().sum().backward()
        assert transformer.runs == [runs] * layers
        assert torch.equal(routing.taken_TLK(), routes_TLK)
        assert torch.equal(routing.load_LE(), load_LE)
        assert load_LE.sum(1).tolist() == [NUM_TOKENS * config.num_experts_per_tok] * layers


def test_nothing_is_run_again_without_grad_or_with_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    weights = build_weights(config, leaf_params(config))
    token_T = random_tokens(config, (9,))
    plain = Transformer(config, "native").streams(weights, token_T, packed_batch(config, [9]))

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a checkpoint where none belongs")

    monkeypatch.setattr(home, "checkpoint", refuse)
    transformer = Transformer(config, "native", recompute=True)
    with torch.no_grad():
        streams_TMD = transformer.streams(weights, token_T, packed_batch(config, [9]))
    assert different_bits(streams_TMD, plain) == 0
    storage = allocate_cache(config, num_slots=1, num_blocks=2)
    cached = SegmentBatch([Segment(start=0, length=9, slot=0, blocks=(1,))], window=config.sliding_window)
    assert torch.is_grad_enabled()
    assert different_bits(transformer.streams(weights, token_T, cached, storage), plain) == 0
    with pytest.raises(AssertionError, match="where none belongs"):
        transformer.streams(weights, token_T, packed_batch(config, [9]))


def _deep_config(layers: int) -> ModelConfig:
    ratios = ((0, 4) * layers)[:layers]
    return msgspec.structs.replace(tiny_config(), num_hidden_layers=layers, compress_ratios=(*ratios, 0))


@contextmanager
def _memory() -> Generator[list[int]]:
    """Yield a list that then holds what the block allocated and did not free, and the most at any time, in bytes."""
    figures: list[int] = []
    recorder: Any = profile(profile_memory=True)
    with recorder:
        yield figures
    alive = most = 0
    for event in recorder.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    figures += [alive, most]


def _kept_and_peak(layers: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes that are alive after a forward, and the most during backward beyond them and the weights' gradients."""
    config = _deep_config(layers)
    named = leaf_params(config)
    weights = build_weights(config, named)
    token_T, batch = random_tokens(config, (NUM_TOKENS,)), packed_batch(config, LENGTHS)
    transformer = Transformer(config, "fp32", recompute=recompute)
    transformer.streams(weights, token_T, batch)  # rotary tables and indices stay
    with _memory() as forward:
        streams_TMD = transformer.streams(weights, token_T, batch)
    with _memory() as backward:
        streams_TMD.square().sum().backward()
    gradients = sum(value.numel() * 4 for value in named.values() if value.grad is not None)
    return forward[0], backward[1] - gradients


def test_a_forward_keeps_the_inputs_of_its_layers_only() -> None:
    config = tiny_config()
    layer_input = NUM_TOKENS * config.hc_mult * config.hidden_size * 4
    kept = {layers: _kept_and_peak(layers, recompute=True) for layers in (2, 4, 6)}
    for more, fewer in ((6, 4), (4, 2)):
        assert 0 <= kept[more][0] - kept[fewer][0] - 2 * layer_input < 2 * 256  # scalars of torch's own
    # Backward holds one layer at a time: the peak does not grow with the number of layers, whose inputs it frees.
    assert kept[6][1] <= kept[2][1] + layer_input
    plain = {layers: _kept_and_peak(layers, recompute=False)[0] for layers in (2, 4)}
    assert plain[4] - plain[2] > 15 * 2 * layer_input


@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_that_is_dropped_without_a_backward_frees_its_memory(recompute: bool) -> None:
    """A non-finite loss stops before backward; the layers' inputs must not live on in a circle."""
    config = tiny_config()
    weights = build_weights(config, leaf_params(config))
    transformer = Transformer(config, "fp32", recompute=recompute)
    token_T, batch = random_tokens(config, (NUM_TOKENS,)), packed_batch(config, LENGTHS)
    layer_input = NUM_TOKENS * config.hc_mult * config.hidden_size * 4
    for attempt in ("warm up", "measure"):
        with _memory() as used:
            routing = Routing(config, sequence_lengths=LENGTHS, sequence_weights=(1.0, 1.0, 1.0))
            loss = transformer.streams(weights, token_T, batch, routing=routing).sum() + routing.balance_loss()
            gone = [weakref.ref(routing), weakref.ref(loss)]
            del routing, loss
        assert [ref() for ref in gone] == [None, None]
        assert used[1] > layer_input
        assert attempt == "warm up" or used[0] < layer_input // 10, used
