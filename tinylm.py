"""TinyLM: a language model small enough to train on a laptop, and a task with a verifier.
Read this file once from top to bottom before you open `grpo.py`; nothing here needs changing. Shapes use the README's
letters: P prompts, G responses per prompt, N = P * G rows (prompt-major), Tp prompt and Tr response tokens, V = 14.
"""

import io
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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


# 2. Prefixes: what many rows share is computed once -------------------------------------------------------------
def distinct_prefixes(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The M different prefixes of rows [N, T], numbered from 0, the shorter ones first. The eight responses of a group
    share their prompt, and often their first tokens; a causal model computes the same there, so it needs to only once.
    Returns `number` [N, T]: which prefix each row is up to and including each token; and of each prefix its last
    `token` [M], that token's `position` [M], and its `path` [M, T]: the numbers of its own prefixes, itself the last
    one, at `position`; what follows there is of no meaning.
    """
    n, t = rows.shape
    place = 15 ** torch.arange(t, device=rows.device)  # token + 1 is a digit from 1 to 14: no two prefixes share a code
    codes, number = ((rows + 1) * place).cumsum(dim=1).unique(return_inverse=True)  # sorted, so shorter ones first
    cells = torch.arange(n * t, device=rows.device)
    example = cells.new_empty(len(codes)).scatter_(0, number.flatten(), cells)  # a cell of `rows` where each one ends
    return number, rows.flatten()[example], example % t, number[example // t]


# 3. The model: a GPT-2 in miniature, about 100k parameters -----------------------------------------------------
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

    def forward(self, x: Tensor, path: Tensor, bias: Tensor, past: Tensor | None, skip: int) -> tuple[Tensor, Tensor]:
        """x [M, width], where x[m] attends to the tokens on `path` [M, T], with `bias` [M, T] added to the scores.
        `past` has the keys and values [before, 2 * width] of the prefixes numbered before these. Returns (new x, the
        keys and values so far): all M give keys and values, the first `skip` are not computed further, nor returned.
        """
        width = x.shape[1]
        q, kv = self.qkv(self.ln_1(x)).split([width, 2 * width], dim=1)
        kv = kv if past is None else torch.cat([past, kv])
        q, x, path, bias = q[skip:], x[skip:], path[skip:], bias[skip:]
        keys, values = F.embedding(path, kv).chunk(2, dim=2)  # for each x those on its own path, [M, T, width]
        by_head = (*path.shape, self.heads, width // self.heads)
        scores = (q.unsqueeze(1) * keys).view(by_head).sum(dim=3) * by_head[3] ** -0.5
        weights = (scores + bias.unsqueeze(2)).softmax(dim=1)  # [M, T, heads]
        attended = (weights.unsqueeze(3) * values.view(by_head)).sum(dim=1).view(x.shape)
        x = x + self.proj(attended)
        return x + self.fc_out(F.gelu(self.fc(self.ln_2(x)))), kv


class TinyLM(nn.Module):
    """A causal, decoder-only transformer: GPT-2 in miniature, with learned positions and an untied head."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4):
        super().__init__()
        self.token_embedding = nn.Embedding(len(VOCAB), width)
        self.position_embedding = nn.Embedding(PROMPT_LEN + RESPONSE_LEN, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCAB), bias=False)

    def forward(self, rows: Tensor, since: int = 0, past: list | None = None):
        """Read tokens rows [N, T]: (logits [N, T - since, V] of what follows each token from position `since` on, the
        cache). `past` is the cache of a call with the first `since` tokens, or fewer, of the same rows: they were read.
        """
        number, token, position, path = distinct_prefixes(rows)
        read = 0 if past is None else len(past[0])
        first = int(number[:, since].min())  # the first prefix whose logits are wanted
        x = self.token_embedding(token[read:]) + self.position_embedding(position[read:])
        future = torch.arange(rows.shape[1], device=rows.device) > position.unsqueeze(1)
        bias = x.new_zeros(future.shape).masked_fill(future, -math.inf)[read:]
        cache = []
        for layer, block in enumerate(self.blocks):
            skip = first - read if block is self.blocks[-1] else 0  # after the last layer no token looks at another
            x, kv = block(x, path[read:], bias, past and past[layer], skip)
            cache.append(kv)
        return F.embedding(number[:, since:] - first, self.head(self.ln_f(x))), cache


