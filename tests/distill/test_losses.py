"""Losses of distillation: worked values, what a micro-batch's part must not depend on, teachers that do not belong.

Not proven here: the divergences themselves (tests/kernels/loss/), and where rows and weights come from.
"""

import math
import typing

import msgspec
import pytest
import torch

from rollforward.distill.config import DistillLoss, ForwardKL, JensenShannon, ReverseKL, SampledToken
from rollforward.distill.losses import DistillInputs, distill_loss
from rollforward.kernels.errors import ShapeError
from rollforward.kernels.loss.divergence import forward_kl, jensen_shannon
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.reverse_kl import reverse_kl
from rollforward.kernels.loss.sweep import CHUNK_TOKENS
from rollforward.model.metrics import merge_metrics, metric_values
from tests.helpers.bits import different_bits
from tests.helpers.live_memory import peak_bytes

EVERY = {
    "reverse_kl": ReverseKL(),
    "forward_kl": ForwardKL(),
    "jensen_shannon": JensenShannon(beta=0.3),
    "sampled_token": SampledToken(),
    "sampled_token_baseline": SampledToken(baseline=True),
}
every = pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)


def random_inputs(rows: int, *, dtype=torch.float64, vocab: int = 37, num_trajectories: int = 4, seed: int = 0):
    """Rows of ragged trajectories; a third of them weigh nothing."""
    generator = torch.Generator().manual_seed(seed + 1000 * rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    teacher_hidden, teacher_head = normal(rows, 5), normal(vocab, 5)
    token = torch.randint(0, vocab, (rows,), generator=generator)
    weight = torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype)
    return DistillInputs(
        teacher="maths",
        hidden_RD=normal(rows, 8).requires_grad_(True),
        head_VD=normal(vocab, 8).requires_grad_(True),
        teacher_hidden_RE=teacher_hidden,
        teacher_head_VE=teacher_head,
        teacher_logprobs_R=linear_logprob(teacher_hidden, teacher_head, token, temperature=1.0)[0],
        token_ids_R=token,
        row_weight_R=torch.where(torch.arange(rows) % 3 == 2, 0, weight),
        trajectory_R=torch.arange(rows) * num_trajectories // rows,
        num_trajectories=num_trajectories,
    )


def taught_by_itself(inputs: DistillInputs) -> DistillInputs:
    hidden, head = inputs.hidden_RD.detach(), inputs.head_VD.detach()
    logprob, _ = linear_logprob(hidden, head, inputs.token_ids_R, temperature=1.0)
    return msgspec.structs.replace(inputs, teacher_hidden_RE=hidden, teacher_head_VE=head, teacher_logprobs_R=logprob)


def of_rows(inputs: DistillInputs, index: torch.Tensor) -> DistillInputs:
    """Some rows, in the given order; hidden vectors and head are the same leaves of autograd."""
    return msgspec.structs.replace(
        inputs, **{name: getattr(inputs, name)[index] for name in inputs.__struct_fields__ if "_R" in name}
    )


def gradients(output, inputs: DistillInputs) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output.loss, (inputs.hidden_RD, inputs.head_VD))


def test_every_loss_is_here():
    assert {type(one) for one in EVERY.values()} == set(typing.get_args(DistillLoss))


# Student (1/2, 1/2) and teacher (1/4, 3/4) in each of three rows, tokens 0, 1, 1, weights 2, 1, 0.
KL = math.log(2) - 0.5 * math.log(3)
K1 = (math.log(2), math.log(2 / 3))
FORWARD_KL = 0.75 * math.log(3) - math.log(2)
JENSEN_SHANNON = 0.25 * (0.25 * math.log(4 / 7) + 0.75 * math.log(4 / 3)) + 0.75 * (
    0.5 * math.log(8 / 7) + 0.5 * math.log(8 / 9)
)


