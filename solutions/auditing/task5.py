"""Task 5, grpo_step: its mistakes, and right solutions in other styles."""

from auditing.entries import IMPORT, entries_of, not_written

mistake, variation = entries_of(5)

# Pieces of the reference.
SAMPLE = "samples = sample_group(model, prompts, config.G, config.temperature, generator)\n"
ADVANTAGES = "advantages = group_advantages(samples.rewards, config.G, config.std)\n"
OLD = "old_logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)\n"
REF = "ref_logp = tinylm.token_logp(ref_model, samples.prompts, samples.responses, config.temperature)\n"
LOOP = "    for _ in range(config.inner_steps):\n"
NEW = "        logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)\n"
CALL = "loss, metrics = grpo_loss(logp, old_logp, ref_logp, advantages, samples.mask, config.clip, config.beta)\n"
ZERO_GRAD = "        optimizer.zero_grad()\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
RETURN_STEP = 'return samples, metrics | {"loss": loss.detach()}\n'
END = "    return samples, metrics"


def at_temperature_one(line: str) -> tuple[str, str]:
    return line, line.replace(", config.temperature", "")


MISTAKES = [
    not_written(5),
    mistake("grpo_step returns None", [(RETURN_STEP, "samples\n")], ("None",)),
    mistake(
        "grpo_step returns the metrics alone",
        [(RETURN_STEP, RETURN_STEP.replace("samples, ", ""))],
        ("tuple|pair|samples",),
    ),
    mistake(
        "grpo_step returns metrics, samples",
        [(RETURN_STEP, 'return metrics | {"loss": loss.detach()}, samples\n')],
        ("order|first|Samples",),
    ),
    mistake(
        "old_logp recomputed inside the loop", [(CALL, f"old_logp = logp.detach()\n        {CALL}")], ("old_logp",)
    ),
    mistake(
        "old_logp refreshed after every step",
        [(STEP, f"{STEP}        with torch.no_grad():\n            {OLD}")],
        ("old_logp",),
    ),
    mistake(
        "old_logp taken after the first step",
        [
            (LOOP, "    for step in range(config.inner_steps):\n"),
            (STEP, f"{STEP}        if step == 0:\n            with torch.no_grad():\n                {OLD}"),
        ],
        ("old_logp",),
    ),
    mistake(
        "old_logp carries gradient",
        [(f"    with torch.no_grad():\n        {OLD}", f"    {OLD}    with torch.no_grad():\n")],
        ("old_logp", "gradient|no_grad|detach|constant"),
    ),
    mistake(
        "ref_logp carries gradient",
        [(f"        {REF}", f"    {REF}")],
        ("ref_logp|ref_model|reference", "gradient|no_grad|detach|constant"),
    ),
    mistake("old_logp under the reference", [(OLD, OLD.replace("(model", "(ref_model"))], ("old_logp",)),
    mistake("no zero_grad", [(ZERO_GRAD, "")], ("zero_grad|add up|accumulat",)),
    mistake(
        "zero_grad outside the loop",
        [(LOOP, f"    optimizer.zero_grad()\n{LOOP}"), (ZERO_GRAD, "")],
        ("zero_grad|add up|accumulat",),
    ),
    mistake(
        "zero_grad between backward and step",
        [(ZERO_GRAD, ""), (BACKWARD, BACKWARD + ZERO_GRAD)],
        ("zero_grad|between|did not change|does not change|never changes|unchanged|not moved|not move",),
    ),
    mistake(
        "no optimizer step",
        [(STEP, "")],
        ("optimizer.step|optimizer step|no step|did not change|unchanged|not moved|not move",),
    ),
    mistake(
        "no backward",
        [(BACKWARD, "")],
        ("backward|gradient|did not change|does not change|unchanged|not moved|not move",),
    ),
    mistake(
        "step before backward",
        [(STEP, ""), (ZERO_GRAD, STEP + ZERO_GRAD)],
        ("step", "before|backward|order|gradient|fewer|late"),
    ),
    mistake(
        "one step for the sum of all inner gradients",
        [
            (ZERO_GRAD, ""),
            (STEP, ""),
            (END, "    optimizer.step()\n    optimizer.zero_grad()\n    return samples, metrics"),
        ],
        ("step", "each|every|once|one "),
    ),
    mistake(
        "a copy of the policy is trained",
        [(SAMPLE, f"model = copy.deepcopy(model)\n    {SAMPLE}")],
        ("copy|in place|did not change|does not change|unchanged|not moved|not move|optimizer",),
    ),
    mistake(
        "an optimizer of its own",
        [(SAMPLE, f"optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)\n    {SAMPLE}")],
        ("optimizer",),
    ),
    mistake(
        "the policy is its own reference",
        [(REF, REF.replace("(ref_model", "(model"))],
        ("ref_logp|ref_model|reference",),
    ),
    mistake(
        "the reference follows the policy",
        [(END, "    ref_model.load_state_dict(model.state_dict())\n    return samples, metrics")],
        ("ref_model|reference", "chang|train|moved|never"),
    ),
    mistake(
        "ref_logp at every inner step under the policy",
        [(CALL, f"ref_logp = logp.detach()\n        {CALL}")],
        ("ref_logp|ref_model|reference",),
    ),
    mistake(
        "old_logp and ref_logp swapped in the call",
        [(CALL, CALL.replace("old_logp, ref_logp", "ref_logp, old_logp"))],
        ("old_logp|ref_logp", "swap|order|ref_logp"),
    ),
    mistake(
        "loss keeps the graph alive",
        [(RETURN_STEP, RETURN_STEP.replace(".detach()", ""))],
        ("loss", "detach|graph|gradient"),
    ),
    mistake("loss missing in the metrics", [(RETURN_STEP, "return samples, metrics\n")], ("loss",)),
    mistake(
        "loss of the first inner step",
        [
            (LOOP, "    losses = []\n" + LOOP),
            (ZERO_GRAD, f"        losses.append(loss.detach())\n{ZERO_GRAD}"),
            (RETURN_STEP, 'return samples, metrics | {"loss": losses[0]}\n'),
        ],
        ("loss", "last|first|inner step"),
    ),
    mistake(
        "metrics measured again after the last step",
        [(END, f"{NEW}    {CALL}    return samples, metrics".replace("        logp", "    logp"))],
        ("after|again",),
    ),
    mistake(
        "one inner step, whatever inner_steps says", [(LOOP, "    for _ in range(1):\n")], ("inner_steps|inner step",)
    ),
    mistake(
        "one inner step too many",
        [(LOOP, "    for _ in range(config.inner_steps + 1):\n")],
        ("inner_steps|inner step|gradient step|too many",),
    ),
    mistake(
        "one inner step too few",
        [(LOOP, "    for _ in range(max(1, config.inner_steps - 1)):\n")],
        ("inner_steps|inner step|gradient step|too few",),
    ),
    mistake(
        "fresh samples at every inner step",
        """
        for _ in range(config.inner_steps):
            samples = sample_group(model, prompts, config.G, config.temperature, generator)
            advantages = group_advantages(samples.rewards, config.G, config.std)
            with torch.no_grad():
                old_logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)
                ref_logp = tinylm.token_logp(ref_model, samples.prompts, samples.responses, config.temperature)
            logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)
            loss, metrics = grpo_loss(logp, old_logp, ref_logp, advantages, samples.mask, config.clip, config.beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return samples, metrics | {"loss": loss.detach()}
        """,
        ("sampl", "once|again|every|each|same|fresh|inner step"),
    ),
    mistake(
        "samples drawn from the reference",
        [(SAMPLE, SAMPLE.replace("(model", "(ref_model"))],
        ("sampl", "reference|ref_model|policy"),
    ),
    mistake("other samples returned than trained on", [(END, f"    {SAMPLE}    return samples, metrics")], ("sampl",)),
    mistake("generator not passed to sample_group", [(SAMPLE, SAMPLE.replace(", generator", ""))], ("generator",)),
    mistake(
        "a new generator at each call",
        [(SAMPLE, SAMPLE.replace("generator)", "torch.Generator().manual_seed(config.seed))"))],
        ("generator|seed",),
    ),
    mistake("G fixed at 8", [(SAMPLE, SAMPLE.replace("config.G", "8"))], ("config.G|G = |G responses|rows",)),
    mistake(
        "advantages over P rows for G",
        [(ADVANTAGES, ADVANTAGES.replace("config.G", "len(prompts)"))],
        ("config.G|group size|group of|groups of|advantages",),
    ),
    mistake("rewards for advantages", [(ADVANTAGES, "advantages = samples.rewards\n")], ("advantages|baseline",)),
    mistake(
        "config.std ignored", [(ADVANTAGES, ADVANTAGES.replace(", config.std", ""))], ("config.std|normalize_std",)
    ),
    mistake(
        "config.clip ignored",
        [(CALL, CALL.replace("config.clip, config.beta", "beta=config.beta"))],
        ("clip", "config|ignored|default"),
    ),
    mistake("config.beta ignored", [(CALL, CALL.replace(", config.beta", ""))], ("beta", "config|ignored|default")),
    mistake(
        "clip and beta swapped",
        [(CALL, CALL.replace("config.clip, config.beta", "config.beta, config.clip"))],
        ("clip|beta",),
    ),
    mistake(
        "temperature ignored in sampling", [(SAMPLE, SAMPLE.replace("config.temperature", "1.0"))], ("temperature",)
    ),
    mistake("temperature ignored in old_logp", [at_temperature_one(OLD)], ("temperature", "old_logp|log-prob")),
    mistake("temperature ignored in ref_logp", [at_temperature_one(REF)], ("temperature", "ref_logp|log-prob")),
    mistake("temperature ignored in logp", [at_temperature_one(NEW)], ("temperature", "logp|log-prob")),
    mistake(
        "temperature missing from all log-probs",
        [at_temperature_one(f"        {OLD}"), at_temperature_one(REF), at_temperature_one(NEW)],
        ("temperature",),
    ),
    mistake(
        "temperature ignored everywhere",
        [
            (SAMPLE, SAMPLE.replace("config.temperature", "1.0")),
            at_temperature_one(f"        {OLD}"),
            at_temperature_one(REF),
            at_temperature_one(NEW),
        ],
        ("temperature",),
    ),
    mistake("mask not passed", [(CALL, CALL.replace("samples.mask", "torch.ones_like(logp)"))], ("mask|padding",)),
    mistake(
        "loss averaged over the rows with signal only",
        [
            (CALL, f"kept = advantages != 0\n        {CALL}"),
            (BACKWARD, "        (loss * len(kept) / kept.sum().clamp(min=1)).backward()\n"),
        ],
        ("factor|scale",),
    ),
    mistake(
        "gradient ascent on the loss",
        [(BACKWARD, "        (-loss).backward()\n")],
        ("sign|negat|ascent|maximi|minimi|opposite",),
    ),
    mistake(
        "loss divided by inner_steps",
        [(BACKWARD, "        (loss / config.inner_steps).backward()\n")],
        ("factor|scale|divided|times|inner_steps|small",),
    ),
    mistake(
        "only the first half of the rows is trained on",
        [
            (
                CALL,
                "half = len(logp) // 2\n"
                "        loss, metrics = grpo_loss(\n"
                "            logp[:half], old_logp[:half], ref_logp[:half], advantages[:half], samples.mask[:half],\n"
                "            config.clip, config.beta\n"
                "        )\n",
            )
        ],
        ("rows|half|all samples|batch|expected",),
    ),
    mistake(
        "REINFORCE, without the clipped surrogate",
        [
            (
                CALL,
                f"{CALL}        per_response = (logp * samples.mask).sum(dim=1) / samples.mask.sum(dim=1)\n"
                "        loss = -(advantages * per_response).mean() + config.beta * metrics['kl']\n",
            )
        ],
        ("grpo_loss|REINFORCE",),
    ),
    mistake(
        "logp once, before the loop",
        [(NEW, ""), (LOOP, f"{NEW[4:]}{LOOP}")],
        ("logp is computed once, before the loop",),
    ),
    mistake(
        "the prompts as they came for the log-probs",
        [(NEW, NEW.replace("samples.prompts", "prompts"))],
        ("tinylm.token_logp cannot work with its arguments",),
    ),
    mistake(
        "prompts looked for in config",
        [(SAMPLE, SAMPLE.replace("(model, prompts", "(model, config.prompts"))],
        ("raised AttributeError: samples = sample_group",),
    ),
    mistake(
        "metrics before the samples",
        [(RETURN_STEP, 'return metrics | {"loss": loss.detach()}, samples\n')],
        ("it returned (dict, Samples)",),
    ),
]

