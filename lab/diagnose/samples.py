"""Task 1: samples, and what known mistakes make of their rows, their draws, their rewards and their mask."""

from collections.abc import Callable

import torch
from torch import Tensor

import tinylm
from lab.inputs import some_prompts


def first_row(got: list[str], expected: list[str]) -> str:
    """Where two lists of texts differ first."""
    row = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    return f"at row {row}: got {got[row]!r}, expected {expected[row]!r}"


def draws(model: tinylm.TinyLM, prompts: Tensor, G: int, got) -> str:
    """What is wrong with the responses of the samples `got` of P prompts, if they are not G draws of each; or ""."""
    responses, P = got.responses, len(prompts)
    if torch.equal(responses, tinylm.generate(model, got.prompts, greedy=True)):
        return "every response is the greedy one: draw the tokens at random, from softmax(logits / temperature)"
    groups = responses.view(P, G, -1)
    if (groups == groups[:, :1]).all():
        return "one response is copied G times: draw G responses of their own for each prompt"
    if (groups == groups[:1]).all():
        return "different prompts got the very same responses"
    mask = tinylm.response_mask(responses)
    logp, of_tiled = (
        (tinylm.token_logp(model, rows, responses) * mask).sum(dim=1).mean()
        for rows in (got.prompts, prompts.repeat(G, 1))
    )
    if of_tiled > logp + 1:
        order = "the responses are in the order a b a b, samples.prompts in the order a a b b"
        return f"{order}: generate for all rows at once, prompts.repeat_interleave(G, dim=0)"
    return ""


def diagnose(call: Callable, model: tinylm.TinyLM) -> str:
    """What is wrong with the rows and the draws of a sample_group; `call(model, prompts, G)` gives its Samples, or None
    where it raises. "" if they are right.
    """
    prompts, G = some_prompts(16), 8
    if (got := call(model, prompts, G)) is None:
        return ""
    rows, got_rows = tinylm.decode(prompts.repeat_interleave(G, dim=0)), tinylm.decode(got.prompts)
    if got_rows == tinylm.decode(prompts.repeat(G, 1)):
        return "the rows are interleaved (a, b, a, b): repeat each prompt G times in a row (a, a, b, b)"
    if got_rows != rows:
        return f"samples.prompts is wrong {first_row(got_rows, rows)}"
    return draws(model, prompts, G, got)


def scores(prompts: list[str], responses: list[str]) -> Tensor:
    """The verifier's rewards [N], in float64."""
    pairs = zip(prompts, responses, strict=True)
    return torch.tensor([tinylm.reward(prompt, response) for prompt, response in pairs], dtype=torch.float64)


def lenient(rows: list[str], responses: list[str]) -> Tensor:
    """Rewards of a verifier that looks at the number alone, not at how it is written, and whether it ended."""
    sums = [sum(map(int, prompt.rstrip("=").split("+"))) for prompt in rows]
    digits = [text.rstrip("$") for text in responses]
    right = [text.isdigit() and int(text) == total for text, total in zip(digits, sums, strict=True)]
    return torch.tensor(right, dtype=torch.float64)


REWARDS = {  # each from the prompts of the N rows, the responses, and G
    "the rewards score the answers against the wrong prompts: row i*G + j answers prompt i": lambda rows, texts, G: (
        scores(rows[::G] * G, texts)
    ),
    "the rewards stand in the wrong order: they must stay row by row": lambda rows, texts, G: (
        scores(rows, texts).view(-1, G).T.flatten()
    ),
    "the rewards score the answers against the wrong prompt, the next one's": lambda rows, texts, G: scores(
        rows[G:] + rows[:G], texts
    ),
    "the rewards score the answers against the wrong prompt, the row after": lambda rows, texts, G: scores(
        rows[1:] + rows[:1], texts
    ),
    "the rewards score the answers against the wrong prompt, the one before": lambda rows, texts, G: scores(
        rows[-G:] + rows[:-G], texts
    ),
    "every response of a group gets the first one's reward: score each row": lambda rows, texts, G: scores(rows, texts)[
        ::G
    ].repeat_interleave(G),
    "an answer that never ended, or is not plain, was scored as right: use tinylm.reward as it is": (
        lambda rows, texts, G: lenient(rows, texts)
    ),
    "the rewards are the wrong way round: 1 is for the right answer": lambda rows, texts, G: 1 - scores(rows, texts),
    "the rewards are +1 and -1: 1 is for a right answer, 0 for a wrong one": lambda rows, texts, G: (
        2 * scores(rows, texts) - 1
    ),
}


