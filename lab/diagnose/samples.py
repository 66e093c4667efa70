"""Task 1: samples, and what known mistakes make of their rewards, their mask and their tokens."""

import torch
from torch import Tensor

import tinylm
from lab.examine import Mistakes


def first_row(got: list[str], expected: list[str]) -> str:
    """Where two lists of texts differ first."""
    row = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    return f"at row {row}: got {got[row]!r}, expected {expected[row]!r}"


def explain_prompts(got: list[str], rows: list[str], tiled: list[str]) -> str:
    """What is wrong with the prompts of the samples, which should be `rows`; `tiled` are those of a b a b."""
    if got == tiled:
        return "the rows are interleaved (a, b, a, b): repeat each prompt G times in a row (a, a, b, b)"
    return f"samples.prompts is wrong {first_row(got, rows)}"


def explain_texts(got: list[str], texts: list[str]) -> str:
    """What is wrong with the texts of the samples."""
    what = "samples.texts is not what tinylm.decode_and_strip_padding gives for the responses"
    return f"{what}, first {first_row(got, texts)}"


def scores(prompts: list[str], responses: list[str]) -> Tensor:
    """The verifier's rewards [N], in float64."""
    pairs = zip(prompts, responses, strict=True)
    return torch.tensor([tinylm.reward(prompt, response) for prompt, response in pairs], dtype=torch.float64)


def rewards(prompts: list[str], G: int, responses: list[str]) -> Mistakes:
    """What mistakes make of the rewards of N responses to P prompts, G to each in a row."""
    rows, tiled = [prompt for prompt in prompts for _ in range(G)], prompts * G
    right = scores(rows, responses)
    digits = [text.rstrip("$") for text in responses]
    sums = [sum(map(int, prompt.rstrip("=").split("+"))) for prompt in rows]
    lenient = [float(text.isdigit() and int(text) == total) for text, total in zip(digits, sums, strict=True)]
    other = "the rewards score the answers against the wrong prompt"
    return {
        f"{other}s: row i*G + j answers prompt i": scores(tiled, responses),
        "the rewards stand in the wrong order: they must stay row by row": right.view(-1, G).T.flatten(),
        f"{other}, the next one's": scores(rows[G:] + rows[:G], responses),
        f"{other}, the row after": scores(rows[1:] + rows[:1], responses),
        f"{other}, the one before": scores(rows[-G:] + rows[:-G], responses),
        "every response of a group gets the first one's reward: score each row": right[::G].repeat_interleave(G),
        "an answer that never ended, or is not plain, was scored as right: use tinylm.reward as it is": torch.tensor(
            lenient
        ),
        "the rewards are the wrong way round: 1 is for the right answer": 1 - right,
        "the rewards are +1 and -1: 1 is for a right answer, 0 for a wrong one": 2 * right - 1,
    }


def masks(responses: Tensor, right: Tensor) -> Mistakes:
    """What mistakes make of the mask `right` of the responses [N, Tr]."""
    is_eos = responses == tinylm.EOS
    ones, zeros = torch.ones_like(right[:, :1]), torch.zeros_like(right[:, :1])
    shifted = "the mask is shifted by one"
    return {
        "the mask drops the end-of-sequence: stopping is the policy's own token and keeps its 1": right * ~is_eos,
        "the mask keeps the padding after the end-of-sequence: it must be 0 there": torch.ones_like(right),
        f"{shifted}: it keeps one token too many": torch.cat([ones, right[:, :-1]], dim=1),
        f"{shifted}: its first token is missing": torch.cat([zeros, right[:, 1:]], dim=1),
        f"{shifted} to the right": torch.cat([zeros, right[:, :-1]], dim=1),
        "the mask is the wrong way round: 1 is for own tokens, 0 for padding": 1 - right,
        "the mask marks the end-of-sequence alone": is_eos.float(),
        f"{shifted}, and its last column became the first (roll)": right.roll(1, dims=1),
        f"{shifted}, and its first column became the last (roll)": right.roll(-1, dims=1),
        "the mask leaves out padding that the policy itself wrote before its end: all tokens up to the "
        "end-of-sequence are its own": (responses != tinylm.PAD).double(),
        "the mask holds lengths or positions, not 0 and 1": right.cumsum(dim=1) * right,
        "the mask is shifted left by one: it drops the last own token of every response": torch.cat(
            [right[:, 1:], zeros], dim=1
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
