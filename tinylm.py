"""TinyLM: a language model small enough to train on a laptop, and a task with a verifier.
Read this file once from top to bottom before you open `grpo.py`; nothing here needs changing. Shapes use the README's
letters: P prompts, G responses per prompt, N = P * G rows (prompt-major), Tp prompt and Tr response tokens, V = 14.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# One thread: in a model this small a second one gains little, and beside any other busy program it costs a lot.
torch.set_num_threads(int(os.environ.get("TINYLM_THREADS", "1")))

# 1. The task: "37+48=" must be continued with "85$" ------------------------------------------------------------
# A token is one character. Padding "_" and end-of-sequence "$" are two different tokens: were they one, masking the
# padding would mask the end of every answer too, and the policy would never learn to stop.
VOCAB = "0123456789+=_$"
PAD, EOS = VOCAB.index("_"), VOCAB.index("$")
PROMPT_LEN = len("37+48=")  # Tp
RESPONSE_LEN = len("198$")  # Tr: the largest sum, 99 + 99, and its end-of-sequence
HELD_OUT = 500  # problems kept for evaluation, never trained on
SFT_PATH = Path(__file__).resolve().parent / "tinylm_sft.pt"  # where the starting policy is kept


def encode(texts: list[str]) -> Tensor:
    """Token ids [N, T] (int64) of N texts of one length. Raises ValueError on unequal lengths or unknown characters."""
    return torch.tensor([[VOCAB.index(char) for char in text] for text in texts], dtype=torch.long)


def decode(tokens: Tensor) -> list[str]:
    """The text of every row of tokens [N, T], special tokens included."""
    return ["".join(map(VOCAB.__getitem__, row)) for row in tokens.tolist()]


def decode_and_strip_padding(responses: Tensor) -> list[str]:
    """The text of every response [N, Tr] up to and including its end-of-sequence; what follows that is padding: 85$_
    gives "85$", 8555 gives "8555" (it never ended), 8_5$ gives "8_5$" (padding that the policy wrote itself stays).
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
    order = torch.from_numpy(np.random.RandomState(15).permutation(len(prompts)))  # a frozen generator: always these
    return prompts[order[HELD_OUT:]], prompts[order[:HELD_OUT]]


def answers(prompts: Tensor) -> Tensor:
    """The right response [N, Tr] to each prompt [N, Tp]: the sum, end-of-sequence, padding."""
    sums = [sum(int(number) for number in text.rstrip("=").split("+")) for text in decode(prompts)]
    return encode([f"{total}$".ljust(RESPONSE_LEN, "_") for total in sums]).to(prompts.device)


def response_mask(responses: Tensor) -> Tensor:
    """1.0 on each response's own tokens, up to and INCLUDING its first end-of-sequence; 0.0 after it. [N, Tr]."""
    is_eos = (responses == EOS).long()
    return (is_eos.cumsum(dim=1) - is_eos == 0).float()  # the EOS itself stays in: stopping is an action too


