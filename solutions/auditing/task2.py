"""Task 2, group_advantages: its mistakes, and right solutions in other styles."""

from auditing.entries import IN_PLACE, entries_of, not_written

mistake, variation = entries_of(2)

# Pieces of the reference.
GROUPS = "groups = rewards.view(-1, G)\n"
CENTRED = "advantages = groups - groups.mean(dim=1, keepdim=True)\n"
STD = "(groups.std(dim=1, correction=0, keepdim=True) + eps)"
IF_STD = "    if normalize_std:\n"
FLAT = "return advantages.masked_fill(no_signal, 0.0).view(-1)"

MISTAKES = [
    not_written(2),
    mistake("group_advantages returns None", [(FLAT, FLAT.replace("return ", ""))], ("None",)),
    mistake("advantages as a list", [(FLAT, f"{FLAT}.tolist()")], ("list|tensor",)),
    mistake(
        "mean over the batch",
        [(CENTRED, "advantages = groups - rewards.mean()\n")],
        ("mean|baseline", "batch|whole|all rewards|all rows|all groups"),
    ),
    mistake(
        "std over the batch",
        [(STD, "(rewards.std(correction=0) + eps)")],
        ("std|deviation", "batch|whole|all rewards|all rows|all groups"),
    ),
    mistake("not centred", [(CENTRED, "advantages = groups\n")], ("centred|centered|subtract|baseline",)),
    mistake(
        "baseline subtracted after dividing by the std",
        [
            (CENTRED, "advantages = groups\n"),
            (f"advantages / {STD}\n", f"advantages / {STD} - groups.mean(dim=1, keepdim=True)\n"),
        ],
        ("before|centred|centered|subtract|baseline",),
    ),
    mistake(
        "advantages with the sign flipped",
        [(CENTRED, "advantages = groups.mean(dim=1, keepdim=True) - groups\n")],
        ("sign|flipped|negat",),
    ),
    mistake("variance for std", [(STD, "(groups.var(dim=1, correction=0, keepdim=True) + eps)")], ("variance",)),
    mistake(
        "sample std",
        [(STD, "(groups.std(dim=1, keepdim=True) + eps)")],
        ("sample std|sample standard|population|correction|G - 1",),
    ),
    mistake(
        "mean absolute deviation for std",
        [(STD, "(advantages.abs().mean(dim=1, keepdim=True) + eps)")],
        ("std|standard deviation|mean absolute",),
    ),
    mistake(
        "largest advantage for std",
        [(STD, "(advantages.abs().amax(dim=1, keepdim=True) + eps)")],
        ("std|standard deviation|largest|maximum",),
    ),
    mistake(
        "root of the sum of squares, not of the mean",
        [(STD, "(advantages.norm(dim=1, keepdim=True) + eps)")],
        ("std|standard deviation|divided by G|norm",),
    ),
    mistake(
        "signs for advantages",
        [(f"advantages = advantages / {STD}", "advantages = advantages.sign()")],
        ("std|standard deviation|sign",),
    ),
    mistake(
        "ranks for rewards",
        [(GROUPS, f"{GROUPS}    groups = groups.argsort(dim=1).argsort(dim=1).float()\n")],
        ("rank",),
    ),
    mistake(
        "no epsilon, NaN for a group without signal",
        [(STD, "groups.std(dim=1, correction=0, keepdim=True)"), (FLAT, "return advantages.view(-1)")],
        ("NaN|finite", "eps|equal|zero|signal"),
    ),
    mistake(
        "an epsilon of 1e-8, a group without signal gets advantages",
        [(STD, "(groups.std(dim=1, correction=0, keepdim=True) + 1e-8)"), (FLAT, "return advantages.view(-1)")],
        ("eps|equal|signal|rounding",),
    ),
    mistake(
        "epsilon added to the quotient",
        [(STD, "groups.std(dim=1, correction=0, keepdim=True) + eps"), (FLAT, "return advantages.view(-1)")],
        ("eps|NaN",),
    ),
    mistake(
        "epsilon under the root", [(STD, "(groups.var(dim=1, correction=0, keepdim=True) + eps).sqrt()")], ("eps",)
    ),
    mistake(
        "a group without signal keeps its rewards",
        [(FLAT, "return torch.where(no_signal, groups, advantages).view(-1)")],
        ("equal|signal|zero|gets 0|must be 0",),
    ),
    mistake(
        "median as the baseline",
        [(CENTRED, "advantages = groups - groups.median(dim=1, keepdim=True).values\n")],
        ("mean|median",),
    ),
    mistake(
        "leave-one-out mean as the baseline (RLOO)",
        [(CENTRED, "advantages = groups - (groups.sum(dim=1, keepdim=True) - groups) / (G - 1)\n")],
        ("leave-one-out|RLOO|G - 1|the others|other G|own reward",),
    ),
    mistake("always divided by the std", [(IF_STD, "    if True:\n")], ("normalize_std",)),
    mistake("never divided by the std", [(IF_STD, "    if False:\n")], ("normalize_std|std|standard deviation",)),
    mistake(
        "normalize_std the wrong way round", [(IF_STD, "    if not normalize_std:\n")], ("normalize_std|not divided",)
    ),
    mistake(
        "groups interleaved",
        [(GROUPS, "groups = rewards.view(G, -1).t()\n"), (FLAT, FLAT.replace(".view(-1)", ".t().reshape(-1)"))],
        ("prompt-major|interleaved|in a row|consecutive|view",),
    ),
    mistake(
        "view(G, -1) for view(-1, G)",
        [(GROUPS, "groups = rewards.view(G, -1)\n")],
        ("view|prompt-major|consecutive|in a row|groups of",),
    ),
    mistake(
        "mean and std across the prompts",
        [
            (CENTRED, "advantages = groups - groups.mean(dim=0, keepdim=True)\n"),
            (STD, "(groups.std(dim=0, correction=0, keepdim=True) + eps)"),
        ],
        ("dim=|column|across|view|prompt-major|groups of",),
    ),
    mistake("advantages shaped [P, G]", [(FLAT, FLAT.replace(".view(-1)", ""))], ("shape",)),
    mistake("advantages shaped [N, 1]", [(FLAT, FLAT.replace(".view(-1)", ".view(-1, 1)"))], ("shape",)),
    mistake(
        "rewards changed in place",
        [(CENTRED, "groups -= groups.mean(dim=1, keepdim=True)\n    advantages = groups\n")],
        (IN_PLACE,),
    ),
    mistake(
        "no keepdim in the mean",
        [(CENTRED, "advantages = groups - groups.mean(dim=1)\n")],
        ("raised RuntimeError: advantages = groups - groups.mean(dim=1)",),
    ),
]

