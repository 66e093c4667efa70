"""Task 3, k3_kl: its mistakes, and right solutions in other styles."""

from auditing.entries import IN_PLACE, entries_of, not_written

mistake, variation = entries_of(3)

# Pieces of the reference.
LOG_U = "log_u = ref_logp - logp\n"
K3 = "return log_u.exp() - log_u - 1"

MISTAKES = [
    not_written(3),
    mistake("k3_kl returns None", [(K3, "log_u.exp() - log_u - 1")], ("None",)),
    mistake("k3 as an array of numpy", [(K3, "return (log_u.exp() - log_u - 1).detach().numpy()")], ("tensor|array",)),
    mistake(
        "reversed ratio", [(LOG_U, "log_u = logp - ref_logp\n")], ("revers|upside|swap|wrong way|other way|on top",)
    ),
    mistake("k1 for k3", [(K3, "return -log_u")], ("k1",)),
    mistake("k2 for k3", [(K3, "return 0.5 * log_u**2")], ("k2",)),
    mistake("the square without the half", [(K3, "return log_u**2")], ("k2|square",)),
    mistake("the - 1 missing", [(K3, "return log_u.exp() - log_u")], ("- 1|minus 1|minus one",)),
    mistake("log u added", [(K3, "return log_u.exp() + log_u - 1")], ("log(u)|log u|log_u|sign",)),
    mistake("u times log u", [(K3, "return log_u.exp() * log_u - log_u.exp() + 1")], ("u * log|u log|times log",)),
    mistake("policy detached", [(LOG_U, "log_u = ref_logp - logp.detach()\n")], ("detach|gradient",)),
    mistake("u detached", [(K3, "return log_u.exp().detach() - log_u - 1")], ("gradient|detach",)),
    mistake("computed under no_grad", [(LOG_U, f"with torch.no_grad():\n        {LOG_U}")], ("gradient|detach",)),
    mistake("mean over everything", [(K3, "return (log_u.exp() - log_u - 1).mean()")], ("shape|scalar|per token",)),
    mistake("sum over the tokens", [(K3, "return (log_u.exp() - log_u - 1).sum(dim=1)")], ("shape|per token",)),
    mistake("k3 negated", [(K3, "return log_u + 1 - log_u.exp()")], ("sign|negat",)),
    mistake("k3 halved", [(K3, "return 0.5 * (log_u.exp() - log_u - 1)")], ("half|0.5|factor|twice",)),
    mistake("absolute log-ratio", [(LOG_U, "log_u = (ref_logp - logp).abs()\n")], ("abs|sign|both",)),
    mistake("log-ratio clamped", [(LOG_U, "log_u = (ref_logp - logp).clamp(-0.5, 0.5)\n")], ("clamp|clip|large",)),
    mistake(
        "u from the log-probs' quotient", [(LOG_U, "log_u = (ref_logp / logp).log()\n")], ("exp|quotient|difference",)
    ),
    mistake("ref_logp changed in place", [(LOG_U, "log_u = ref_logp.sub_(logp)\n")], (IN_PLACE,)),
]

# Mistakes that once passed: values that no test drew, what a function leaves behind.
ONCE_PASSED = [
    mistake("k3 cut off at 10", [(K3, "return (log_u.exp() - log_u - 1).clamp(max=10)")], ("k3",)),
    mistake("the log-ratio cut off at 5", [(LOG_U, "log_u = (ref_logp - logp).clamp(-5, 5)\n")], ("k3",)),
]

VARIATIONS = [
    variation("expm1", [(K3, "return torch.expm1(log_u) - log_u")]),
    variation("u as a quotient of probabilities", "u = ref_logp.exp() / logp.exp()\nreturn u - u.log() - 1"),
    variation("never below zero", [(K3, f"{K3.replace('return ', 'return (')}).clamp(min=0)")]),
    variation("the absolute value, which changes nothing", [(K3, "return (log_u.exp() - log_u - 1).abs()")]),
    variation("float64 inside and as the result of k3", [(LOG_U, "log_u = ref_logp.double() - logp.double()\n")]),
    variation(
        "F.kl_div for minus u log u",
        """
        # kl_div(input, target, log_target) is exp(target) * (target - input): exp(0) * (0 - log u) = - log u.
        log_u = ref_logp - logp
        zero = torch.zeros_like(log_u)
        return log_u.exp() + torch.nn.functional.kl_div(log_u, zero, reduction="none", log_target=True) - 1
        """,
    ),
    variation(
        "piece by piece",
        """
        pieces = []
        for piece, ref_piece in zip(logp.flatten().split(64), ref_logp.flatten().split(64), strict=True):
            u = torch.exp(ref_piece - piece)
            pieces.append(u - torch.log(u) - 1)
        return torch.cat(pieces).view_as(logp)
        """,
    ),
]