@pytest.mark.parametrize(
    ("config", "measures", "of_row"),
    [
        (ReverseKL(), {"kl": KL}, (KL, KL)),
        (ForwardKL(), {"forward_kl": FORWARD_KL}, (FORWARD_KL, FORWARD_KL)),
        (JensenShannon(beta=0.25), {"jensen_shannon": JENSEN_SHANNON}, (JENSEN_SHANNON, JENSEN_SHANNON)),
        (SampledToken(), {"k1": sum(K1) / 2}, K1),
        (SampledToken(baseline=True), {"k1": sum(K1) / 2, "kl": KL}, K1),
    ],
)
def test_by_hand(config, measures, of_row):
    teacher_head = torch.log(torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    one = torch.ones(3, 1, dtype=torch.float64)
    token = torch.tensor([0, 1, 1])
    inputs = DistillInputs(
        teacher="maths",
        hidden_RD=one.clone().requires_grad_(True),
        head_VD=torch.zeros(2, 1, dtype=torch.float64, requires_grad=True),
        teacher_hidden_RE=one,
        teacher_head_VE=teacher_head,
        teacher_logprobs_R=torch.tensor([0.25, 0.75, 0.75], dtype=torch.float64).log(),
        token_ids_R=token,
        row_weight_R=torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64),
        trajectory_R=torch.tensor([1, 0, 0]),
        num_trajectories=3,
    )
    output = distill_loss(config, inputs)
    first, second = of_row
    assert output.loss.item() == pytest.approx(2 * first + second, rel=1e-12)
    assert output.value_R.tolist() == pytest.approx([first, second, 0], rel=1e-12)
    assert output.trajectory_loss_N.tolist() == pytest.approx([second, 2 * first, 0], rel=1e-12)
    assert not output.value_R.requires_grad
    expected = {"opd/loss": 2 * first + second}
    for name, value in measures.items():
        expected[f"opd/{name}"] = expected[f"opd/{name}_by_teacher/maths"] = value
    assert metric_values(output.metrics) == pytest.approx(expected, rel=1e-12)
    assert {(one.name, one.per, one.denominator) for one in output.metrics} == {
        (name, *(("token_weight", 3.0) if name == "opd/loss" else ("token", 2.0))) for name in expected
    }