# 2. The model: a GPT-2 in miniature, about 100k parameters -----------------------------------------------------
@lru_cache
def layout(g: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """How a row of S = Tp + Tr * G tokens holds a prompt and its G responses: the prompt, all first response tokens,
    all second ones, ...; it grows at its end only, and G = 1 is a plain sequence. Returns each token's position [S] in
    its own sequence, and the attention bias [S, S]: 0 on the prompt and the token's own response so far, else -inf.
    """
    with torch.inference_mode(False), torch.device(device):  # cached, so it must serve training too
        position = torch.tensor([*range(PROMPT_LEN), *(PROMPT_LEN + t for t in range(RESPONSE_LEN) for _ in range(g))])
        branch = torch.tensor([-1] * PROMPT_LEN + [*range(g)] * RESPONSE_LEN)  # -1: the prompt
        sees = (position <= position[:, None]) & ((branch == -1) | (branch == branch[:, None]))
        return position, torch.zeros(sees.shape).masked_fill(~sees, -math.inf)


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

    def forward(self, x: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None, last: int):
        """x [P * S, width] attends to `past` and itself: (new x, the keys and values so far [P * heads, tokens, size]).
        All S tokens give keys and values; only the `last` ones of each row are computed further: [P * last, width].
        """
        s, width = len(bias), x.shape[1]
        size = width // self.heads
        qkv = self.qkv(self.ln_1(x)).view(-1, s, 3, self.heads, size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).reshape(3, -1, s, size).unbind()  # each [P * heads, S, size]
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        if last < s:
            q, bias, x = q[:, -last:], bias[-last:], x.view(-1, s, width)[:, -last:].reshape(-1, width)
        # Written out and padded: torch's fused attention, and its softmax of fewer than 16 numbers, are slow kernels.
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=size**-0.5)  # bias + q k / sqrt(size)
        weights = F.pad(scores, (0, -k.shape[1] % 16), value=-math.inf).softmax(dim=-1)[:, :, : k.shape[1]]
        attended = torch.bmm(weights, v).view(-1, self.heads, last, size).transpose(1, 2)
        x = x + self.proj(attended.reshape(-1, width))
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

    def forward(self, tokens: Tensor, g: int = 1, past: list | None = None, last: int | None = None):
        """Read tokens [P, S] of P rows as `layout` has them: (logits [P, S, V], the cache so far). `past` is the cache,
        each layer's keys and values, of the tokens before these. With `last`, logits of that many at the end only.
        """
        p, s = tokens.shape
        start = 0 if past is None else past[0][0].shape[1]
        position, bias = layout(g, tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(position[start : start + s])
        x, bias = x.view(p * s, -1), bias[start : start + s, : start + s].to(x.dtype)
        cache = []
        for layer, block in enumerate(self.blocks):
            final = block is self.blocks[-1]  # after it no token looks at another: compute only those asked for
            x, keys_values = block(x, bias, past and past[layer], last if last and final else s)
            cache.append(keys_values)
        return self.head(self.ln_f(x)).view(p, -1, len(VOCAB)), cache


def group_size(prompts: Tensor) -> int:
    """The largest G up to 16 such that rows [N, Tp] are groups of G equal consecutive prompts (1: none are equal)."""
    changes = (prompts[1:] != prompts[:-1]).any(dim=1).nonzero().squeeze(1) + 1  # where another prompt begins
    largest = math.gcd(len(prompts), *changes.tolist())
    return max(g for g in range(1, 17) if largest % g == 0)  # in longer rows, attention costs more than sharing saves


# 3. Sampling ---------------------------------------------------------------------------------------------------
@torch.no_grad()
def generate(model: TinyLM, prompts: Tensor, temperature: float = 1.0, generator=None, greedy: bool = False) -> Tensor:
    """One response to each prompt row: tokens [N, Tr], padded with PAD after the end-of-sequence. They are drawn from
    softmax(logits / temperature) with `generator`, a torch.Generator or None, or are the likeliest ones if `greedy`.
    """
    g = group_size(prompts)
    tokens, cache, steps = prompts[::g], None, []  # each group's prompt is read once
    for t in range(RESPONSE_LEN):
        logits, cache = model(tokens, g, cache, last=1 if t == 0 else g)
        scores = logits.expand(-1, g, -1) / temperature  # [P, G, V]
        if not greedy:  # Gumbel-max: with -log(-log(uniform)) added, the argmax is a draw from softmax(scores)
            scores = scores - (-torch.rand(scores.shape, generator=generator, device=scores.device).log()).log()
        tokens = scores.argmax(dim=-1)
        steps.append(tokens)
    responses = torch.stack(steps, dim=-1).flatten(0, 1)  # [P, G, Tr] -> [N, Tr]
    return responses.masked_fill(response_mask(responses) == 0, PAD)


# 4. Log-probs --------------------------------------------------------------------------------------------------
def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """log_softmax(logits)[index] over the last dimension: logits [..., V], index [...] -> [...]."""
    if logits.dtype not in (torch.float32, torch.float64):  # there the difference below is off by up to 0.1 nats
        return F.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def response_logits(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """Logits / temperature [N, Tr, V] from which each token of `responses` [N, Tr] was (or could have been) drawn.
    Shifted by one: the prompt's last position predicts the first response token, and response token t predicts
    token t + 1. The last response token predicts nothing that we need, so it is never read.
    """
    g = group_size(prompts)
    n, tr = responses.shape
    steps = responses[:, :-1].reshape(n // g, g, tr - 1).transpose(1, 2).flatten(1)  # [P, (Tr - 1) * G]
    logits, _ = model(torch.cat([prompts[::g], steps], dim=1), g, last=1 + steps.shape[1])
    logits = torch.cat([logits[:, :1].expand(-1, g, -1), logits[:, 1:]], dim=1)  # each response's own first
    return logits.view(n // g, tr, g, -1).transpose(1, 2).flatten(0, 1) / temperature


def token_logp(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(token | what came before) of each response token, pi = softmax(logits / temperature): [N, Tr], nats, with
    gradient unless called under `torch.no_grad()`. Values after the end-of-sequence mean nothing: mask them.
    """
    return selective_log_softmax(response_logits(model, prompts, responses, temperature), responses)


# 5. Evaluation -------------------------------------------------------------------------------------------------
@torch.no_grad()
def success_probability(model: TinyLM, prompts: Tensor, temperature: float = 1.0) -> Tensor:
    """The exact probability [N] that a sampled response is right: the product of its tokens' probabilities."""
    right = answers(prompts)
    return (token_logp(model, prompts, right, temperature) * response_mask(right)).sum(dim=1).exp()


@torch.no_grad()
def accuracy(model: TinyLM, prompts: Tensor, temperature: float = 1.0) -> tuple[float, float]:
    """(sampled, greedy): the exact expectation of the sampled accuracy, and the accuracy of greedy decoding, which is
    right where each token of the right answer is the likeliest one after those before it.
    """
    right = answers(prompts)
    own = response_mask(right)
    logits = response_logits(model, prompts, right, temperature)
    sampled = (selective_log_softmax(logits, right) * own).sum(dim=1).exp()
    greedy = ((logits.argmax(dim=-1) == right) | (own == 0)).all(dim=1)
    return sampled.mean().item(), greedy.float().mean().item()


# 6. SFT: the starting policy, which is also GRPO's reference ---------------------------------------------------
def train_sft(seed: int = 3, target: float = 0.51, lr: float = 5e-3, batch: int = 128, max_steps: int = 2000) -> TinyLM:
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
        if step % 10 == 0 and success_probability(model, train[:256]).mean() >= target:
            return model
    raise RuntimeError(f"SFT did not reach a sampled accuracy of {target} in {max_steps} steps")


# 7. Files ------------------------------------------------------------------------------------------------------
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
