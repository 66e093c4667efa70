"""TinyLM: a language model small enough to train on a laptop, and a task with a verifier.

Read this file once from top to bottom before you open `grpo.py`; nothing here needs changing. In order: the task,
the model, sampling, log-probs, evaluation, supervised fine-tuning (SFT), files. Shapes use the README's letters:
P prompts, G responses per prompt, N = P * G rows (prompt-major), Tp prompt and Tr response tokens, V = 14.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# One thread. The matrices are so small that a second thread gains little on an idle machine, and beside any other
# busy program two threads wait for each other and every step takes several times longer.
torch.set_num_threads(int(os.environ.get("TINYLM_THREADS", "1")))

# 1. The task: "37+48=" must be continued with "85$" ------------------------------------------------------------

# A token is one character. Padding "_" and end-of-sequence "$" are two different tokens: were they one, masking the
# padding would mask the end of every answer too, and the policy would never learn to stop.
VOCAB = "0123456789+=_$"
PAD, EOS = VOCAB.index("_"), VOCAB.index("$")
PROMPT_LEN = len("37+48=")  # Tp
RESPONSE_LEN = len("198$")  # Tr: the largest sum, 99 + 99, and its end-of-sequence
HELD_OUT = 500  # problems kept for evaluation, never trained on


def encode(texts: list[str]) -> Tensor:
    """Token ids [N, T] (int64) of N texts of one length. Raises ValueError on unequal lengths or unknown characters."""
    return torch.tensor([[VOCAB.index(char) for char in text] for text in texts], dtype=torch.long)


def decode(tokens: Tensor) -> list[str]:
    """The text of every row of tokens [N, T], special tokens included."""
    return ["".join(VOCAB[token] for token in row) for row in tokens.tolist()]


def decode_and_strip_padding(responses: Tensor) -> list[str]:
    """The text of every response [N, Tr] up to and including its end-of-sequence; what follows that is padding.

    - 8 5 EOS PAD gives "85$": ended.
    - 8 5 5 5 gives "8555": truncated; no "$", so it never ended.
    - EOS PAD PAD PAD gives "$": empty.
    - 8 PAD 5 EOS gives "8_5$": malformed; padding that the policy itself wrote stays visible.
    """
    return [text[: text.index("$") + 1] if "$" in text else text for text in decode(responses)]


def reward(prompt: str, response: str) -> float:
    """The verifier: 1.0 if `response` is the sum that `prompt` asks for, written plainly, and ended; else 0.0.

    reward("37+48=", "85$") = 1.0; "85" never ended, "085$" is not plain, "8_5$" is not all digits: each 0.0.
    """
    left, right = prompt.rstrip("=").split("+")
    return 1.0 if response == f"{int(left) + int(right)}$" else 0.0


def problems() -> tuple[Tensor, Tensor]:
    """All 8,100 sums of two two-digit numbers as prompts: (train [7600, Tp], held_out [500, Tp])."""
    prompts = encode([f"{left}+{right}=" for left in range(10, 100) for right in range(10, 100)])
    # RandomState is numpy's frozen generator: every machine and release holds out the same 500 problems.
    order = torch.from_numpy(np.random.RandomState(15).permutation(len(prompts)))
    return prompts[order[HELD_OUT:]], prompts[order[:HELD_OUT]]


def answers(prompts: Tensor) -> Tensor:
    """The right response [N, Tr] to each prompt [N, Tp]: the sum, end-of-sequence, padding."""
    sums = [sum(int(number) for number in text.rstrip("=").split("+")) for text in decode(prompts)]
    return encode([f"{total}$".ljust(RESPONSE_LEN, "_") for total in sums]).to(prompts.device)


def response_mask(responses: Tensor) -> Tensor:
    """1.0 on each response's own tokens, up to and INCLUDING its first end-of-sequence; 0.0 after it. [N, Tr]."""
    is_eos = responses == EOS
    ended_before = is_eos.cumsum(dim=1) - is_eos.long()  # leaves the EOS itself in: stopping is an action too
    return (ended_before == 0).float()


# 2. The model: a GPT-2 in miniature, about 100k parameters -----------------------------------------------------

