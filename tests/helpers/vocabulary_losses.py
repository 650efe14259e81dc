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


def kept_sets(token_T: torch.Tensor, vocab: int, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept sets of each token, or of those at some rows: counts [T], and ids one after another. By the row in turn: no
    set, the token alone, the token and its neighbours, every third token beside it, a half in which the token lies."""
    sets = []
    for row in range(len(token_T)) if rows is None else rows.tolist():
        token = int(token_T[row])
        every = torch.arange(vocab)
        half = every[: vocab // 2] if token < vocab // 2 else every[vocab // 2 :]
        near = every[max(0, token - 1) : token + 2]
        sets.append([every[:0], every[token : token + 1], near.flip(0), every[token % 3 :: 3], half][row % 5])
    counts = torch.tensor([len(one) for one in sets], dtype=torch.int64)
    return counts, torch.cat(sets) if sets else counts


def outside(counts_T: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool [T, V], True where a row's kept set leaves the token out; row by row."""
    mask = torch.zeros(len(counts_T), vocab, dtype=torch.bool)
    for row, one in enumerate(ids.split(counts_T.tolist())):
        if len(one):
            mask[row] = True
            mask[row, one] = False
    return mask
