"""Task 5: what a step calls, and what the order of its calls says."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

import tinylm
from tinylm import TinyLM


@dataclass
class Calls:
    """What a step called, in order. Words may depend on it, a verdict never."""

    sampled: list[int] = field(default_factory=list)  # the rows of each tinylm.generate
    order: list[str] = field(default_factory=list)  # "logp" (the policy, with gradient) "zero_grad" "backward" "step"
    losses: list[dict] = field(default_factory=list)  # the arguments of each grpo_loss, by their names


@contextlib.contextmanager
def watched(grpo: ModuleType, policy: TinyLM, optimizer: torch.optim.Optimizer) -> Iterator[Calls]:
    """What happens within, as Calls. Nothing is changed by being watched."""
    calls = Calls()
    take_loss = getattr(grpo, "grpo_loss", None)

    def noting(function: Callable, note: Callable) -> Callable:
        @functools.wraps(function)
        def noted(*args, **kwargs):
            note(*args, **kwargs)
            return function(*args, **kwargs)

        return noted

    def note_sampling(model, prompts, *_, **__):
        calls.sampled.append(len(prompts))

    def note_loss(*args, **kwargs):
        with contextlib.suppress(TypeError):  # of arguments that do not fit, which the call itself is about to raise
            bound = inspect.signature(take_loss).bind(*args, **kwargs)
            bound.apply_defaults()
            values = {name: copy_of(value) for name, value in bound.arguments.items()}
            calls.losses.append(values | {"old_logp carries gradient": needs_gradient(bound.arguments["old_logp"])})

    def note_forward(*_):
        if torch.is_grad_enabled():
            calls.order.append("logp")

    def note_backward(_):
        calls.order.append("backward")

    first = next(policy.parameters())
    with contextlib.ExitStack() as stack:
        for owner, name, note in (
            (tinylm, "generate", note_sampling),
            *([(grpo, "grpo_loss", note_loss)] if take_loss else []),
            (optimizer, "zero_grad", lambda *_, **__: calls.order.append("zero_grad")),
            (optimizer, "step", lambda *_, **__: calls.order.append("step")),
        ):
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name), note)))
        for hook in (
            policy.register_forward_pre_hook(note_forward),
            first.register_post_accumulate_grad_hook(note_backward),
        ):
            stack.callback(hook.remove)
        yield calls


def copy_of(value):
    """A detached copy of a tensor, in float64; anything else as it is."""
    return value.detach().clone().double() if isinstance(value, Tensor) else value


def needs_gradient(value) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def twice_through_a_graph(calls: Calls) -> str:
    """Why a graph was gone through a second time."""
    before_backward = list(itertools.takewhile(lambda event: event != "backward", calls.order))
    if before_backward.count("logp") > 1:
        return "old_logp carries gradient: compute it once, before the loop, under torch.no_grad()"
    if calls.order.count("logp") == 1:
        return "logp is computed once, before the loop: compute it anew in each inner step, as the policy has moved"
    return "ref_logp carries gradient: compute it once, before the loop, under torch.no_grad()"
