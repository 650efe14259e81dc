"""Problems for losses over the vocabulary, and what they give: shared by the tests of each."""

import torch


def problem(num_tokens: int, vocab: int = 37, student: int = 8, teacher: int = 5, *, scale: float = 1.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed + 1000 * num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, head = normal(num_tokens, student) * scale, normal(vocab, student)
    teacher_hidden, teacher_head = normal(num_tokens, teacher) * scale, normal(vocab, teacher)
    weight = torch.rand(num_tokens, generator=generator, dtype=torch.float64) + 0.1
    return hidden, head, teacher_hidden, teacher_head, weight


def value_and_gradients(function, arguments, **options):
    hidden, head = (one.detach().clone().requires_grad_(True) for one in arguments[:2])
    loss, value = function(hidden, head, *arguments[2:], **options)
    return loss.detach(), value.detach(), *torch.autograd.grad(loss, (hidden, head))
