"""Proves: a draw logs, for every row, what the trainer makes of that row alone: at the row's own temperature, over its
own kept set, from the hidden vector; and that the draw itself is not touched by who is beside it.

The trainer's own forward against a whole engine: tests/parity/test_trainer_engine.py, test_kept_records.py.
"""

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.kernels.linear.row_linear import row_linear
from rollforward.kernels.loss.linear_logprob_ref import KeptSets
from rollforward.model.scoring import ScoringBatch, head_logprobs, hidden_logprobs
from rollforward.rollout.engine.draw import Drawn, draw_next
from rollforward.rollout.engine.sequence import Sequence, split_sets
from rollforward.rollout.types import SamplingParams
from tests.helpers.bits import different_bits
from tests.helpers.replicas import make_requests

VOCAB, WIDTH = 200, 64
SAMPLINGS = [
    SamplingParams(max_new_tokens=4, temperature=1.0),
    SamplingParams(max_new_tokens=4, temperature=0.6),
    SamplingParams(max_new_tokens=4, temperature=0.6, top_k=3),
    SamplingParams(max_new_tokens=4, temperature=0.0),
    SamplingParams(max_new_tokens=4, temperature=1.7, top_p=0.5),
    SamplingParams(max_new_tokens=4, temperature=1.0, top_k=1),
]


def _sequences() -> list[Sequence]:
    requests = make_requests([3, 5, 1, 8, 2, 4], vocab_size=VOCAB)
    return [
        Sequence.fresh(msgspec.structs.replace(request, sampling=sampling))
        for request, sampling in zip(requests, SAMPLINGS, strict=True)
    ]


@pytest.fixture
def head_VD() -> Tensor:
    return torch.randn(VOCAB, WIDTH) / 4


@pytest.fixture
def hidden_BD() -> Tensor:
    return torch.randn(len(SAMPLINGS), WIDTH)


def _drawn(sequences: list[Sequence], hidden_BD: Tensor, head_VD: Tensor) -> Drawn:
    return draw_next(sequences, row_linear(hidden_BD, head_VD), hidden_BD, head_VD)


def _kept_alone(drawn: Drawn, row: int) -> KeptSets:
    assert drawn.kept is not None
    counts, ids = drawn.kept.counts_T[row : row + 1], split_sets(drawn.kept)[row]
    return KeptSets(torch.tensor(counts, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64))


def test_a_rows_log_prob_is_what_the_trainer_makes_of_it_alone(hidden_BD: Tensor, head_VD: Tensor) -> None:
    drawn = _drawn(_sequences(), hidden_BD, head_VD)
    assert drawn.kept is not None
    assert drawn.kept.counts_T[[2, 5]].tolist() == [3, 1]
    assert (drawn.kept.counts_T[[0, 1, 3]] == 0).all()
    for row, sampling in enumerate(SAMPLINGS):
        logprob_N, _ = head_logprobs(
            head_VD,
            hidden_BD[row : row + 1],
            torch.tensor(drawn.token_ids[row : row + 1]).long(),
            temperature=sampling.temperature or 1.0,
            kept=_kept_alone(drawn, row),
        )
        assert different_bits(logprob_N, torch.tensor(drawn.logprobs[row : row + 1])) == 0, sampling
    assert drawn.logprobs[5] == 0.0, "of the only token"


def test_a_rows_draw_and_log_prob_do_not_depend_on_who_is_beside_it(hidden_BD: Tensor, head_VD: Tensor) -> None:
    together = _drawn(_sequences(), hidden_BD, head_VD)
    for row, sequence in enumerate(_sequences()):
        alone = _drawn([sequence], hidden_BD[row : row + 1], head_VD)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs.tobytes() == together.logprobs[row : row + 1].tobytes()


def test_log_probs_come_from_the_hidden_vectors_or_from_the_logits_that_they_made(
    hidden_BD: Tensor, head_VD: Tensor
) -> None:
    """The engine has the logits, the trainer has not: one function, the same bits, and a gradient for both."""
    token_B = torch.arange(len(hidden_BD))
    kept = KeptSets(torch.tensor([0, 2, 0, 3, 0, 0]), torch.tensor([1, 9, 3, 4, 150]))
    hidden_BD, head_VD = hidden_BD.requires_grad_(), head_VD.requires_grad_()
    gradients = []
    for logits_BV in (None, row_linear(hidden_BD, head_VD)):
        found = head_logprobs(head_VD, hidden_BD, token_B, temperature=0.7, kept=kept, logits_NV=logits_BV)
        gradients.append([*found, *torch.autograd.grad(sum(one.sum() for one in found), (hidden_BD, head_VD))])
    for one, other in zip(*gradients, strict=True):
        assert different_bits(one, other) == 0
    scaled = (hidden_BD.double() @ head_VD.double().t() / 0.7).detach()
    by_hand = [
        scaled[row, [1, 9] if row == 1 else [3, 4, 150] if row == 3 else list(range(VOCAB))].logsumexp(0)
        for row in range(len(scaled))
    ]
    expected = scaled.gather(1, token_B[:, None])[:, 0] - torch.stack(by_hand)
    assert float((gradients[0][0].detach() - expected).abs().max()) < 1e-5


def test_sets_of_some_rows_are_those_rows_sets(hidden_BD: Tensor, head_VD: Tensor) -> None:
    """`hidden_logprobs` cuts a batch into chunks, each with its rows' sets."""
    token_T = torch.arange(6)
    batch = ScoringBatch(
        token_ids_T=token_T,
        sequence_lengths=(6,),
        target_ids_T=token_T,
        scored_mask_T=torch.tensor([True, True, False, True, False, True]),
        kept_counts_T=torch.tensor([0, 2, 1, 3, 4, 1]),
        kept_ids=torch.tensor([1, 9, 2, 3, 4, 150, 4, 5, 6, 7, 5]),
    )
    rows = batch.scored_mask_T.nonzero().squeeze(1)
    whole, _ = hidden_logprobs(head_VD, hidden_BD[rows], batch, temperature=1.0, chunk_tokens=100)
    alone, _ = hidden_logprobs(head_VD, hidden_BD[rows], batch, temperature=1.0, chunk_tokens=1)
    assert different_bits(whole, alone) == 0
    assert whole[-1] == 0, "drawn from a set of one"
    logits = row_linear(hidden_BD, head_VD)
    assert float(whole[1]) == pytest.approx(float(logits[1, 1] - logits[1, [1, 9]].logsumexp(0)), abs=1e-5)