# 4. Sampling ---------------------------------------------------------------------------------------------------
@torch.no_grad()
def generate(model: TinyLM, prompts: Tensor, temperature: float = 1.0, generator=None, greedy: bool = False) -> Tensor:
    """One response to each prompt row: tokens [N, Tr], padded with PAD after the end-of-sequence. They are drawn from
    softmax(logits / temperature) with `generator`, a torch.Generator or None, or are the likeliest ones if `greedy`.
    """
    rows, cache = prompts, None
    for _ in range(RESPONSE_LEN):
        logits, cache = model(rows, rows.shape[1] - 1, cache)  # only the newest tokens are read
        scores = logits.squeeze(1) / temperature  # [N, V]
        if not greedy:  # Gumbel-max: with -log(-log(uniform)) added, the argmax is a draw from softmax(scores)
            scores = scores - (-torch.rand(scores.shape, generator=generator, device=scores.device).log()).log()
        rows = torch.cat([rows, scores.argmax(dim=1, keepdim=True)], dim=1)
    responses = rows[:, prompts.shape[1] :]
    return responses.masked_fill(response_mask(responses) == 0, PAD)


# 5. Log-probs --------------------------------------------------------------------------------------------------
def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """log_softmax(logits)[index] over the last dimension: logits [..., V], index [...] -> [...], as exact as the type
    holds the largest logit.
    """
    if logits.dtype not in (torch.float32, torch.float64):  # there the difference below is off by up to 0.1 nats
        return F.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def response_logits(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """Logits / temperature [N, Tr, V] from which each token of `responses` [N, Tr] was (or could have been) drawn.
    Shifted by one: the prompt's last position predicts the first response token, and response token t predicts
    token t + 1. The last response token predicts nothing that we need, so it is never read.
    """
    logits, _ = model(torch.cat([prompts, responses[:, :-1]], dim=1), since=prompts.shape[1] - 1)
    return logits / temperature


def token_logp(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(token | what came before) of each response token, pi = softmax(logits / temperature): [N, Tr], nats, with
    gradient unless called under `torch.no_grad()`. Values after the end-of-sequence mean nothing: mask them.
    """
    return selective_log_softmax(response_logits(model, prompts, responses, temperature), responses)


# 6. Evaluation -------------------------------------------------------------------------------------------------
def success(logits: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """From the policy's logits [N, Tr, V] on the right answers `right` [N, Tr] of N problems (`response_logits`), for
    each problem (p [N], greedy [N]): the exact probability that a sampled response is right, which is the product of
    its tokens' probabilities; and 1 if greedy decoding is, which it is where every token of the right answer is the
    likeliest one after those before it, else 0. Their means are the sampled and the greedy accuracy.
    """
    own = response_mask(right)
    p = (selective_log_softmax(logits, right) * own).sum(dim=1).exp()
    return p, ((logits.argmax(dim=-1) == right) | (own == 0)).all(dim=1).to(p.dtype)


@torch.no_grad()
def success_probability(model: TinyLM, prompts: Tensor, temperature: float = 1.0) -> Tensor:
    """The exact probability [N] that a sampled response to each prompt is right."""
    right = answers(prompts)
    return success(response_logits(model, prompts, right, temperature), right)[0]


# 7. SFT: the starting policy, which is also GRPO's reference ---------------------------------------------------
def train_sft(seed: int = 3, target: float = 0.51, lr: float = 3e-3, batch: int = 64, max_steps: int = 2000) -> TinyLM:
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
        if step % 10 or math.exp(-loss.item()) < target:  # not even single tokens are that likely: don't look further
            continue
        if success_probability(model, train[:500]).mean() >= target:
            return model
    raise RuntimeError(f"SFT did not reach a sampled accuracy of {target} in {max_steps} steps")


# 8. Files ------------------------------------------------------------------------------------------------------
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
    """Write the model's state dict to `path`, whole or not at all. Raises OSError where it cannot be written."""
    content = io.BytesIO()  # written by itself, torch.save raises a RuntimeError where the disk is full
    torch.save(model.state_dict(), content)
    with whole_file(path) as temporary:
        temporary.write_bytes(content.getbuffer())


def load_checkpoint(path: Path) -> TinyLM:
    """The TinyLM saved at `path`. Raises FileNotFoundError, or ValueError if it is not a whole and finite TinyLM."""
    model = TinyLM()
    try:
        with warnings.catch_warnings():  # of foreign files: the error below says enough
            warnings.simplefilter("ignore")
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
