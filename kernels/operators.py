"""TileLang forms as operators of torch, `torch.ops.rollforward`: what autograd and torch.compile see of them.

An operator's launches are opaque to torch: it knows the shapes that come out (`shapes`), and the operators that make
the gradients (`gradients`), so torch.compile takes a function with operators in it whole. The public op checks and
moves operands; an operator takes what lies on the device.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollforward.kernels.errors import BackendError, DeviceError

_LIBRARY = torch.library.Library("rollforward", "DEF")


def operator(
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    gradients: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Make an operator, once for a process, and return what calls it.

    Args:
        schema: name, arguments and results: `norm(Tensor x, float eps) -> Tensor`.
        run: called with the arguments, tensors on a GPU, without autograd; returns tensors of its own making, and
            launches on torch's current stream without waiting for the device.
        shapes: called with the arguments, tensors without values; returns empty tensors like the results.
        save: called with (ctx, inputs, output) where a gradient may be asked for; keeps in ctx what `gradients` needs.
        gradients: called with ctx and the gradients of the results; returns one for each argument, None where it has
            none. It calls operators and torch alone, and is not differentiated (`once`). None: the operator has no
            gradient.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"rollforward::{name}", shapes, lib=_LIBRARY)
    if gradients is not None:
        torch.library.register_autograd(f"rollforward::{name}", once(name, gradients), setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.rollforward, name).default


def once(op: str, gradients: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass refuse gradients that are to be differentiated: programs leave no graph, so torch would take
    what they give for constants. Its own `once_differentiable` notices that only where what comes in is none.

    Args:
        op: names it in the error. gradients: called with ctx and the gradients of the results.
    """

    @functools.wraps(gradients)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise BackendError(
                f"kernels: {op} runs as tile, which has no gradients of gradients. Leave create_graph out, or use the"
                " reference."
            )
        return gradients(ctx, *grads)

    return run


def device_of(*operands: Tensor | None) -> torch.device:
    """Return the GPU, with its number, on which operands lie: the current one where all of them are on the CPU.

    Raises:
        DeviceError: they lie on two GPUs.
    """
    found = None
    for one in operands:
        if one is None or not one.is_cuda:
            continue
        if found is not None and one.device != found:
            raise DeviceError(f"operands lie on {found} and {one.device}; a program runs on one GPU. Move them to one.")
        found = one.device
    return torch.device("cuda", torch.cuda.current_device()) if found is None else found


def on_device(*operands: Tensor | None, device: torch.device | None = None) -> list[Any]:
    """Return operands where a tile form runs: those on the CPU are copied to the device, `device_of` them where none is
    given, and autograd brings their gradients back."""
    return [one if one is None or one.is_cuda else one.to(device or device_of(*operands)) for one in operands]
