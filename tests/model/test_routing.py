"""Keep routing: what is replayed is what was recorded and changes no bit, routers learn under it, -1 chooses live.
Loads count what was visited; the balance loss judges the layers that choose by score, and repeats bit for bit.
"""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.model.balance import sequence_balance_loss
from rollforward.model.config import ModelConfig
from rollforward.model.errors import ModelInputError
from rollforward.model.routing import Routing
from rollforward.model.scoring import ScoringBatch, target_logprobs
from rollforward.model.shapes import param_specs
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Transformer, packed_batch
from rollforward.model.weights import build_weights, published_tensors
from tests.helpers.bits import different_bits
from tests.helpers.tiny import random_params, random_tokens, tiny_config

LENGTHS = (40, 3, 70)


class Case:
    """A tiny model whose masters take gradients, and sequences to score."""

    def __init__(self, precision: Precision = "native", seed: int = 1) -> None:
        self.config: ModelConfig = tiny_config()
        self.masters = random_params(self.config, seed)
        for spec in param_specs(self.config):
            if spec.trained:
                self.masters[spec.name].requires_grad_()
        self.transformer = Transformer(self.config, precision)
        self.token_T = random_tokens(self.config, (sum(LENGTHS),))

    def score(self, **columns: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Log-probs, entropies and the gradients of the sum of log-probs."""
        for master in self.masters.values():
            master.grad = None
        native = self.transformer.numerics.precision == "native"
        named = published_tensors(self.config, self.masters) if native else self.masters
        batch = ScoringBatch(
            token_ids_T=self.token_T,
            sequence_lengths=LENGTHS,
            target_ids_T=self.token_T.roll(-1),
            scored_mask_T=torch.arange(len(self.token_T)) % 3 != 0,
            **columns,
        )
        logprob_T, entropy_T = target_logprobs(
            self.transformer, build_weights(self.config, named), batch, temperature=0.7
        )
        logprob_T.sum().backward()
        gradients = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        return logprob_T.detach(), entropy_T.detach(), gradients

    @torch.no_grad()
    def record(self, **replay: Any) -> tuple[Tensor, Tensor]:
        """Streams of one forward over all tokens and the routes that it took."""
        routing = Routing(self.config, **replay)
        named = published_tensors(self.config, self.masters)
        streams = self.transformer.streams(
            build_weights(self.config, named), self.token_T, packed_batch(self.config, LENGTHS), routing=routing
        )
        return streams, routing.taken_TLK()


def test_replaying_what_was_recorded_changes_no_bit_of_values_and_gradients() -> None:
    case = Case()
    _, routes_TLK = case.record()
    logprob_T, entropy_T, gradients = case.score()
    replayed_logprob_T, replayed_entropy_T, replayed_gradients = case.score(routes_TLK=routes_TLK)
    assert different_bits(replayed_logprob_T, logprob_T) == 0
    assert different_bits(replayed_entropy_T, entropy_T) == 0
    assert gradients.keys() == replayed_gradients.keys()
    for name, gradient in gradients.items():
        assert different_bits(replayed_gradients[name], gradient) == 0


def test_every_layer_is_recorded_and_hash_layers_look_tokens_up() -> None:
    case = Case()
    _, routes_TLK = case.record()
    config = case.config
    assert routes_TLK.shape == (len(case.token_T), config.num_hidden_layers, config.num_experts_per_tok)
    assert routes_TLK.dtype == torch.int16
    assert config.num_hash_layers > 0
    for layer in range(config.num_hash_layers):
        table = case.masters[f"layers.{layer}.ffn.gate.tid2eid"]
        assert torch.equal(routes_TLK[:, layer].long(), table[case.token_T])


def test_other_weights_visit_the_replayed_experts_and_their_routers_learn() -> None:
    """The routers of another model would choose otherwise; under replay they visit the record, and get gradient."""
    _, routes_TLK = Case(seed=1).record()
    other = Case(seed=2)
    live_streams, live_TLK = other.record()
    assert not torch.equal(live_TLK, routes_TLK)
    forced_streams, taken_TLK = other.record(replay_TLK=routes_TLK)
    assert torch.equal(taken_TLK, routes_TLK)
    assert not torch.equal(forced_streams, live_streams)
    _, _, gradients = other.score(routes_TLK=routes_TLK)
    for layer in range(other.config.num_hidden_layers):
        assert gradients[f"layers.{layer}.ffn.gate.weight"].abs().sum() > 0
    visited = set(routes_TLK[:, -1].flatten().tolist())
    last = gradients[f"layers.{other.config.num_hidden_layers - 1}.ffn.experts.w1.weight"]
    idle = [expert for expert in range(other.config.n_routed_experts) if expert not in visited]
    assert not last[idle].any()


def test_a_token_without_a_record_chooses_live() -> None:
    case = Case(seed=2)
    live_streams, live_TLK = case.record()
    unknown_TLK = torch.full_like(live_TLK, -1)
    streams, taken_TLK = case.record(replay_TLK=unknown_TLK)
    assert different_bits(streams, live_streams) == 0
    assert torch.equal(taken_TLK, live_TLK)
    foreign_TLK = Case(seed=1).record()[1]
    mixed_TLK = torch.where((torch.arange(len(live_TLK)) % 2 == 0).view(-1, 1, 1), foreign_TLK, unknown_TLK)
    taken_TLK = case.record(replay_TLK=mixed_TLK)[1]
    assert torch.equal(taken_TLK[::2], foreign_TLK[::2])
    assert (taken_TLK >= 0).all()


def test_a_row_that_is_partly_unknown_chooses_live() -> None:
    routing = Routing(tiny_config(), replay_TLK=torch.full((2, *_shape()), -1).index_fill(2, torch.tensor([0]), 1))
    live_TK = torch.tensor([[3, 2], [0, 1]])
    assert torch.equal(routing.router(0)(torch.rand(2, tiny_config().n_routed_experts), live_TK), live_TK)


def _shape() -> tuple[int, int]:
    config = tiny_config()
    return config.num_hidden_layers, config.num_experts_per_tok


def test_routes_of_another_model_are_refused() -> None:
    config = tiny_config()
    layers, slots = _shape()
    with pytest.raises(ModelInputError, match=rf"routes have shape \[5, {layers + 1}, {slots}\]"):
        Routing(config, replay_TLK=torch.zeros(5, layers + 1, slots, dtype=torch.int16))
    with pytest.raises(ModelInputError, match=rf"expert {config.n_routed_experts}; the model has"):
        Routing(config, replay_TLK=torch.full((5, layers, slots), config.n_routed_experts, dtype=torch.int16))
    with pytest.raises(ModelInputError, match="routes of 5 tokens for a batch of 113"):
        Case().record(replay_TLK=torch.zeros(5, layers, slots, dtype=torch.int16))


def _scores(num_tokens: int, seed: int) -> Tensor:
    return torch.rand(num_tokens, tiny_config().n_routed_experts, generator=torch.Generator().manual_seed(seed)) + 0.1


def test_a_router_repeats_its_first_visit_and_records_it_once() -> None:
    config = tiny_config()
    routing = Routing(config, sequence_lengths=(2, 3), sequence_weights=(0.5, 0.5))
    first_TK, second_TK = torch.tensor([[0, 1]] * 5), torch.tensor([[2, 3]] * 5)
    for layer in range(config.num_hidden_layers):
        router = routing.router(layer)
        assert torch.equal(router(_scores(5, layer), first_TK), first_TK)
        again_TK = router(_scores(5, layer), second_TK)
        assert torch.equal(again_TK, first_TK)
        assert again_TK.dtype == torch.int64
    loss = routing.balance_loss()
    assert routing.taken_TLK().shape == (5, *_shape())
    assert routing.load_LE().tolist() == [[5, 5] + [0] * (config.n_routed_experts - 2)] * config.num_hidden_layers
    expected = sum(
        sequence_balance_loss(_scores(5, layer), k=2, sequence_lengths=(2, 3), sequence_weights=(0.5, 0.5))
        for layer in range(config.num_hash_layers, config.num_hidden_layers)
    )
    assert isinstance(expected, Tensor)
    assert different_bits(loss, expected) == 0


def test_a_routing_serves_one_forward() -> None:
    case = Case()
    routing = Routing(case.config)
    weights = build_weights(case.config, case.masters)
    arguments = (weights, case.token_T, packed_batch(case.config, LENGTHS))
    case.transformer.streams(*arguments, routing=routing)
    with pytest.raises(AssertionError, match="serves one forward"):
        case.transformer.streams(*arguments, routing=routing)


def test_loads_count_the_visits_and_do_not_depend_on_order_or_batch() -> None:
    case = Case()
    config, weights = case.config, build_weights(case.config, published_tensors(case.config, case.masters))

    def loads(sequences: list[Tensor]) -> Tensor:
        routing = Routing(config)
        with torch.no_grad():
            batch = packed_batch(config, [len(tokens) for tokens in sequences])
            case.transformer.streams(weights, torch.cat(sequences), batch, routing=routing)
        for layer in range(config.num_hidden_layers):
            for expert in range(config.n_routed_experts):
                assert int(routing.load_LE()[layer, expert]) == int((routing.taken_TLK()[:, layer] == expert).sum())
        return routing.load_LE()

    first, second, third = case.token_T.split(LENGTHS)
    together_LE = loads([first, second, third])
    assert together_LE.dtype == torch.int64
    assert torch.equal(loads([third, first, second]), together_LE)
    assert torch.equal(loads([first]) + loads([third, second]), together_LE)
    assert together_LE.sum(1).tolist() == [len(case.token_T) * config.num_experts_per_tok] * config.num_hidden_layers


def _balanced(case: Case, **replay: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The balance loss of a forward whose log-probs nobody uses, and its gradients."""
    for master in case.masters.values():
        master.grad = None
    routing = Routing(case.config, sequence_lengths=LENGTHS, sequence_weights=(0.5, 0.25, 0.25), **replay)
    weights = build_weights(case.config, published_tensors(case.config, case.masters))
    case.transformer.streams(weights, case.token_T, packed_batch(case.config, LENGTHS), routing=routing)
    loss = routing.balance_loss()
    loss.backward()
    return loss.detach(), {name: master.grad for name, master in case.masters.items()}


def test_the_balance_loss_reaches_the_routers_that_choose_and_repeats_bit_for_bit() -> None:
    case = Case()
    loss, gradients = _balanced(case)
    config = case.config
    choosing = config.num_hidden_layers - config.num_hash_layers
    assert loss.shape == ()
    assert 0.9 * choosing < float(loss) < choosing * config.n_routed_experts / config.num_experts_per_tok
    last = config.num_hidden_layers - 1
    for layer in range(config.num_hash_layers, config.num_hidden_layers):
        gate = gradients[f"layers.{layer}.ffn.gate.weight"]
        assert gate is not None
        assert bool(gate.any())
        assert gradients[f"layers.{layer}.ffn.gate.bias"] is None
    # Nothing after the last router.
    for name in (f"layers.{last}.ffn.experts.w1.weight", "head.weight", "norm.weight"):
        gradient = gradients[name]
        assert gradient is None or not bool(gradient.any()), name
    for _ in range(3):
        again, repeated = _balanced(case)
        assert different_bits(again, loss) == 0
        for name, gradient in gradients.items():
            other = repeated[name]
            assert (gradient is None) == (other is None)
            assert gradient is None or other is None or different_bits(gradient, other) == 0, name


def test_a_small_step_against_its_gradient_lowers_the_balance_loss() -> None:
    case = Case("fp32")
    case.transformer = Transformer(case.config, "fp32")
    before, gradients = _balanced(case)
    name = f"layers.{case.config.num_hidden_layers - 1}.ffn.gate.weight"
    gradient = gradients[name]
    assert gradient is not None
    with torch.no_grad():
        case.masters[name] -= 0.05 * gradient / gradient.norm()
    assert float(_balanced(case)[0]) < float(before)


def test_no_balance_loss_is_an_exact_zero() -> None:
    config = tiny_config()
    routing = Routing(config)
    for layer in range(config.num_hidden_layers):
        routing.router(layer)(_scores(5, layer), torch.tensor([[0, 1]] * 5))
    assert different_bits(routing.balance_loss(), torch.tensor(0.0)) == 0
    hashed = msgspec.structs.replace(config, num_hash_layers=config.num_hidden_layers)
    routing = Routing(hashed, sequence_lengths=[5], sequence_weights=[1.0])
    for layer in range(config.num_hidden_layers):
        routing.router(layer)(_scores(5, layer), torch.tensor([[0, 1]] * 5))
    assert different_bits(routing.balance_loss(), torch.tensor(0.0)) == 0


@pytest.mark.parametrize(
    ("lengths", "weights", "message"),
    [
        ((5,), None, "sequence_lengths has 1 entries and sequence_weights none"),
        (None, (1.0,), "sequence_lengths has none and sequence_weights 1 entries"),
        ((5, 6), (1.0,), "2 entries and sequence_weights 1 entries"),
        ((5,), (float("nan"),), "a finite weight"),
        ((5,), (float("inf"),), "a finite weight"),
        ((5, 0), (1.0, 1.0), "a length >= 1"),
    ],
)
def test_sequences_that_do_not_belong_together_are_refused(lengths: Any, weights: Any, message: str) -> None:
    with pytest.raises(ModelInputError, match=message):
        Routing(tiny_config(), sequence_lengths=lengths, sequence_weights=weights)


def test_sequences_of_another_batch_are_refused() -> None:
    case = Case()
    routing = Routing(case.config, sequence_lengths=(40, 3), sequence_weights=(1.0, 1.0))
    weights = build_weights(case.config, case.masters)
    with pytest.raises(ModelInputError, match="sum to 43, the batch has 113 tokens"):
        case.transformer.streams(weights, case.token_T, packed_batch(case.config, LENGTHS), routing=routing)


def test_a_routing_that_is_handed_to_the_scorer_replaces_the_batchs_routes() -> None:
    case = Case(seed=2)
    foreign_TLK = Case(seed=1).record()[1]
    weights = build_weights(case.config, published_tensors(case.config, case.masters))
    batch = ScoringBatch(
        token_ids_T=case.token_T,
        sequence_lengths=LENGTHS,
        target_ids_T=case.token_T.roll(-1),
        scored_mask_T=torch.ones(len(case.token_T), dtype=torch.bool),
        sequence_weights=(0.2, 0.3, 0.5),
        routes_TLK=foreign_TLK,
    )
    routing = Routing(case.config, replay_TLK=foreign_TLK)
    with torch.no_grad():
        handed = target_logprobs(case.transformer, weights, batch, temperature=0.7, routing=routing)
        made = target_logprobs(case.transformer, weights, batch, temperature=0.7)
        live = target_logprobs(case.transformer, weights, batch, temperature=0.7, routing=Routing(case.config))
    assert torch.equal(routing.taken_TLK(), foreign_TLK)
    assert different_bits(handed[0], made[0]) == 0
    assert different_bits(live[0], made[0]) > 0


def test_a_kept_set_renormalises_and_the_rest_of_the_vocabulary_gets_no_gradient() -> None:
    """log p over a set = log p - log of the set's mass; worked out in float64 from log-probs of the whole."""
    case = Case("fp32")
    size = case.config.vocab_size
    target_T = case.token_T.roll(-1)
    generator = torch.Generator().manual_seed(5)
    counts, ids = [], []
    for row, target in enumerate(target_T.tolist()):
        kept = sorted({target, *torch.randint(0, size, (row % 4 * 3,), generator=generator).tolist()})
        counts.append(len(kept) if row % 4 else 0)
        ids += kept if row % 4 else []
    columns = {"kept_counts_T": torch.tensor(counts), "kept_ids": torch.tensor(ids)}
    with torch.no_grad():
        whole_TV = _all_logprobs(case)
    logprob_T, entropy_T, gradients = case.score(**columns)
    start = 0
    for row, count in enumerate(counts):
        kept = ids[start : start + count] if count else list(range(size))
        start += count
        if row % 3 == 0:
            assert logprob_T[row] == 0
            continue
        inside = torch.log_softmax(whole_TV[row, kept], 0)
        expected = inside[kept.index(int(target_T[row]))]
        assert float(logprob_T[row]) == pytest.approx(float(expected), abs=2e-5)
        assert float(entropy_T[row]) == pytest.approx(float(-(inside.exp() * inside).sum()), abs=2e-5)
    nothing_cut = {"kept_counts_T": torch.zeros(len(counts), dtype=torch.int64), "kept_ids": torch.tensor([]).long()}
    assert different_bits(case.score(**nothing_cut)[0], case.score()[0]) == 0
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def _all_logprobs(case: Case) -> Tensor:
    weights = build_weights(case.config, case.masters)
    streams = case.transformer.streams(weights, case.token_T, packed_batch(case.config, LENGTHS))
    logits = case.transformer.logits(weights, case.transformer.hidden(weights, streams))
    return torch.log_softmax(logits.double() / 0.7, 1)


def test_tokens_outside_every_kept_set_get_no_gradient_from_the_head() -> None:
    case = Case("fp32")
    target_T = case.token_T.roll(-1)
    other_T = torch.where(target_T < 300, target_T + 1, target_T - 1)
    pairs = torch.stack((target_T, other_T), 1).sort(1).values
    _, _, gradients = case.score(kept_counts_T=torch.full_like(target_T, 2), kept_ids=pairs.flatten())
    scored = torch.arange(len(target_T)) % 3 != 0
    kept = torch.zeros(case.config.vocab_size, dtype=torch.bool)
    kept[pairs[scored].flatten()] = True
    head = gradients["head.weight"]
    assert not head[~kept].any()
    assert head[kept].any()
