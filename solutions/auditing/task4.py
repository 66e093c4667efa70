"""Task 4, grpo_loss: its mistakes, and right solutions in other styles."""

from auditing.entries import IN_PLACE, entries_of, not_written

mistake, variation = entries_of(4)

# Pieces of the reference.
RATIO = "ratio = (logp - old_logp).exp()\n"
COLUMN = "advantages = advantages.unsqueeze(1)  # [N, 1]\n"
CLIPPED = "clipped = ratio.clamp(1 - clip, 1 + clip) * advantages\n"
KL = "kl = k3_kl(logp, ref_logp)\n"
MINIMUM = "torch.minimum(unclipped, clipped)"
OBJECTIVE = f"objective = {MINIMUM} - beta * kl  # [N, Tr]\n"
PER_RESPONSE = "per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1)  # [N]\n"
LOSS = "loss = -per_response.mean()\n"
RETURN_LOSS = "return loss, metrics\n"
CLIP_FRACTION = "token_mean(clipped < unclipped)"

LENGTH = "Tr|length|own tokens|number of tokens"  # what the message of a wrong divisor says

MISTAKES = [
    not_written(4),
    mistake("grpo_loss returns None", [(RETURN_LOSS, "loss, metrics\n")], ("None",)),
    mistake("grpo_loss returns the loss alone", [(RETURN_LOSS, "return loss\n")], ("tuple|pair|metrics",)),
    mistake("loss per response", [(LOSS, "loss = -per_response\n")], ("scalar|shape",)),
    mistake("loss not negated", [(LOSS, "loss = per_response.mean()\n")], ("sign|negat|minimise|minimize",)),
    mistake("max for min", [(MINIMUM, "torch.maximum(unclipped, clipped)")], ("maximum|larger|max",)),
    mistake("only the clipped term", [(MINIMUM, "clipped")], ("clipped", "only|alone|unclipped|minimum")),
    mistake("no clip", [(MINIMUM, "unclipped")], ("clip", "no clip|not clip|never|without|missing|unclipped|nothing")),
    mistake("minimum replaced by the mean", [(MINIMUM, "0.5 * (unclipped + clipped)")], ("mean|average",)),
    mistake(
        "old and new swapped",
        [(RATIO, "ratio = (old_logp - logp).exp()\n")],
        ("swap|revers|upside|wrong way|other way|on top",),
    ),
    mistake("ratio without the exp", [(RATIO, "ratio = logp - old_logp\n")], ("exp",)),
    mistake("probability for ratio", [(RATIO, "ratio = logp.exp()\n")], ("ratio|old_logp",)),
    mistake("ratio to the reference", [(RATIO, "ratio = (logp - ref_logp).exp()\n")], ("old_logp|ref_logp|reference",)),
    mistake("ratio always 1", [(RATIO, "ratio = (logp - logp.detach()).exp()\n")], ("old_logp",)),
    mistake("ratio detached", [(RATIO, "ratio = (logp - old_logp).exp().detach()\n")], ("gradient|detach",)),
    mistake(
        "sequence-level ratio",
        [(RATIO, "ratio = ((logp - old_logp) * mask).sum(dim=1, keepdim=True).exp().expand_as(logp)\n")],
        ("sequence|whole response|per token|per-token|each token",),
    ),
    mistake(
        "sequence-level ratio, normalised by length (GSPO)",
        [
            (
                RATIO,
                "log_ratio = ((logp - old_logp) * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)\n"
                "    ratio = log_ratio.exp().expand_as(logp)\n",
            )
        ],
        ("sequence|whole response|per token|per-token|each token",),
    ),
    mistake(
        "clip in log space",
        [(CLIPPED, "clipped = (logp - old_logp).clamp(-clip, clip).exp() * advantages\n")],
        ("log",),
    ),
    mistake(
        "upper bound raised (clip-higher of DAPO)",
        [(CLIPPED, "clipped = ratio.clamp(1 - clip, 1 + 1.4 * clip) * advantages\n")],
        ("1 + clip|upper|higher|interval|bound",),
    ),
    mistake(
        "clip only from above",
        [(CLIPPED, "clipped = ratio.clamp(max=1 + clip) * advantages\n")],
        ("1 - clip|lower|below|one side|one-sided|A < 0|negative",),
    ),
    mistake(
        "clip only from below",
        [(CLIPPED, "clipped = ratio.clamp(min=1 - clip) * advantages\n")],
        ("1 + clip|upper|above|one side|one-sided|A > 0|positive",),
    ),
    mistake(
        "clip only for positive advantages",
        [(MINIMUM, "torch.where(advantages > 0, torch.minimum(unclipped, clipped), unclipped)")],
        ("negative|A < 0|A = -1|positive|A > 0",),
    ),
    mistake(
        "minimum of the ratios, then times the advantage",
        [(MINIMUM, "torch.minimum(ratio, ratio.clamp(1 - clip, 1 + clip)) * advantages")],
        ("negative|A < 0|A = -1|positive|A > 0|before|multipl",),
    ),
    mistake(
        "bounds of the clip swapped",
        [(CLIPPED, "clipped = ratio.clamp(1 + clip, 1 - clip) * advantages\n")],
        ("1 - clip|swap|bound|interval|constant",),
    ),
    mistake(
        "clip around 0",
        [(CLIPPED, "clipped = ratio.clamp(-clip, clip) * advantages\n")],
        ("1 - clip|1 + clip|around|interval|bound",),
    ),
    mistake(
        "advantages clipped too",
        [(CLIPPED, "clipped = (ratio * advantages).clamp(1 - clip, 1 + clip)\n")],
        ("clamp|clip", "before|ratio|product|advantage"),
    ),
    mistake(
        "clip fixed at 0.2",
        [(CLIPPED, "clipped = ratio.clamp(0.8, 1.2) * advantages\n")],
        ("clip", "fixed|ignored|argument|0.2"),
    ),
    mistake(
        "dual clip",
        [
            (
                MINIMUM,
                "torch.minimum(unclipped, clipped).maximum(torch.where(advantages < 0, 2 * advantages, -math.inf))",
            )
        ],
        ("dual|negative|A < 0|bound|unclipped|not clipped|large",),
    ),
    mistake("mask ignored", [(PER_RESPONSE, "per_response = objective.mean(dim=1)\n")], ("mask|padding",)),
    mistake(
        "mask only in the denominator",
        [(PER_RESPONSE, "per_response = objective.sum(dim=1) / mask.sum(dim=1)\n")],
        ("mask|padding",),
    ),
    mistake(
        "mask only on the log-ratio, before the exp",
        [
            (RATIO, "ratio = ((logp - old_logp) * mask).exp()\n"),
            (KL, "kl = k3_kl(logp * mask, ref_logp * mask)\n"),
            (PER_RESPONSE, "per_response = objective.sum(dim=1) / mask.sum(dim=1)\n"),
        ],
        ("mask|padding",),
    ),
    mistake(
        "mask on the surrogate only, KL over the padding",
        [
            (OBJECTIVE, "objective = torch.minimum(unclipped, clipped)\n"),
            (PER_RESPONSE, "per_response = (objective * mask - beta * kl).sum(dim=1) / mask.sum(dim=1)\n"),
        ],
        ("mask|padding", "KL"),
    ),
    mistake(
        "mask the wrong way round in the loss",
        [(PER_RESPONSE, "per_response = (objective * (1 - mask)).sum(dim=1) / mask.sum(dim=1)\n")],
        ("mask|padding",),
    ),
    mistake(
        "divided by Tr", [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1) / mask.shape[1]\n")], (LENGTH,)
    ),
    mistake(
        "divided by the longest length",
        [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).max()\n")],
        (f"longest|{LENGTH}",),
    ),
    mistake(
        "one average over all tokens of the batch",
        [(LOSS, "loss = -(objective * mask).sum() / mask.sum()\n")],
        ("all tokens|every token|tokens of the batch|token-level|over tokens",),
    ),
    mistake(
        "sum over a response's tokens",
        [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1)\n")],
        ("sum|divide|length|own tokens",),
    ),
    mistake("sum over responses", [(LOSS, "loss = -per_response.sum()\n")], ("sum|mean over|average over|divide",)),
    mistake("sum over all tokens", [(LOSS, "loss = -(objective * mask).sum()\n")], ("sum|divide|mean|average",)),
    mistake("loss scaled by 1.005", [(LOSS, "loss = -1.005 * per_response.mean()\n")], ("factor|scale|times",)),
    mistake(
        "loss zero, no gradient",
        [(LOSS, "loss = torch.zeros((), requires_grad=True)\n")],
        ("constant|depend|gradient|zero",),
    ),
    mistake("loss times zero", [(LOSS, "loss = 0.0 * per_response.mean()\n")], ("constant|depend|gradient|zero",)),
    mistake(
        "loss right, gradient lost",
        [(LOSS, "loss = (-per_response.mean()).detach().requires_grad_()\n")],
        ("gradient|detach",),
    ),
    mistake("KL with the wrong sign", [(OBJECTIVE, OBJECTIVE.replace("-", "+"))], ("KL", "sign|added|subtract")),
    mistake("beta dropped", [(OBJECTIVE, OBJECTIVE.replace("beta * ", ""))], ("beta",)),
    mistake(
        "KL dropped",
        [(OBJECTIVE, OBJECTIVE.replace(" - beta * kl", ""))],
        ("KL|penalty|beta", "missing|drop|subtract|without|no "),
    ),
    mistake(
        "beta applied twice", [(OBJECTIVE, OBJECTIVE.replace("beta *", "beta * beta *"))], ("beta", "twice|square")
    ),
    mistake(
        "beta fixed at 0.04", [(OBJECTIVE, OBJECTIVE.replace("beta", "0.04"))], ("beta", "fixed|ignored|argument|0.04")
    ),
    mistake("KL detached", [(OBJECTIVE, OBJECTIVE.replace("kl", "kl.detach()"))], ("gradient|detach",)),
    mistake(
        "KL of the policy to the old policy", [(KL, "kl = k3_kl(logp, old_logp)\n")], ("ref_logp|reference|old_logp",)
    ),
    mistake("KL of the old policy", [(KL, "kl = k3_kl(old_logp, ref_logp)\n")], ("KL", "logp")),
    mistake(
        "arguments of k3_kl swapped", [(KL, "kl = k3_kl(ref_logp, logp)\n")], ("swap|revers|order|wrong way|other way",)
    ),
    mistake("k2 inside the loss", [(KL, "kl = 0.5 * (logp - ref_logp) ** 2\n")], ("k2|k3",)),
    mistake(
        "KL averaged over all tokens, outside the responses' means",
        [
            (OBJECTIVE, "objective = torch.minimum(unclipped, clipped)\n"),
            (LOSS, "loss = -per_response.mean() + beta * (kl * mask).sum() / mask.sum()\n"),
        ],
        ("KL", "all tokens|response"),
    ),
    mistake(
        "KL summed over a response's tokens",
        [
            (OBJECTIVE, "objective = torch.minimum(unclipped, clipped)\n"),
            (LOSS, "loss = -per_response.mean() + beta * (kl * mask).sum(dim=1).mean()\n"),
        ],
        ("KL", "sum"),
    ),
    mistake("advantages not broadcast", [(f"    {COLUMN}", "")], ("advantages|broadcast|unsqueeze",)),
    mistake(
        "advantages broadcast over the rows",
        [(COLUMN, "advantages = advantages.unsqueeze(0)\n")],
        ("advantages|broadcast|unsqueeze",),
    ),
    mistake(
        "advantages tiled token-major",
        [(COLUMN, "advantages = advantages.repeat(logp.shape[1]).view_as(logp)\n")],
        ("advantages|broadcast|unsqueeze",),
    ),
    mistake(
        "advantages normalised again over the batch",
        [(COLUMN, "advantages = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).unsqueeze(1)\n")],
        ("advantages|normali",),
    ),
    mistake("no metrics", [(RETURN_LOSS, "return loss, {}\n")], ("clip_fraction|metrics",)),
    mistake("metric ratio missing", [(', "ratio": token_mean(ratio)}', "}")], ("ratio",)),
    mistake("metrics keep the graph", [("mask.sum()).detach()", "mask.sum())")], ("graph|detach|gradient",)),
    mistake(
        "clip_fraction counts every ratio outside",
        [(CLIP_FRACTION, "token_mean((ratio - 1).abs() > clip)")],
        ("clip_fraction", "outside|smaller|advantage"),
    ),
    mistake(
        "clip_fraction counts ties",
        [(CLIP_FRACTION, "token_mean(clipped <= unclipped)")],
        ("clip_fraction", "tie|equal|inside|smaller"),
    ),
    mistake(
        "clip_fraction counts padding",
        [(CLIP_FRACTION, "(clipped < unclipped).float().mean()")],
        ("clip_fraction", "padding|mask|own"),
    ),
    mistake(
        "clip_fraction as a count",
        [(CLIP_FRACTION, "((clipped < unclipped) * mask).sum()")],
        ("clip_fraction", "sum|count|mean|share"),
    ),
    mistake("metric kl times beta", [('"kl": token_mean(kl)', '"kl": token_mean(beta * kl)')], ("kl", "beta")),
    mistake(
        "metric kl over the padding too",
        [('"kl": token_mean(kl)', '"kl": kl.mean().detach()')],
        ("kl", "padding|mask|own"),
    ),
    mistake(
        "metric ratio over the padding too",
        [('"ratio": token_mean(ratio)', '"ratio": ratio.mean().detach()')],
        ("ratio", "padding|mask|own"),
    ),
    mistake(
        "metrics averaged per response first",
        [("((values * mask).sum() / mask.sum())", "((values * mask).sum(dim=1) / mask.sum(dim=1)).mean()")],
        ("response|own tokens",),
    ),
    mistake("advantages changed in place", [(COLUMN, "advantages.unsqueeze_(1)\n")], (IN_PLACE,)),
    mistake("old_logp changed in place", [(RATIO, f"old_logp.mul_(mask)\n    {RATIO}")], (IN_PLACE,)),
    mistake(
        "the ratio clamped in place",
        [(CLIPPED, "clipped = ratio.clamp_(1 - clip, 1 + clip) * advantages\n")],
        ("changed in place", "clamp, not clamp_"),
    ),
    mistake(
        "the ratio against logp itself",
        [(RATIO, "ratio = (logp - logp.detach()).exp()\n")],
        ("old_logp is not used",),
    ),
    mistake(
        "divided by all tokens, and by N",
        [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1) / mask.sum()\n")],
        ("number of tokens of the whole batch",),
    ),
    mistake("metrics before the loss", [(RETURN_LOSS, "return metrics, loss\n")], ("it returned (dict, Tensor)",)),
    mistake(
        "the mask summed over the responses",
        [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1) / mask.sum(dim=0)\n")],
        ("mask.sum(dim=1)",),
    ),
]

