"""Models as plain data, and back."""

import torch
from torch import Tensor, nn

import tinylm


def spec_of(model: nn.Module) -> dict:
    """The model as plain data: its weights by name, and whether they are to be trained."""
    if isinstance(model, OddAnswers):
        return {"kind": "odd answers"}
    trained = any(weight.requires_grad for weight in model.parameters())
    return {"kind": "TinyLM", "trained": trained, "weights": {k: w.detach() for k, w in model.state_dict().items()}}


def built(spec: dict) -> nn.Module:
    """The model that `spec_of` made the data of."""
    if spec["kind"] == "odd answers":
        return OddAnswers()
    model, weights = tinylm.TinyLM(), spec["weights"]
    model.head = nn.Linear(*reversed(weights["head.weight"].shape), bias="head.bias" in weights)
    model.load_state_dict(weights)
    return model.requires_grad_(spec["trained"])


def flat(model: nn.Module) -> Tensor:
    """All weights of a model in one row."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


class OddAnswers(torch.nn.Module):
    """A policy that answers right, or nearly: with a zero in front of the sum, with padding in it, or not ended."""

    FORMS = ("{}$", "0{}$", "00{}", "_{}$", "{}_$", "{}__", "{}0$", "+{}$", "{}=$")

    def __init__(self):
        super().__init__()
        self.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))  # by which code may ask for the device

    def forward(self, tokens: Tensor, logits_to_keep: int | None = None) -> Tensor:
        """Logits [N, logits_to_keep, V], of which the last mean something: the next token is any that goes on with one
        of the answers, each as likely as the others.
        """
        logits = torch.zeros(len(tokens), logits_to_keep or tokens.shape[1], len(tinylm.VOCAB))
        logits[:, -1] = -torch.inf
        for row, text in enumerate(tinylm.decode(tokens)):
            prompt, begun = text[: tinylm.PROMPT_LEN], text[tinylm.PROMPT_LEN :]
            total = str(sum(map(int, prompt.rstrip("=").split("+"))))
            answers = [form.format(total).ljust(tinylm.RESPONSE_LEN, "_") for form in self.FORMS]
            answers.append(f"{total[0]}_{total[1:]}$".ljust(tinylm.RESPONSE_LEN, "_"))
            going_on = [answer[len(begun)] for answer in answers if answer.startswith(begun) and answer != begun]
            for char in going_on or ["_"]:  # what has ended is padded
                logits[row, -1, tinylm.VOCAB.index(char)] = 0.0
        return logits