# Mistakes that once passed: values that no test drew, what a function leaves behind.
ONCE_PASSED = [
    mistake(
        "the optimizer's rate is lowered after the step",
        [(STEP, f"{STEP}    optimizer.param_groups[0]['lr'] *= 0.99\n")],
        ("optimizer's settings",),
    ),
    mistake("config is changed", [(STEP, f"{STEP}    config.beta *= 0.9\n")], ("config",)),
]

VARIATIONS = [
    variation("gradients set to zero, not None", [(ZERO_GRAD, ZERO_GRAD.replace("()", "(set_to_none=False)"))]),
    variation(
        "zero_grad after the step",
        [(LOOP, f"    optimizer.zero_grad()\n{LOOP}"), (ZERO_GRAD, ""), (STEP, STEP + ZERO_GRAD)],
    ),
    variation(
        "gradients cleared by hand, a while loop",
        [
            (LOOP, "    done = 0\n    while done < config.inner_steps:\n        done += 1\n"),
            (ZERO_GRAD, "        for parameter in model.parameters():\n            parameter.grad = None\n"),
        ],
    ),
    variation(
        "torch.autograd.grad",
        [
            (ZERO_GRAD, ""),
            (
                BACKWARD,
                "        parameters = list(model.parameters())\n"
                "        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):\n"
                "            parameter.grad = grad\n",
            ),
        ],
    ),
    variation(
        "inference_mode, cloned outside",
        [
            ("    with torch.no_grad():\n        old_logp", "    with torch.inference_mode():\n        old_logp"),
            (f"        {REF}", f"        {REF}    old_logp, ref_logp = old_logp.clone(), ref_logp.clone()\n"),
        ],
    ),
    variation(
        "detach for no_grad",
        [
            (
                f"    with torch.no_grad():\n        {OLD}        {REF}",
                f"    {OLD}    {REF}    old_logp, ref_logp = old_logp.detach(), ref_logp.detach()\n",
            )
        ],
    ),
    variation(
        "old_logp from the first inner step",
        [
            (f"        {OLD}", ""),
            (LOOP, "    old_logp = None\n" + LOOP),
            (CALL, f"if old_logp is None:\n            old_logp = logp.detach()\n        {CALL}"),
        ],
    ),
    variation(
        "ref_logp at every inner step under the reference",
        [(f"        {REF}", ""), (CALL, f"with torch.no_grad():\n            {REF}        {CALL}")],
    ),
    variation(
        "log-probs by log_softmax and gather",
        [
            (
                "def grpo_step(",
                "def response_logp(model, samples, temperature):\n"
                "    logits = tinylm.response_logits(model, samples.prompts, samples.responses, temperature)\n"
                "    return logits.log_softmax(dim=-1).gather(-1, samples.responses.unsqueeze(-1)).squeeze(-1)\n"
                "\n\ndef grpo_step(",
            ),
            (f"        {OLD}", "        old_logp = response_logp(model, samples, config.temperature)\n"),
            (REF, "ref_logp = response_logp(ref_model, samples, config.temperature)\n"),
            (NEW, "        logp = response_logp(model, samples, config.temperature)\n"),
        ],
    ),
    variation(
        "log-probs by cross_entropy, logsumexp and Categorical",
        [
            (IMPORT, f"import torch.nn.functional as F\n{IMPORT}"),
            (SAMPLE, f"{SAMPLE}    tokens = samples.prompts, samples.responses\n"),
            (
                f"        {OLD}",
                "        logits = tinylm.response_logits(model, *tokens, config.temperature)\n"
                "        old_logp = torch.distributions.Categorical(logits=logits).log_prob(samples.responses)\n",
            ),
            (
                REF,
                "logits = tinylm.response_logits(ref_model, *tokens, config.temperature)\n"
                "        chosen = logits.gather(-1, samples.responses[..., None])[..., 0]\n"
                "        ref_logp = chosen - logits.exp().sum(dim=-1).log()\n",
            ),
            (
                NEW,
                "        logits = tinylm.response_logits(model, *tokens, config.temperature)\n"
                "        logp = -F.cross_entropy(logits.transpose(1, 2), samples.responses, reduction='none')\n",
            ),
        ],
    ),
    variation(
        "token_logp imported by name",
        [
            (IMPORT, "from tinylm import TinyLM, token_logp\n"),
            (f"        {OLD}", f"        {OLD.replace('tinylm.', '')}"),
            (REF, REF.replace("tinylm.", "")),
            (NEW, NEW.replace("tinylm.", "")),
        ],
    ),
    variation(
        "backward group by group",
        """
        samples = sample_group(model, prompts, config.G, config.temperature, generator)
        advantages = group_advantages(samples.rewards, config.G, config.std)
        with torch.no_grad():
            old_logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)
            ref_logp = tinylm.token_logp(ref_model, samples.prompts, samples.responses, config.temperature)
        rows = len(samples.rewards)
        for _ in range(config.inner_steps):
            optimizer.zero_grad()
            logps = []
            for start in range(0, rows, config.G):
                part = slice(start, start + config.G)
                logp = tinylm.token_logp(model, samples.prompts[part], samples.responses[part], config.temperature)
                loss, _ = grpo_loss(
                    logp, old_logp[part], ref_logp[part], advantages[part], samples.mask[part], config.clip, config.beta
                )
                (loss * config.G / rows).backward()
                logps.append(logp.detach())
            loss, metrics = grpo_loss(
                torch.cat(logps), old_logp, ref_logp, advantages, samples.mask, config.clip, config.beta
            )
            optimizer.step()
        return samples, {**metrics, "loss": loss.detach()}
        """,
    ),
    variation(
        "backward row by row",
        [
            (
                BACKWARD,
                "        leaf = logp.detach().requires_grad_()\n"
                "        for i in range(len(leaf)):\n"
                "            row = slice(i, i + 1)\n"
                "            part, _ = grpo_loss(\n"
                "                leaf[row], old_logp[row], ref_logp[row], advantages[row], samples.mask[row],\n"
                "                config.clip, config.beta\n"
                "            )\n"
                "            (part / len(leaf)).backward()\n"
                "        logp.backward(leaf.grad)\n",
            )
        ],
    ),
    variation(
        "a closure for the optimizer",
        [
            (
                f"{ZERO_GRAD}{BACKWARD}{STEP}",
                "\n"
                "        def closure():\n"
                "            optimizer.zero_grad()\n"
                "            loss.backward()\n"
                "            return loss\n"
                "\n"
                "        optimizer.step(closure)\n",
            )
        ],
    ),
    variation("model.train() and ref_model.eval()", [(SAMPLE, f"model.train()\n    ref_model.eval()\n    {SAMPLE}")]),
    variation(
        "all arguments by name, the model's zero_grad, metrics written into the dict",
        [
            (ZERO_GRAD, "        model.zero_grad()\n"),
            (STEP, f'{STEP}        metrics["loss"] = loss.detach().clone()\n'),
            (RETURN_STEP, "return samples, metrics\n"),
            (
                SAMPLE,
                "samples = sample_group(\n"
                "        model=model, prompts=prompts, G=config.G,\n"
                "        temperature=config.temperature, generator=generator\n"
                "    )\n",
            ),
            (
                ADVANTAGES,
                "advantages = group_advantages(rewards=samples.rewards, G=config.G, normalize_std=config.std)\n",
            ),
            (
                CALL,
                "loss, metrics = grpo_loss(\n"
                "            logp=logp, old_logp=old_logp, ref_logp=ref_logp, advantages=advantages,\n"
                "            mask=samples.mask, clip=config.clip, beta=config.beta\n"
                "        )\n",
            ),
        ],
    ),
]
