"""A head's rounded copy on a GPU: of one device, stream and state of the head, and never part of a graph."""

import pytest
import torch
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.kernels.loss.rounded_head import rounded_head
from tests.helpers.bits import different_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device of compute capability 9.0"),
]

V, D, COUNT = 1000, 520, 40


@pytest.fixture(autouse=True, scope="module")
def tile_form():
    dispatch.warm(vocab_sweep.programs(V, D), jobs=8)
    dispatch.choose({"linear_logprob": "tile"})
    yield
    dispatch.choose({})


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors, a float32 head that is not of bfloat16's numbers, and tokens."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(COUNT, D, generator=generator, device="cuda")
    head = torch.randn(V, D, generator=generator, device="cuda") * D**-0.5
    return hidden, head, torch.arange(COUNT, device="cuda") * 7


def logprob(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    return linear_logprob(hidden, head, token, temperature=1.0)[0]


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_values_follow_what_is_written_to_the_head(on):
    hidden, head, token = problem()
    head = head.to(on)
    first = logprob(hidden, head, token)
    kept = rounded_head(head, hidden.device)
    assert kept.is_cuda
    assert different_bits(logprob(hidden, head, token), first) == 0
    assert rounded_head(head, hidden.device) is kept
    head.view(torch.int32)[int(token[3]), 5] ^= 1 << 22
    second = logprob(hidden, head, token)
    assert rounded_head(head, hidden.device) is not kept
    assert different_bits(second, logprob(hidden, head.clone(), token)) == 0
    assert second[3] != first[3]


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_a_gradient_is_of_the_head_as_it_was(on):
    hidden, head, token = problem()
    head = head.to(on).requires_grad_()
    (expected,) = torch.autograd.grad(logprob(hidden, head, token).sum(), head)
    assert (expected.device, expected.dtype) == (head.device, torch.float32)
    loss = logprob(hidden, head, token).sum()
    with torch.no_grad():
        head.mul_(2)
    assert different_bits(torch.autograd.grad(loss, head)[0], expected) == 0


def test_hidden_vectors_on_the_cpu_meet_a_head_on_the_gpu():
    hidden, head, token = problem()
    expected = logprob(hidden, head, token)
    ours = logprob(hidden.cpu(), head, token.cpu())
    assert not ours.is_cuda
    assert different_bits(ours, expected.cpu()) == 0


def test_another_stream_has_its_own():
    hidden, head, token = problem()
    expected, kept = logprob(hidden, head, token), rounded_head(head, hidden.device)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        ours = logprob(hidden, head, token)
        assert rounded_head(head, hidden.device) is not kept
    torch.cuda.current_stream().wait_stream(other)
    assert different_bits(ours, expected) == 0


def test_a_graph_reads_the_head_as_it_is_when_replayed():
    hidden, head, token = problem()
    logprob(hidden, head, token)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = logprob(hidden, head, token)
    head.mul_(1.5)
    graph.replay()
    assert different_bits(captured, logprob(hidden, head, token)) == 0