# Mistakes that once passed: values that no test drew, what a function leaves behind.
ONCE_PASSED = [
    mistake(
        "the clip is never wider than 0.5",
        [("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(1 - min(clip, 0.5), 1 + min(clip, 0.5))")],
        ("loss|gradient|clip",),
    ),
    mistake(
        "a clip fraction with a fixed 0.2",
        [(CLIP_FRACTION, "token_mean(ratio.clamp(0.8, 1.2) * advantages < unclipped)")],
        ("clip_fraction",),
    ),
]

VARIATIONS = [
    variation(
        "minus the maximum of the negated", [(OBJECTIVE, "objective = -torch.max(-unclipped, -clipped) - beta * kl\n")]
    ),
    variation(
        "where on the sign of the advantage",
        [(MINIMUM, "torch.where(advantages > 0, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip)) * advantages")],
    ),
    variation(
        "clipped by min and max",
        [
            (
                CLIPPED,
                "low, high = torch.full_like(ratio, 1 - clip), torch.full_like(ratio, 1 + clip)\n"
                "    clipped = torch.max(torch.min(ratio, high), low) * advantages\n",
            )
        ],
    ),
    variation("minimum by relu", [(MINIMUM, "(unclipped - torch.relu(unclipped - clipped))")]),
    variation("ratio as a quotient of probabilities", [(RATIO, "ratio = logp.exp() / old_logp.exp()\n")]),
    variation("advantages expanded to all tokens", [(COLUMN, "advantages = advantages[:, None].expand_as(logp)\n")]),
    variation(
        "mask as bool, where",
        [(PER_RESPONSE, "per_response = torch.where(mask.bool(), objective, 0.0).sum(1) / mask.sum(1)\n")],
    ),
    variation("mask as int", [(RATIO, f"mask = mask.long()\n    {RATIO}")]),
    variation("mask as bool", [(RATIO, f"mask = mask.bool()\n    {RATIO}")]),
    variation(
        "masked_select row by row, then mean",
        [
            (
                PER_RESPONSE,
                "selected = [row.masked_select(own > 0) for row, own in zip(objective, mask, strict=True)]\n"
                "    per_response = torch.stack([row.mean() for row in selected])\n",
            )
        ],
    ),
    variation(
        "denominator no smaller than 1",
        [(PER_RESPONSE, PER_RESPONSE.replace("/ mask.sum(dim=1)", "/ mask.sum(dim=1).clamp(min=1)"))],
    ),
    variation(
        "denominator + 1e-8", [(PER_RESPONSE, PER_RESPONSE.replace("/ mask.sum(dim=1)", "/ (mask.sum(dim=1) + 1e-8)"))]
    ),
    variation(
        "padding zeroed in the log-ratios as well",
        [(RATIO, "ratio = ((logp - old_logp) * mask).exp()\n"), (KL, "kl = k3_kl(logp, ref_logp) * mask\n")],
    ),
    variation(
        "padding filled before anything else",
        [
            (
                RATIO,
                "logp, old_logp, ref_logp = (t.masked_fill(mask == 0, 0.0) for t in (logp, old_logp, ref_logp))\n"
                f"    {RATIO}",
            )
        ],
    ),
    variation(
        "float64 inside and as the result of the loss",
        [(RATIO, f"logp, old_logp, ref_logp = logp.double(), old_logp.double(), ref_logp.double()\n    {RATIO}")],
    ),
    variation(
        "einsum with weights",
        [(LOSS, 'loss = -torch.einsum("nt,nt,n->", objective, mask.float(), 1 / mask.sum(dim=1)) / len(mask)\n')],
    ),
    variation(
        "loops over rows and tokens",
        """
        row_means, clips, kls, ratios = [], [], [], []
        for i in range(logp.shape[0]):
            terms = []
            for t in range(logp.shape[1]):
                if mask[i, t] == 0:
                    continue
                ratio = torch.exp(logp[i, t] - old_logp[i, t])
                unclipped = ratio * advantages[i]
                clipped = torch.clamp(ratio, 1 - clip, 1 + clip) * advantages[i]
                u = torch.exp(ref_logp[i, t] - logp[i, t])
                kl = u - torch.log(u) - 1
                terms.append(torch.min(unclipped, clipped) - beta * kl)
                clips.append(float(clipped < unclipped))
                kls.append(kl.detach())
                ratios.append(ratio.detach())
            row_means.append(sum(terms) / len(terms))
        loss = -sum(row_means) / len(row_means)
        metrics = {
            "clip_fraction": torch.tensor(clips).mean(),
            "kl": torch.stack(kls).mean(),
            "ratio": torch.stack(ratios).mean(),
        }
        return loss, metrics
        """,
    ),
    variation(
        "the loss in two parts",
        [
            (
                LOSS,
                "own = mask / mask.sum(dim=1, keepdim=True)\n"
                "    policy_loss = -(torch.minimum(unclipped, clipped) * own).sum(dim=1).mean()\n"
                "    kl_loss = (kl * own).sum(dim=1).mean()\n"
                "    loss = policy_loss + beta * kl_loss\n",
            )
        ],
    ),
    variation(
        "clip_fraction by cases",
        [
            (
                CLIP_FRACTION,
                "token_mean(((advantages > 0) & (ratio > 1 + clip)) | ((advantages < 0) & (ratio < 1 - clip)))",
            )
        ],
    ),
    variation(
        "one metric more",
        [(RETURN_LOSS, 'metrics["length"] = mask.sum(dim=1).float().mean()\n    return loss, metrics\n')],
    ),
    variation(
        "metrics under no_grad",
        [
            ("    metrics = {", "    with torch.no_grad():\n        metrics = {"),
            ("mask.sum()).detach()", "mask.sum())"),
        ],
    ),
]