def test_the_gradient_is_that_of_the_divergence():
    inputs = random_inputs(50)
    arguments = inputs.hidden_RD, inputs.head_VD, inputs.teacher_hidden_RE, inputs.teacher_head_VE, inputs.row_weight_R
    for config, loss in (
        (ReverseKL(), reverse_kl(*arguments)[0]),
        (ForwardKL(), forward_kl(*arguments)[0]),
        (JensenShannon(beta=0.3), jensen_shannon(*arguments, beta=0.3)[0]),
    ):
        expected = torch.autograd.grad(loss, arguments[:2])
        for ours, theirs in zip(gradients(distill_loss(config, inputs), inputs), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("baseline", [False, True])
def test_the_gradient_of_a_sampled_token(baseline):
    inputs = random_inputs(50)
    output = distill_loss(SampledToken(baseline=baseline), inputs)
    log_p = torch.log_softmax(inputs.hidden_RD @ inputs.head_VD.t(), -1)
    log_q = torch.log_softmax(inputs.teacher_hidden_RE @ inputs.teacher_head_VE.t(), -1)
    logprob = log_p.gather(1, inputs.token_ids_R[:, None])[:, 0]
    advantage = log_q.gather(1, inputs.token_ids_R[:, None])[:, 0] - logprob
    if baseline:
        advantage = advantage + (log_p.exp() * (log_p - log_q)).sum(-1)
    surrogate = -(inputs.row_weight_R * advantage.detach() * logprob).sum()
    expected = torch.autograd.grad(surrogate, (inputs.hidden_RD, inputs.head_VD))
    for ours, theirs in zip(gradients(output, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@every
@pytest.mark.parametrize("rows", [1, 2, 61])
@pytest.mark.parametrize("parts", [1, 2, 5, 61])
def test_parts_add_up_to_the_whole(config, rows, parts):
    inputs = random_inputs(rows)
    whole = distill_loss(config, inputs)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(parts))
    outputs = [(index, distill_loss(config, of_rows(inputs, index))) for index in order.chunk(parts)]
    torch.testing.assert_close(sum(part.loss for _, part in outputs), whole.loss, rtol=1e-12, atol=1e-12)
    by_trajectory = sum(part.trajectory_loss_N for _, part in outputs)
    torch.testing.assert_close(by_trajectory, whole.trajectory_loss_N, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.trajectory_loss_N.sum(), whole.loss.detach(), rtol=1e-12, atol=1e-12)
    merged = metric_values(merge_metrics([metric for _, part in outputs for metric in part.metrics]))
    assert merged == pytest.approx(metric_values(whole.metrics), rel=1e-12, abs=1e-12)
    for index, part in outputs:
        assert not different_bits(part.value_R, whole.value_R[index])
    summed = [sum(one) for one in zip(*(gradients(part, inputs) for _, part in outputs), strict=True)]
    for ours, theirs in zip(summed, gradients(whole, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@every
def test_nothing_but_the_weights_normalises(config):
    inputs = random_inputs(30)
    once = distill_loss(config, inputs)
    twice = distill_loss(config, msgspec.structs.replace(inputs, row_weight_R=2 * inputs.row_weight_R))
    assert torch.equal(twice.loss, 2 * once.loss)
    assert torch.equal(twice.trajectory_loss_N, 2 * once.trajectory_loss_N)
    assert torch.equal(twice.value_R, once.value_R)
    for ours, theirs in zip(gradients(twice, inputs), gradients(once, inputs), strict=True):
        assert torch.equal(ours, 2 * theirs)


@every
def test_a_teacher_that_is_the_student(config):
    inputs = taught_by_itself(random_inputs(40, dtype=torch.float32))
    output = distill_loss(config, inputs)
    assert output.loss == 0
    for one in (output.value_R, output.trajectory_loss_N, *gradients(output, inputs)):
        assert not one.any()


@every
@pytest.mark.parametrize("rows", [1, 40])
def test_a_teacher_shifted_by_one_is_far_away(config, rows):
    """A shift that drops no row: the neighbour of a one-token response is another sequence's."""
    longer = taught_by_itself(random_inputs(rows + 1, dtype=torch.float32))
    right, before = of_rows(longer, torch.arange(1, rows + 1)), of_rows(longer, torch.arange(rows))
    right = msgspec.structs.replace(right, row_weight_R=torch.ones(rows))
    assert distill_loss(config, right).loss == 0
    shifted = msgspec.structs.replace(
        right, teacher_hidden_RE=before.teacher_hidden_RE, teacher_logprobs_R=before.teacher_logprobs_R
    )
    assert float(distill_loss(config, shifted).value_R.abs().mean()) > 0.1


def test_the_right_vectors_with_the_head_of_another_teacher_are_far_away():
    inputs = taught_by_itself(random_inputs(40, dtype=torch.float32))
    other = inputs.teacher_head_VE.roll(1, 0)
    swapped = msgspec.structs.replace(inputs, teacher_head_VE=other, row_weight_R=torch.ones(40))
    assert float(distill_loss(ReverseKL(), swapped).value_R.mean()) > 1


@every
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_rows_of_weight_zero_are_inert(config, garbage):
    clean = random_inputs(30)
    unused = clean.row_weight_R == 0
    changed = {}
    for name in ("hidden_RD", "teacher_hidden_RE", "teacher_logprobs_R"):
        tensor = getattr(clean, name).detach().clone()
        tensor[unused] = garbage
        changed[name] = tensor
    changed["hidden_RD"].requires_grad_(True)
    changed["token_ids_R"] = torch.where(unused, -1, clean.token_ids_R)
    dirty = msgspec.structs.replace(clean, **changed)
    ours, theirs = distill_loss(config, clean), distill_loss(config, dirty)
    assert metric_values(ours.metrics) == metric_values(theirs.metrics)
    for one, other in zip(
        (ours.loss, ours.value_R, ours.trajectory_loss_N, *gradients(ours, clean)),
        (theirs.loss, theirs.value_R, theirs.trajectory_loss_N, *gradients(theirs, dirty)),
        strict=True,
    ):
        assert not different_bits(one, other)


@every
def test_rows_that_all_weigh_nothing(config):
    inputs = random_inputs(9)
    inputs = msgspec.structs.replace(inputs, row_weight_R=torch.zeros_like(inputs.row_weight_R))
    output = distill_loss(config, inputs)
    assert output.loss == 0
    assert metric_values(output.metrics) == {}
    assert not any(one.any() for one in gradients(output, inputs))


@every
def test_no_more_than_a_chunk_has_logits(config):
    vocab = 600
    block = 4 * CHUNK_TOKENS * vocab
    peaks = {}
    for rows in (CHUNK_TOKENS, 8 * CHUNK_TOKENS):
        inputs = random_inputs(rows, dtype=torch.float32, vocab=vocab)
        inputs = msgspec.structs.replace(inputs, row_weight_R=torch.ones(rows))
        peaks[rows] = peak_bytes(lambda: gradients(distill_loss(config, inputs), inputs))  # noqa: B023
    assert peaks[CHUNK_TOKENS] >= block
    assert peaks[8 * CHUNK_TOKENS] < peaks[CHUNK_TOKENS] + block


@every
def test_a_bfloat16_cache_is_widened(config):
    inputs = random_inputs(20, dtype=torch.float32)
    small = msgspec.structs.replace(inputs, teacher_hidden_RE=inputs.teacher_hidden_RE.bfloat16())
    wide = msgspec.structs.replace(inputs, teacher_hidden_RE=small.teacher_hidden_RE.float())
    assert torch.equal(distill_loss(config, small).value_R, distill_loss(config, wide).value_R)


@every
@pytest.mark.parametrize("name", ["teacher_logprobs_R", "token_ids_R", "trajectory_R", "teacher_hidden_RE"])
def test_wrong_shapes_are_named(config, name):
    inputs = random_inputs(5)
    with pytest.raises(ShapeError, match=f"distill_loss: {name}"):
        distill_loss(config, msgspec.structs.replace(inputs, **{name: getattr(inputs, name)[1:]}))
