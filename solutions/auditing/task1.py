"""Task 1, sample_group: its mistakes, and right solutions in other styles."""

from auditing.entries import IMPORT, entries_of, not_written

mistake, variation = entries_of(1)

# Pieces of the reference.
GENERATE = "responses = tinylm.generate(model, prompts, temperature, generator)\n"
MASK = "mask=tinylm.response_mask(responses),"
REWARDS = "rewards=torch.tensor(rewards, dtype=torch.float32, device=prompts.device),"
SCORE = "zip(tinylm.decode(prompts), texts, strict=True)"
REWARD = f"rewards = [tinylm.reward(prompt, text) for prompt, text in {SCORE}]"

SUM = "sum(map(int, prompt.rstrip('=').split('+')))"  # what `prompt` asks for

MISTAKES = [
    not_written(1),
    mistake("sample_group returns None", [("return Samples(", "Samples(")], ("None",)),
    mistake(
        "sample_group returns a tuple",
        """
        prompts = prompts.repeat_interleave(G, dim=0)
        responses = tinylm.generate(model, prompts, temperature, generator)
        texts = tinylm.decode_and_strip_padding(responses)
        rewards = [tinylm.reward(prompt, text) for prompt, text in zip(tinylm.decode(prompts), texts, strict=True)]
        return prompts, responses, tinylm.response_mask(responses), torch.tensor(rewards), texts
        """,
        ("Samples", "tuple"),
    ),
    mistake(
        "repeat for repeat_interleave",
        [("prompts.repeat_interleave(G, dim=0)", "prompts.repeat(G, 1)")],
        ("repeat_interleave|prompt-major|in a row|consecutive",),
    ),
    mistake(
        "the prompts as they came in the Samples",
        [
            ("    prompts = prompts.repeat_interleave(G, dim=0)\n", "    rows = prompts.repeat_interleave(G, dim=0)\n"),
            (GENERATE, "responses = tinylm.generate(model, rows, temperature, generator)\n"),
            (SCORE, "zip(tinylm.decode(rows), texts, strict=True)"),
        ],
        ("prompts", "shape|rows|repeat"),
    ),
    mistake(
        "one response copied G times",
        [
            (
                GENERATE,
                "responses = tinylm.generate(model, prompts[::G], temperature, generator).repeat_interleave(G, 0)\n",
            )
        ],
        ("copied|copies|same response|same answer|identical|all equal|differ",),
    ),
    mistake(
        "greedy for sampling",
        [(GENERATE, "responses = tinylm.generate(model, prompts, temperature, generator, greedy=True)\n")],
        ("greedy|likeliest|argmax",),
    ),
    mistake(
        "sampling ignores the temperature",
        [(GENERATE, "responses = tinylm.generate(model, prompts, generator=generator)\n")],
        ("temperature",),
    ),
    mistake(
        "sampling at the inverse temperature",
        [(GENERATE, "responses = tinylm.generate(model, prompts, 1 / temperature, generator)\n")],
        ("temperature",),
    ),
    mistake(
        "generator not passed on",
        [(GENERATE, "responses = tinylm.generate(model, prompts, temperature)\n")],
        ("generator",),
    ),
    mistake(
        "a new generator with a fixed seed",
        [(GENERATE, "responses = tinylm.generate(model, prompts, temperature, torch.Generator().manual_seed(0))\n")],
        ("generator|seed",),
    ),
    mistake(
        "the given generator is seeded again",
        [(GENERATE, f"if generator is not None:\n        generator.manual_seed(0)\n    {GENERATE}")],
        ("generator|seed",),
    ),
    mistake(
        "one seed for every response of a group",
        [
            (
                GENERATE,
                "seed = int(torch.randint(2**31, (1,), generator=generator))\n"
                "    draws = [torch.Generator().manual_seed(seed) for _ in range(G)]\n"
                "    groups = [tinylm.generate(model, prompts[::G], temperature, draw) for draw in draws]\n"
                "    responses = torch.stack(groups, dim=1).flatten(0, 1)\n",
            )
        ],
        ("copied|copies|same response|same answer|identical|all equal|differ|seed",),
    ),
    mistake(
        "mask covers the prompt too",
        [(MASK, "mask=torch.cat([torch.ones_like(prompts).float(), tinylm.response_mask(responses)], dim=1),")],
        ("mask", "prompt"),
    ),
    mistake(
        "mask drops the end-of-sequence",
        [(MASK, "mask=((responses != tinylm.EOS) & (responses != tinylm.PAD)).float(),")],
        ("mask", "end-of-sequence|EOS"),
    ),
    mistake(
        "mask keeps what follows the end-of-sequence",
        [(MASK, "mask=torch.ones_like(responses).float(),")],
        ("mask", "padding|after"),
    ),
    mistake(
        "mask keeps one token after the end-of-sequence",
        [(MASK, "mask=torch.cat([torch.ones(len(responses), 1), tinylm.response_mask(responses)[:, :-1]], dim=1),")],
        ("mask", "shift|by one|one position|one place|one token|too far|padding|after"),
    ),
    mistake(
        "mask shifted left by one",
        [(MASK, "mask=torch.cat([tinylm.response_mask(responses)[:, 1:], torch.zeros(len(responses), 1)], dim=1),")],
        ("mask", "shift|by one|one position|one place|one token|end-of-sequence|EOS"),
    ),
    mistake(
        "mask rolled right by one",
        [(MASK, "mask=tinylm.response_mask(responses).roll(1, dims=1),")],
        ("mask", "shift|by one|one position|one place|one token"),
    ),
    mistake(
        "mask only where the policy wrote no padding",
        [(MASK, "mask=(responses != tinylm.PAD).float(),")],
        ("mask", "padding|PAD|own tokens"),
    ),
    mistake(
        "mask the wrong way round",
        [(MASK, "mask=1 - tinylm.response_mask(responses),")],
        ("mask", "invert|wrong way|other way|padding|swap|complement|1 on"),
    ),
    mistake(
        "answers scored against the next prompt",
        [(SCORE, "zip(tinylm.decode(prompts.roll(G, 0)), texts, strict=True)")],
        ("reward", "prompt"),
    ),
    mistake(
        "answers scored in the order of repeat",
        [(SCORE, "zip(tinylm.decode(prompts[::G].repeat(G, 1)), texts, strict=True)")],
        ("reward", "prompt"),
    ),
    mistake(
        "texts with their padding",
        [("tinylm.decode_and_strip_padding(responses)", "tinylm.decode(responses)")],
        ("padding|strip",),
    ),
    mistake(
        "texts cut before the end-of-sequence",
        [
            (
                "texts = tinylm.decode_and_strip_padding(responses)",
                "texts = [text.split('$')[0] for text in tinylm.decode(responses)]",
            )
        ],
        ("end-of-sequence|EOS|strip",),
    ),
    mistake(
        "an end-of-sequence added to truncated answers",
        [
            (
                "texts = tinylm.decode_and_strip_padding(responses)",
                "texts = [text.split('$')[0] + '$' for text in tinylm.decode(responses)]",
            )
        ],
        ("text",),
    ),
    mistake(
        "rewards shaped [P, G]",
        [(REWARDS, "rewards=torch.tensor(rewards, dtype=torch.float32, device=prompts.device).view(-1, G),")],
        ("rewards", "shape"),
    ),
    mistake(
        "rewards shaped [N, 1]",
        [(REWARDS, "rewards=torch.tensor(rewards, dtype=torch.float32, device=prompts.device).unsqueeze(1),")],
        ("rewards", "shape"),
    ),
    mistake(
        "rewards as int64",
        [(REWARDS, "rewards=torch.tensor([int(value) for value in rewards], device=prompts.device),")],
        ("rewards", "dtype|float32"),
    ),
    mistake("rewards as a list", [(REWARDS, "rewards=rewards,")], ("rewards", "list|tensor")),
    mistake(
        "rewards of +1 and -1",
        [(REWARDS, "rewards=2 * torch.tensor(rewards, dtype=torch.float32, device=prompts.device) - 1,")],
        ("reward", "-1|0 or 1|0.0 or 1.0|0 for"),
    ),
    mistake(
        "responses with the prompt in front",
        [("responses=responses,", "responses=torch.cat([prompts, responses], dim=1),")],
        ("responses", "shape|prompt"),
    ),
    mistake(
        "the prompts flattened by repeat_interleave",
        [("prompts.repeat_interleave(G, dim=0)", "prompts.repeat_interleave(G)")],
        ("tinylm.generate cannot work with its arguments",),
    ),
    mistake(
        "the arguments of the verifier swapped",
        [("tinylm.reward(prompt, text)", "tinylm.reward(text, prompt)")],
        ("tinylm.reward cannot work with its arguments",),
    ),
    mistake(
        "the arguments of generate swapped",
        [(GENERATE, "responses = tinylm.generate(prompts, model, temperature, generator)\n")],
        ("model is to be a TinyLM", "prompts is to be a Tensor"),
    ),
    mistake(
        "responses by G calls of generate",
        [
            (
                GENERATE,
                "calls = [tinylm.generate(model, prompts[::G], temperature, generator) for _ in range(G)]\n"
                "    responses = torch.cat(calls)\n",
            )
        ],
        ("the responses are in the order a b a b",),
    ),
]