# Per layer: the keys and the values of the tokens read so far, each [P * heads, tokens, width / heads].
Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """One pre-LayerNorm transformer layer, as in GPT-2: x + attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.fc_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None):
        """x [P, S, width] attends to `past` and to itself: (new x, the keys and values with S more tokens).

        bias [S, all tokens] is 0 where a query may look, and -inf where it may not.
        """
        p, s, width = x.shape
        size = width // self.heads
        qkv = self.qkv(self.ln_1(x)).view(p, s, 3, self.heads, size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).reshape(3, p * self.heads, s, size)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        # Written out: on sequences this short the fused attention kernel costs more than it saves.
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=size**-0.5)  # bias + q k / sqrt(size)
        attended = torch.bmm(scores.softmax(dim=-1), v)  # [P * heads, S, size]
        x = x + self.proj(attended.view(p, self.heads, s, size).transpose(1, 2).reshape(p, s, width))
        return x + self.fc_out(F.gelu(self.fc(self.ln_2(x)))), (k, v)


class TinyLM(nn.Module):
    """A causal, decoder-only transformer: GPT-2 in miniature, with learned positions and an untied head."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4):
        super().__init__()
        self.token_embedding = nn.Embedding(len(VOCAB), width)
        self.position_embedding = nn.Embedding(PROMPT_LEN + RESPONSE_LEN, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCAB), bias=False)

    def forward(self, tokens: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Read tokens [P, T, G], T steps of G branches: (hidden states [P, T, G, width], the longer cache).

        With no `past`, G is 1 and the tokens are P plain sequences: prompts. With the cache of P prompts as `past`,
        each prompt goes on in G responses side by side, which all look at the one copy of the prompt's keys and
        values; a response sees its prompt and its own earlier tokens, never another response. The next token's
        logits are `model.head(hidden)`, computed only where they are needed.
        """
        p, t, g = tokens.shape
        prompt = 0 if past is None else PROMPT_LEN
        before = 0 if past is None else (past[0][0].shape[1] - prompt) // g  # response steps read earlier
        # Tokens lie step by step: (step 0, branch 0), (step 0, branch 1), ... so that the cache only ever grows.
        own = torch.kron(torch.ones(before + t, before + t).tril()[before:], torch.eye(g))
        visible = torch.cat([torch.ones(t * g, prompt), own], dim=1)
        bias = torch.zeros_like(visible).masked_fill(visible == 0, -math.inf).to(tokens.device)
        positions = self.position_embedding.weight[prompt + before : prompt + before + t]  # [T, width]
        x = (self.token_embedding(tokens) + positions.unsqueeze(1)).view(p, t * g, -1)
        cache = []
        for layer, block in enumerate(self.blocks):
            x, keys_values = block(x, bias, None if past is None else past[layer])
            cache.append(keys_values)
        return self.ln_f(x).view(p, t, g, -1), cache


def prefill(model: TinyLM, prompts: Tensor) -> tuple[Tensor, Cache, int]:
    """Read prompts [N, Tp], each group's once: hidden states of their last token [P, 1, G, width], cache, and G.

    G is the largest number such that the rows are groups of G equal consecutive prompts (1 if none are equal).
    """
    changes = (prompts[1:] != prompts[:-1]).any(dim=1).nonzero().squeeze(1) + 1  # where another prompt begins
    g = math.gcd(len(prompts), *changes.tolist())
    hidden, cache = model(prompts[::g].unsqueeze(2))
    return hidden[:, -1:].expand(-1, -1, g, -1), cache, g


# 3. Sampling ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: TinyLM,
    prompts: Tensor,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    greedy: bool = False,
) -> Tensor:
    """One response to each prompt row: tokens [N, Tr], padded with PAD after the end-of-sequence.

    Tokens are drawn from softmax(logits / temperature) with `generator`, or are the likeliest ones if `greedy`.
    """
    hidden, cache, g = prefill(model, prompts)
    responses = torch.full((len(prompts), RESPONSE_LEN), PAD, device=prompts.device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    for t in range(RESPONSE_LEN):
        logits = model.head(hidden).flatten(0, 2)  # [P, 1, G, V] -> [N, V], prompt-major
        if greedy:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator).squeeze(1)
        responses[:, t] = tokens.masked_fill(ended, PAD)
        ended |= tokens == EOS
        if t + 1 == RESPONSE_LEN or ended.all():
            break
        hidden, cache = model(responses[:, t].view(-1, 1, g), cache)
    return responses


# 4. Log-probs --------------------------------------------------------------------------------------------------


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """log_softmax(logits)[index] over the last dimension: logits [..., V], index [...] -> [...].

    In float32 and float64 it is the chosen logit minus the logsumexp, so that no log-softmax of the whole vocabulary
    is kept for the backward pass. In half precision that difference of two large rounded numbers would be off by up
    to 0.1 nats, so there the log-softmax is taken first.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        return F.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def response_logits(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """Logits / temperature [N, Tr, V] from which each token of `responses` [N, Tr] was (or could have been) drawn.

    Shifted by one: the prompt's last position predicts the first response token, and response token t predicts
    token t + 1. The last response token predicts nothing that we need, so it is never read.
    """
    first, cache, g = prefill(model, prompts)
    branches = responses.view(len(prompts) // g, g, -1).transpose(1, 2)  # [P, Tr, G]
    rest, _ = model(branches[:, :-1], cache)
    logits = model.head(torch.cat([first, rest], dim=1))  # [P, Tr, G, V]
    return logits.transpose(1, 2).flatten(0, 1) / temperature


def token_logp(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(token | what came before) of each response token, pi = softmax(logits / temperature). [N, Tr], nats.

    With gradient, unless called under `torch.no_grad()`. Values after the end-of-sequence mean nothing: mask them.
    """
    return selective_log_softmax(response_logits(model, prompts, responses, temperature), responses)


# 5. Evaluation -------------------------------------------------------------------------------------------------


@torch.no_grad()
def success_probability(model: TinyLM, prompts: Tensor, temperature: float = 1.0) -> Tensor:
    """The probability [N] that a sampled response is right: the product of its tokens' probabilities.

    Exact, not estimated, because every problem has one right response. Its mean is the expected sampled accuracy.
    """
    right = answers(prompts)
    return (token_logp(model, prompts, right, temperature) * response_mask(right)).sum(dim=1).exp()


def accuracy(model: TinyLM, prompts: Tensor, temperature: float = 1.0) -> tuple[float, float]:
    """(sampled, greedy): the exact expectation of the sampled accuracy, and the accuracy of greedy decoding."""
    greedy = (generate(model, prompts, greedy=True) == answers(prompts)).all(dim=1).float().mean()
    return success_probability(model, prompts, temperature).mean().item(), greedy.item()


# 6. SFT: the starting policy, which is also GRPO's reference ---------------------------------------------------


def train_sft(seed: int = 0, target: float = 0.51, lr: float = 5e-3, batch: int = 128, max_steps: int = 2000) -> TinyLM:
    """A TinyLM trained on right answers until it samples `target` of a fixed set of training problems correctly.

    It stops on measured accuracy, never on a step count: accuracy climbs so steeply here that a fixed count would
    give anything from 0.3 to 0.9. The rate stays high and constant on purpose: an annealed policy sits in a spot so
    narrow that GRPO's updates make it worse. Raises RuntimeError if `max_steps` do not suffice.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # nn's initialisers draw from the global generator: lend it our seed
        torch.manual_seed(seed)
        model = TinyLM()
    train, _ = problems()
    right = answers(train)
    mask = response_mask(right)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    for step in range(max_steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20)  # 20 steps of warm-up
        rows = torch.randint(len(train), (batch,), generator=generator)
        loss = -(token_logp(model, train[rows], right[rows]) * mask[rows]).sum() / mask[rows].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and success_probability(model, train[:HELD_OUT]).mean() >= target:
            return model
    raise RuntimeError(f"SFT did not reach a sampled accuracy of {target} in {max_steps} steps")


# 7. Files ------------------------------------------------------------------------------------------------------

SFT_PATH = Path(__file__).resolve().parent / "tinylm_sft.pt"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` only if the block ends well, so no file is ever half there."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(model: TinyLM, path: Path) -> None:
    """Write the model's state dict to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        torch.save(model.state_dict(), temporary)


def load_checkpoint(path: Path) -> TinyLM:
    """The TinyLM saved at `path`. Raises FileNotFoundError, or ValueError if it is not a whole and finite TinyLM."""
    model = TinyLM()
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load raises a dozen different types on damaged and foreign files
        raise ValueError(f"{path} is damaged, or not a checkpoint of this lab") from error
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise ValueError(f"{path} holds weights that are not finite")
    return model


def load_or_train_sft(path: Path = SFT_PATH) -> TinyLM:
    """The starting policy: read from `path`, or trained (some seconds, once) and saved there."""
    try:
        return load_checkpoint(path)
    except (FileNotFoundError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else f"{path.name} is not there yet"
    print(f"{reason}: training the starting policy by SFT, once, for some seconds ...", file=sys.stderr)
    model = train_sft()
    try:
        save_checkpoint(model, path)
    except OSError as error:  # a read-only folder, say: the lab works all the same, only slower
        print(f"the starting policy could not be saved and will be trained again next time: {error}", file=sys.stderr)
    return model
