"""Task 3: k3, and other functions of the log-ratio that a student may have computed."""

from collections.abc import Callable

import torch
from torch import Tensor

from lab.diagnose import Seen, named, symptoms


def k3_of(log_u: Tensor) -> Tensor:
    """k3 from log(u) = ref_logp - logp."""
    return log_u.exp() - log_u - 1


WRONG = {  # each gives what k3_kl would return, from log_u = ref_logp - logp
    "the ratio u is upside down: u = pi_ref / pi_theta": lambda log_u: k3_of(-log_u),
    "this is k1, -log(u): unbiased, but negative as often as not; k3 = u - log(u) - 1": lambda log_u: -log_u,
    "this is log(u), k1 with its sign flipped; k3 = u - log(u) - 1": lambda log_u: log_u,
    "this is k2, log(u)^2 / 2: biased; k3 = u - log(u) - 1": lambda log_u: log_u**2 / 2,
    "this is log(u)^2, twice k2: k3 = u - log(u) - 1": lambda log_u: log_u**2,
    "1 is added, not subtracted: k3 must be 0 where the policies agree": lambda log_u: log_u.exp() - log_u + 1,
    "the - 1 is missing: k3 must be 0 where the policies agree": lambda log_u: log_u.exp() - log_u,
    "this is u * log(u) - u + 1, the estimate for tokens of the reference": lambda log_u: (
        log_u.exp() * log_u - log_u.exp() + 1
    ),
    "the - log(u) is missing": lambda log_u: log_u.exp() - 1,
    "log(u) has the wrong sign: it is subtracted": lambda log_u: log_u.exp() + log_u - 1,
    "the sign of k3 is flipped": lambda log_u: -k3_of(log_u),
    "this is half of k3": lambda log_u: k3_of(log_u) / 2,
    "this is the absolute log-ratio: k3 = u - log(u) - 1": lambda log_u: log_u.abs(),
    "u itself carries no gradient: do not detach it": lambda log_u: log_u.detach().exp() - log_u - 1,
    "log(u) carries no gradient: do not detach it": lambda log_u: log_u.exp() - log_u.detach() - 1,
    "k3 is clamped: let large values through": lambda log_u: k3_of(log_u).clamp(max=1.0),
    **{
        f"the log-ratio is clamped to [-{bound}, {bound}]: let large values through": lambda log_u, bound=bound: k3_of(
            log_u.clamp(-bound, bound)
        )
        for bound in (0.1, 0.2, 0.5, 1, 2)
    },
    "the log-ratio is taken without its sign (abs)": lambda log_u: k3_of(log_u.abs()),
    "this is k3 divided by u": lambda log_u: k3_of(log_u) / log_u.exp(),
    "this is k3 weighted by u": lambda log_u: k3_of(log_u) * log_u.exp(),
}


def k3_with(wrong: Callable[[Tensor], Tensor], logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor]:
    """What a function of the log-ratio gives in place of k3, and in place of its gradient with respect to logp."""
    leaf = (ref_logp - logp).double().requires_grad_()
    value = wrong(leaf)
    return value.detach(), -torch.autograd.grad(value.sum(), leaf)[0]


def probes() -> list[tuple[Tensor, Tensor]]:
    """(logp, ref_logp) with u from 1/12 to 12, and with u from 1/300 to 3,000. Near 1 many functions agree."""
    generator = torch.Generator().manual_seed(1)
    signs = torch.tensor([[1.0, -1, 1], [-1, 1, -1]])
    ref_logp = -3 - 3 * torch.rand(2, 3, generator=generator)
    near = ref_logp - signs * (0.5 + 2 * torch.rand(2, 3, generator=generator))
    return [(near, ref_logp), (ref_logp - signs * torch.tensor([[4.0, 5, 6], [5.5, 7, 8]]), ref_logp)]


def diagnose(call: Callable[..., tuple[Tensor, Tensor] | None]) -> str:
    """What is wrong with a k3_kl; `call` gives its value and gradient with respect to logp, or None where it raises.
    "" if it is right.
    """
    seen = [Seen(given, got, k3_with(k3_of, *given)) for given in probes() if (got := call(*given)) is not None]
    wrong = [probe for probe in seen if not probe.is_right]
    if not wrong:
        return ""
    mistakes = [(name, lambda *given, wrong=wrong: k3_with(wrong, *given)) for name, wrong in WRONG.items()]
    values = [Seen(probe.given, probe.got[:1], probe.right[:1]) for probe in seen]
    if name := named(mistakes, seen):
        return name
    if all(probe.is_right for probe in values):  # then it is the gradient
        (logp, ref_logp), (_, got), (_, right) = wrong[0].given, wrong[0].got, wrong[0].right
        return symptoms.sides("the gradient of k3", got, right, (ref_logp - logp).double())
    only_values = ((name, lambda *given, both=both: both(*given)[:1]) for name, both in mistakes)
    return named(only_values, values) or symptoms.of_k3(call, *wrong[0].given)