VARIATIONS = [
    variation(
        "the formula and nothing else",
        """
        groups = rewards.view(-1, G)
        advantages = groups - groups.mean(dim=1, keepdim=True)
        if normalize_std:
            advantages = advantages / (groups.std(dim=1, correction=0, keepdim=True) + eps)
        return advantages.view(-1)
        """,
    ),
    variation(
        "loops over Python numbers",
        """
        advantages = []
        values = rewards.tolist()
        for start in range(0, len(values), G):
            group = values[start : start + G]
            mean = sum(group) / G
            std = math.sqrt(sum((value - mean) ** 2 for value in group) / G)
            for value in group:
                advantages.append((value - mean) / (std + eps) if normalize_std else value - mean)
        return torch.tensor(advantages)
        """,
    ),
    variation(
        "a loop over groups",
        """
        advantages = []
        for group in rewards.split(G):
            centred = group - group.mean()
            if normalize_std:
                centred = centred / (group.std(unbiased=False) + eps)
            advantages.append(centred)
        return torch.cat(advantages)
        """,
    ),
    variation(
        "std no smaller than eps",
        [(STD, "groups.std(dim=1, correction=0, keepdim=True).clamp_min(eps)"), (FLAT, "return advantages.view(-1)")],
    ),
    variation(
        "root of variance and squared eps",
        [
            (STD, "(groups.var(dim=1, correction=0, keepdim=True) + eps**2).sqrt()"),
            (FLAT, "return advantages.view(-1)"),
        ],
    ),
    variation(
        "layer_norm",
        """
        groups = rewards.view(-1, G)
        if normalize_std:
            return torch.nn.functional.layer_norm(groups, (G,), eps=eps**2).view(-1)
        return (groups - groups.mean(dim=1, keepdim=True)).view(-1)
        """,
    ),
    variation(
        "a guard against a std near zero",
        """
        groups = rewards.view(-1, G)
        centred = groups - groups.mean(dim=1, keepdim=True)
        if normalize_std:
            std = groups.std(dim=1, correction=0, keepdim=True)
            centred = torch.where(std > eps, centred / (std + eps), torch.zeros_like(centred))
        return centred.view(-1)
        """,
    ),
    variation(
        "no eps, but a guard for equal rewards",
        """
        groups = rewards.view(-1, G)
        centred = groups - groups.mean(dim=1, keepdim=True)
        equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
        if normalize_std:
            centred = centred / groups.std(dim=1, correction=0, keepdim=True).masked_fill(equal, 1.0)
        return torch.where(equal, torch.zeros_like(centred), centred).view(-1)
        """,
    ),
    variation("float64 inside", [(GROUPS, "groups = rewards.double().view(-1, G)\n"), (FLAT, f"{FLAT}.float()")]),
    variation("float64 as the result", [(GROUPS, "groups = rewards.double().view(-1, G)\n")]),
    variation(
        "numpy",
        """
        groups = rewards.detach().cpu().numpy().reshape(-1, G)
        advantages = groups - groups.mean(axis=1, keepdims=True)
        if normalize_std:
            advantages = advantages / (groups.std(axis=1, keepdims=True) + eps)
        return torch.from_numpy(advantages.reshape(-1))
        """,
    ),
    variation(
        "std from the mean of squares",
        [(STD, "(((groups**2).mean(1, True) - groups.mean(1, True) ** 2).clamp(min=0).sqrt() + eps)")],
    ),
    variation("sample std, corrected", [(STD, "(groups.std(dim=1, keepdim=True) * math.sqrt((G - 1) / G) + eps)")]),
]
