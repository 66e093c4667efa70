"""TinyLM: a language model small enough to train on a laptop, and a task with a verifier.

Read this file once from top to bottom before you open `grpo.py`; nothing here needs changing. In order: the task and
its tokens, the model, sampling, log-probs, supervised training, evaluation, files. Shapes use the README's letters:
N rows (in GRPO N = P * G, prompt-major), T tokens, Tp of them prompt and Tr response, V = 14 possible tokens.
"""

import io
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# One thread: in a model this small a second one gains little, and beside any other busy program it costs a lot.
THREADS = os.environ.get("TINYLM_THREADS", "1")
if THREADS not in map(str, range(1, (os.cpu_count() or 1) + 1)):
    print(f"TINYLM_THREADS={THREADS!a}: it must be a number from 1 to {os.cpu_count()}, your cores", file=sys.stderr)
    sys.exit(2)
torch.set_num_threads(int(THREADS))

# 1. The task: "37+48=" must be continued with "85$" ------------------------------------------------------------
# A token is one character. "$" is end-of-sequence, and "_" is padding, with which shorter texts are made as long as the
# longest of a batch. They are two tokens on purpose. If they were one, masking the padding would also mask each
# answer's end, and the policy would never learn to stop.
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
    gives "85$", 8555 gives "8555" (it never ended), 8_5$ gives "8_5$" (a "_" before the end is part of the answer).
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
    order = torch.from_numpy(np.random.RandomState(15).permutation(len(prompts)))  # numpy promises: for ever the same
    return prompts[order[HELD_OUT:]], prompts[order[:HELD_OUT]]


def answers(prompts: Tensor) -> Tensor:
    """The right response [N, Tr] to each prompt [N, Tp]: the sum, end-of-sequence, padding."""
    sums = [sum(int(number) for number in text.rstrip("=").split("+")) for text in decode(prompts)]
    return encode([f"{total}$".ljust(RESPONSE_LEN, "_") for total in sums]).to(prompts.device)


def response_mask(responses: Tensor) -> Tensor:
    """1.0 on each response's own tokens, up to and INCLUDING its first end-of-sequence; 0.0 after it. [N, Tr].

    85$_ has the mask 1 1 1 0: to stop is an action of the policy, so its EOS counts. 8_5$ has 1 1 1 1: to the policy
    "_" is a token like any other, and if it samples one (wrongly), `responses != PAD` would drop it.
    """
    is_eos = (responses == EOS).long()
    eos_before = is_eos.cumsum(dim=1) - is_eos  # how many EOS stand before each token: 85$_ has 0 0 0 1
    return (eos_before == 0).float()


# 2. The model: a GPT-2 in miniature, about 100k parameters -----------------------------------------------------
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

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention: [N, T, width] -> [N, T, width]."""
        n, t, width = x.shape
        qkv = self.qkv(x).view(n, t, 3 * self.heads, width // self.heads)  # the heads of q, then of k, then of v
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)  # each [N, heads, T, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # softmax(q k^T / sqrt(width / heads)) v
        return self.proj(attended.transpose(1, 2).reshape(n, t, width))  # the heads side by side again

    def mlp(self, x: Tensor) -> Tensor:
        """The same two layers for each position: [N, T, width] -> [N, T, width]."""
        return self.fc_out(F.gelu(self.fc(x)))

    def forward(self, x: Tensor, keep: int) -> Tensor:
        """x [N, T, width] -> [N, keep, width]: attention sees all T positions, only the last `keep` are returned."""
        x = x + self.attention(self.ln_1(x))
        x = x[:, -keep:]
        return x + self.mlp(self.ln_2(x))


class TinyLM(nn.Module):
    """A causal, decoder-only transformer with learned positions and an untied head without bias."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4):
        super().__init__()
        self.token_embedding = nn.Embedding(len(VOCAB), width)
        self.position_embedding = nn.Embedding(PROMPT_LEN + RESPONSE_LEN, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCAB), bias=False)

    def forward(self, tokens: Tensor, logits_to_keep: int | None = None) -> Tensor:
        """Logits [N, T, V] of what follows each of tokens [N, T]; or only those of the last `logits_to_keep` tokens."""
        t = tokens.shape[1]
        x = self.token_embedding(tokens) + self.position_embedding.weight[:t]  # [N, T, width]
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x, keep=t)
        x = last(x, keep=logits_to_keep or t)  # no attention follows that could look at the other positions
        return self.head(self.ln_f(x))


def policy_logits(model: TinyLM, tokens: Tensor, logits_to_keep: int, temperature: float = 1.0) -> Tensor:
    """The logits [N, logits_to_keep, V] whose softmax is the policy.

    `return model(tokens, logits_to_keep) / temperature` would do. The rest saves time: of the eight answers to a prompt
    many are the same, and rows of tokens that are equal are computed once.
    """
    powers = len(VOCAB) ** torch.arange(tokens.shape[1], device=tokens.device)
    numbers = (tokens * powers).sum(dim=1)  # each row read as a number whose digits are its tokens
    distinct, row_of = numbers.unique(return_inverse=True)  # row i of `tokens` is row row_of[i] of `rows`
    rows = tokens.new_empty(len(distinct), tokens.shape[1])
    rows[row_of] = tokens  # where several are written to one place, they are equal
    return model(rows, logits_to_keep)[row_of] / temperature