# Mistakes that once passed: values that no test drew, what a function leaves behind.
ONCE_PASSED = [
    mistake(
        "a verifier that reads the number",
        [
            (
                REWARD,
                f"rewards = [float(text[:-1].isdigit() and int(text[:-1]) == {SUM} and text.endswith('$')) "
                "for prompt, text in zip(tinylm.decode(prompts), texts, strict=True)]",
            )
        ],
        ("reward",),
    ),
    mistake(
        "the verifier is given the text without padding",
        [(REWARD, REWARD.replace("tinylm.reward(prompt, text)", "tinylm.reward(prompt, text.replace('_', ''))"))],
        ("reward",),
    ),
    mistake(
        "the verifier is given the text with an end",
        [(REWARD, REWARD.replace("(prompt, text)", "(prompt, text.rstrip('_$') + '$')"))],
        ("reward",),
    ),
    mistake(
        "the first response of each group is greedy",
        [(GENERATE, GENERATE + "    responses[::G] = tinylm.generate(model, prompts[::G], greedy=True)\n")],
        ("drawn from the policy|temperature|greedy",),
    ),
]

VARIATIONS = [
    variation(
        "rows built by expand and reshape",
        [
            (
                "prompts.repeat_interleave(G, dim=0)",
                "prompts.unsqueeze(1).expand(-1, G, -1).reshape(-1, prompts.shape[1])",
            )
        ],
    ),
    variation(
        "rows built by a loop",
        """
        rows, texts, rewards = [], [], []
        for prompt in prompts:
            for _ in range(G):
                rows.append(prompt)
        rows = torch.stack(rows)
        responses = tinylm.generate(model, rows, temperature, generator)
        mask = torch.zeros(len(rows), responses.shape[1])
        rewards = torch.zeros(len(rows))
        for i, text in enumerate(tinylm.decode_and_strip_padding(responses)):
            mask[i, : len(text)] = 1.0
            rewards[i] = tinylm.reward(tinylm.decode(rows[i : i + 1])[0], text)
            texts.append(text)
        return Samples(rows, responses, mask, rewards, texts)
        """,
    ),
    variation(
        "sampled row by row",
        [
            (
                GENERATE,
                "rows = [tinylm.generate(model, row, temperature, generator) for row in prompts.split(1)]\n"
                "    responses = torch.cat(rows)\n",
            )
        ],
    ),
    variation(
        "sampled group by group",
        [
            (
                GENERATE,
                "groups = [tinylm.generate(model, group, temperature, generator) for group in prompts.split(G)]\n"
                "    responses = torch.cat(groups)\n",
            )
        ],
    ),
    variation(
        "a sampling loop of its own",
        """
        prompts = prompts.repeat_interleave(G, dim=0)
        responses = torch.full((len(prompts), tinylm.RESPONSE_LEN), tinylm.PAD)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for t in range(tinylm.RESPONSE_LEN):
            with torch.no_grad():
                logits = tinylm.response_logits(model, prompts, responses, temperature)[:, t]
            token = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
            responses[:, t] = torch.where(ended, tinylm.PAD, token)
            ended = ended | (token == tinylm.EOS)
        texts = tinylm.decode_and_strip_padding(responses)
        rewards = torch.tensor([tinylm.reward(p, r) for p, r in zip(tinylm.decode(prompts), texts, strict=True)])
        return Samples(prompts, responses, tinylm.response_mask(responses), rewards, texts)
        """,
    ),
    variation(
        "a sampling loop with Gumbel noise",
        """
        prompts = prompts.repeat_interleave(G, dim=0)
        responses = torch.full((len(prompts), tinylm.RESPONSE_LEN), tinylm.PAD)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for t in range(tinylm.RESPONSE_LEN):
            with torch.no_grad():
                logits = tinylm.response_logits(model, prompts, responses, temperature)[:, t]
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            token = (logits + noise).argmax(dim=-1)
            responses[:, t] = token.masked_fill(ended, tinylm.PAD)
            ended |= token == tinylm.EOS
        texts = tinylm.decode_and_strip_padding(responses)
        rewards = torch.tensor([tinylm.reward(p, r) for p, r in zip(tinylm.decode(prompts), texts, strict=True)])
        return Samples(prompts, responses, tinylm.response_mask(responses), rewards, texts)
        """,
    ),
    variation(
        "inference_mode, its outputs cloned",
        [(GENERATE, f"with torch.inference_mode():\n        {GENERATE}    responses = responses.clone()\n")],
    ),
    variation("mask of the samples as bool", [(MASK, "mask=tinylm.response_mask(responses).bool(),")]),
    variation("mask of the samples as int", [(MASK, "mask=tinylm.response_mask(responses).long(),")]),
    variation(
        "mask from the lengths of the texts",
        [
            (
                MASK,
                "mask=(torch.arange(responses.shape[1]) < torch.tensor([len(t) for t in texts]).unsqueeze(1)).float(),",
            )
        ],
    ),
    variation(
        "mask from a cumulative sum of its own",
        [
            (
                MASK,
                "mask=((responses == tinylm.EOS).int().cumsum(dim=1).roll(1, 1) * (torch.arange(4) > 0) == 0).float(),",
            )
        ],
    ),
    variation(
        "rewards by comparing tokens", [(REWARDS, "rewards=(responses == tinylm.answers(prompts)).all(dim=1).float(),")]
    ),
    variation(
        "functions imported by name",
        [
            (IMPORT, "from tinylm import TinyLM, decode, decode_and_strip_padding, generate, response_mask, reward\n"),
            ("tinylm.decode_and_strip_padding(responses)", "decode_and_strip_padding(responses)"),
            (GENERATE, GENERATE.replace("tinylm.", "")),
            ("[tinylm.reward(prompt, text)", "[reward(prompt, text)"),
            (SCORE, SCORE.replace("tinylm.", "")),
            (MASK, MASK.replace("tinylm.", "")),
        ],
    ),
]