def beside(mask: Tensor, left: float | None = None, right: float | None = None) -> Tensor:
    """The mask [N, Tr] moved by one: a column of `left` comes in at the left, or one of `right` at the right."""
    if left is not None:
        return torch.cat([torch.full_like(mask[:, :1], left), mask[:, :-1]], dim=1)
    return torch.cat([mask[:, 1:], torch.full_like(mask[:, :1], right)], dim=1)


MASKS = {  # each from the responses [N, Tr] and their mask as it should be
    "the mask drops the end-of-sequence: stopping is the policy's own token and keeps its 1": lambda tokens, mask: (
        mask * (tokens != tinylm.EOS)
    ),
    "the mask keeps the padding after the end-of-sequence: it must be 0 there": lambda tokens, mask: torch.ones_like(
        mask
    ),
    "the mask is shifted by one: it keeps one token too many": lambda tokens, mask: beside(mask, left=1),
    "the mask is shifted by one: its first token is missing": lambda tokens, mask: (
        mask * beside(torch.ones_like(mask), left=0)
    ),
    "the mask is shifted by one to the right": lambda tokens, mask: beside(mask, left=0),
    "the mask is the wrong way round: 1 is for own tokens, 0 for padding": lambda tokens, mask: 1 - mask,
    "the mask marks the end-of-sequence alone": lambda tokens, mask: (tokens == tinylm.EOS).double(),
    "the mask is shifted by one, and its last column became the first (roll)": lambda tokens, mask: mask.roll(1, 1),
    "the mask is shifted by one, and its first column became the last (roll)": lambda tokens, mask: mask.roll(-1, 1),
    "the mask leaves out padding that the policy itself wrote before its end: all tokens up to the end-of-sequence "
    "are its own": lambda tokens, mask: (tokens != tinylm.PAD).double(),
    "the mask holds lengths or positions, not 0 and 1": lambda tokens, mask: mask.cumsum(dim=1) * mask,
    "the mask is shifted left by one: it drops the last own token of every response": lambda tokens, mask: beside(
        mask, right=0
    ),
}


def greedy_count(model: tinylm.TinyLM, prompts: Tensor, greedy: Tensor, temperature: float) -> tuple[float, float]:
    """How often the greedy response is to be expected among samples at a temperature: (mean, standard deviation)."""
    logp = tinylm.token_logp(model, prompts, greedy, temperature) * tinylm.response_mask(greedy)
    p = logp.detach().sum(dim=1).exp().double()
    return p.sum().item(), (p * (1 - p)).sum().sqrt().item()


def temperature(model: tinylm.TinyLM, prompts: Tensor, greedy: Tensor, count: int, right: float) -> str:
    """Which temperature was used in place of `right`, if `count` of the samples are the greedy response."""
    others = {
        1.0: "the temperature is ignored in sampling: draw from softmax(logits / temperature)",
        1 / right: "the logits are multiplied by the temperature: divide them",
        right**2: "the temperature is applied twice",
    }
    for at, name in others.items():
        mean, sd = greedy_count(model, prompts, greedy, at)
        if at != right and abs(count - mean) < 4 * sd:
            return name
    return "the responses are not drawn from the policy softmax(logits / temperature)"