# 3. Sampling ---------------------------------------------------------------------------------------------------
@torch.no_grad()
def generate(model: TinyLM, prompts: Tensor, temperature: float = 1.0, generator=None, greedy: bool = False) -> Tensor:
    """One response to each prompt row: tokens [N, Tr], padded with PAD after the end-of-sequence. They are drawn from
    softmax(logits / temperature) with `generator`, a torch.Generator or None, or are the likeliest ones if `greedy`.
    All rows go on for Tr tokens; what a row wrote after its end-of-sequence is replaced by padding after the loop.
    """
    tokens = prompts
    for _ in range(RESPONSE_LEN):
        logits = policy_logits(model, tokens, 1, temperature).squeeze(1)  # of the next token: [N, V]
        if not greedy:
            # The Gumbel-max trick: with noise -log(-log(uniform)) added, the largest logit is a draw from their
            # softmax. torch.multinomial does the same, but slower.
            uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
            noise = -(-uniform.log()).log()
            logits = logits + noise
        tokens = torch.cat([tokens, logits.argmax(dim=1, keepdim=True)], dim=1)
    responses = tokens[:, prompts.shape[1] :]
    return responses.masked_fill(response_mask(responses) == 0, PAD)


# 4. Log-probs --------------------------------------------------------------------------------------------------
def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """log_softmax(logits)[index] over the last dimension: logits [..., V], index [...] -> [...]. In float32 or float64:
    log softmax(z)_i = z_i - log(sum of exp(z)) is a subtraction that loses too much in half precision.
    """
    return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def response_logits(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """Logits / temperature [N, Tr, V] from which each token of `responses` [N, Tr] was (or could have been) drawn.
    Shifted by one: the prompt's last token, at position Tp - 1, predicts the first of the response, and each token of
    the response the one after it. The response's last token predicts nothing that we need, so it is not even read.
    """
    tokens = torch.cat([prompts, responses[:, :-1]], dim=1)
    return policy_logits(model, tokens, responses.shape[1], temperature)


def token_logp(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi(token | what came before) of each response token, pi = softmax(logits / temperature): [N, Tr], nats, with
    gradient unless called under `torch.no_grad()`. Values after the end-of-sequence mean nothing: mask them.
    """
    return selective_log_softmax(response_logits(model, prompts, responses, temperature), responses)


# 5. SFT: the starting policy, which is also GRPO's reference ---------------------------------------------------
def train_sft(seed: int = 3, target: float = 0.51, lr: float = 3e-3, batch: int = 64, max_steps: int = 2000) -> TinyLM:
    """A TinyLM trained on right answers until its sampled accuracy on 500 fixed training problems reaches `target`.

    It stops on measured accuracy, never on a step count: accuracy climbs so steeply here that a fixed count would give
    anything from 0.3 to 0.9. The learning rate is high and constant on purpose: where it was lowered towards the end of
    SFT, the policy lost accuracy in GRPO instead of gaining. Raises RuntimeError if `max_steps` do not suffice.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # nn's initialisers draw from the global generator: seed it for a moment
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
        if step % 10 == 0 and success_probability(model, train[:500]).mean() >= target:
            return model
    raise RuntimeError(f"SFT did not reach a sampled accuracy of {target} in {max_steps} steps")


# 6. Evaluation: exact, since each problem has one right response -----------------------------------------------
def success(logits: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(p [N], greedy [N]) of N problems, from the policy's logits [N, Tr, V] on their right answers `right` [N, Tr].

    p: the probability that a sampled response is right, which is the product of its tokens' probabilities.
    greedy: 1.0 if greedy decoding is right. It is where each token of the right answer is the likeliest one after those
        before it, for then it goes the same way.
    The means of p and of greedy are the sampled and the greedy accuracy.
    """
    own = response_mask(right)
    p = (selective_log_softmax(logits, right) * own).sum(dim=1).exp()
    greedy = ((logits.argmax(dim=-1) == right) | (own == 0)).all(dim=1)  # padding counts as right
    return p, greedy.to(p.dtype)


@torch.no_grad()
def success_probability(model: TinyLM, prompts: Tensor, temperature: float = 1.0) -> Tensor:
    """The exact probability [N] that a sampled response to each prompt is right."""
    right = answers(prompts)
    return success(response_logits(model, prompts, right, temperature), right)[0]


# 7. Files: can be skipped --------------------------------------------------------------------------------------
def save_checkpoint(model: TinyLM, path: Path) -> None:
    """Write the model's weights to `path`, whole or not at all. Raises OSError where they cannot be written."""
    content = io.BytesIO()  # to memory first: on a full disk torch.save would raise a RuntimeError, no OSError
    torch.save(model.state_dict(), content)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        temporary.write_bytes(content.getbuffer())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> TinyLM:
    """The TinyLM saved at `path`. Raises FileNotFoundError, or ValueError if it is not a whole and finite TinyLM."""
    model = TinyLM()
    try:
        with warnings.catch_warnings():  # torch warns of files that are not its own: the error below says it
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
