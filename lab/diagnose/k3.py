"""Task 3: k3, and other functions of the log-ratio that a student may have computed."""

import torch
from torch import Tensor

from lab.examine import Mistakes, close


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


def values(log_u: Tensor) -> Mistakes:
    """What the mistakes give in place of k3."""
    return {name: wrong(log_u) for name, wrong in WRONG.items()}


def gradients(log_u: Tensor) -> Mistakes:
    """What those whose value is right give in place of the gradient of k3 with respect to logp, 1 - u."""
    found = {}
    for name, wrong in WRONG.items():
        if not close(wrong(log_u), k3_of(log_u)):
            continue
        leaf = log_u.clone().requires_grad_()
        found[name] = -torch.autograd.grad(wrong(leaf).sum(), leaf)[0]
    return found
