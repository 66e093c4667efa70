"""Task 5: what a step hands to grpo_loss, compared with what it is to be, and with what known mistakes hand over."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

import tinylm
from lab.diagnose import Seen, joined, named
from lab.door.calls import Calls
from tinylm import TinyLM


def grouped(rewards: Tensor, G: int, std: bool = True) -> Tensor:
    """The advantages as the reference computes them, eps included: over several steps even 1e-4 would show."""
    groups = rewards.float().view(-1, G)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + 1e-4) if std else centred).flatten()


@dataclass
class Taken:
    """A step that the student's function took: the policy as it was before, what came back, and what was called."""

    before: TinyLM
    reference: TinyLM
    samples: SimpleNamespace  # prompts, responses, mask and rewards
    calls: Calls
    config: SimpleNamespace  # the settings
    weights: Tensor  # of the policy afterwards, in one row
    reference_moved: bool

    def logp(self, model: TinyLM, temperature: float) -> Tensor:
        """log-probs [N, Tr] of the samples under a model."""
        with torch.no_grad():
            return tinylm.token_logp(model, self.samples.prompts, self.samples.responses, temperature)

    def advantages(self, G: int, std: bool) -> Tensor:
        return grouped(self.samples.rewards, G, std)

    def handed(self, name: str) -> Tensor:
        """The argument `name` of grpo_loss at the inner steps, one above the other."""
        return torch.stack([torch.as_tensor(arguments[name]).double() for arguments in self.calls.losses])

    def right(self, name: str) -> Tensor:
        """What it should be, at each."""
        T, config = self.config.temperature, self.config
        return {
            "logp": lambda: self.logp(self.before, T),
            "old_logp": lambda: self.logp(self.before, T),
            "ref_logp": lambda: self.logp(self.reference, T),
            "advantages": lambda: self.advantages(config.G, config.std),
            "mask": lambda: self.samples.mask,
            "clip": lambda: torch.tensor(config.clip),
            "beta": lambda: torch.tensor(config.beta),
        }[name]()

    def seen(self, name: str) -> Seen:
        """The argument as a probe. Of logp only what the first inner step hands on: later the policy has moved."""
        return Seen((self,), self.own(name, self.handed(name)), self.own(name, self.right(name)))

    def own(self, name: str, value: Tensor) -> tuple[Tensor]:
        """The value at each inner step, of log-probs those of own tokens."""
        shape = self.right(name).shape
        if value.shape[value.dim() - len(shape) :] != shape:
            return (value.double(),)  # odd as it is, it equals nothing
        values = value.double().expand(len(self.calls.losses), *shape)
        if name.endswith("logp"):
            values = values * self.samples.mask
        return (values[:1] if name == "logp" else values,)


REF_FOR_OLD = "ref_logp stands in for old_logp: old_logp comes from the policy that sampled"
OLD_FOR_REF = "the reference is the policy itself: ref_logp comes from ref_model"
BETA_FOR_CLIP, CLIP_FOR_BETA = "clip gets config.beta", "beta gets config.clip"
TOGETHER = {  # what two of them are together
    "old_logp and ref_logp are swapped": {REF_FOR_OLD, OLD_FOR_REF},
    "clip and beta are swapped": {BETA_FOR_CLIP, CLIP_FOR_BETA},
}
OLD_LOGP = {  # what may stand in for an argument of grpo_loss
    "old_logp is recomputed inside the inner loop, so the ratio is always 1: freeze it before the loop": (
        lambda step: step.handed("logp")
    ),
    "old_logp is taken after the first optimizer step: take it before any step": lambda step: torch.cat(
        [step.handed("logp")[:1], *[step.handed("logp")[1:2]] * (len(step.calls.losses) - 1)]
    ),
    "old_logp follows the policy, one step behind: it stays what it was before the loop": lambda step: torch.cat(
        [step.handed("logp")[:1], step.handed("logp")[:-1]]
    ),
    REF_FOR_OLD: lambda step: step.right("ref_logp"),
}
REF_LOGP = {
    OLD_FOR_REF: lambda step: step.right("old_logp"),
    "ref_logp is recomputed from the policy at every inner step: it comes from ref_model, once": (
        lambda step: step.handed("logp")
    ),
}
ADVANTAGES = {
    "config.std is ignored: the advantages are always divided by the std": lambda step: step.advantages(
        step.config.G, True
    ),
    "config.std is ignored: the advantages are never divided by the std": lambda step: step.advantages(
        step.config.G, False
    ),
    "config.std is used the wrong way round": lambda step: step.advantages(step.config.G, not step.config.std),
    "the advantages are taken over P rows, not over G: pass config.G": lambda step: step.advantages(
        len(step.samples.rewards) // step.config.G, step.config.std
    ),
    "the advantages are computed over the whole batch: pass config.G": lambda step: step.advantages(
        len(step.samples.rewards), step.config.std
    ),
    "the rewards are used as they are: task 2 makes advantages of them": lambda step: step.samples.rewards,
    "the sign of the advantages is flipped: this makes right answers less likely": lambda step: (
        -step.right("advantages")
    ),
}
MASK = {"the mask is not passed to the loss: padding counts": lambda step: torch.ones_like(step.samples.mask)}
CLIP = {
    "config.clip is ignored, and the default of 0.2 used": lambda step: torch.tensor(0.2),
    BETA_FOR_CLIP: lambda step: torch.tensor(step.config.beta),
}
BETA = {
    "config.beta is ignored, and the default of 0.04 used": lambda step: torch.tensor(0.04),
    "config.beta is not used: there is no KL penalty": lambda step: torch.tensor(0.0),
    CLIP_FOR_BETA: lambda step: torch.tensor(step.config.clip),
}
TEMPERATURES = {  # of any of the three log-probs
    "config.temperature is missing in": lambda T: 1.0,
    "the logits are multiplied by the temperature, not divided by it, in": lambda T: 1 / T,
}
ARGUMENTS = {  # of grpo_loss: what it is to be, and what may stand in for it
    "logp": ("the policy's log-probs of the samples, in each inner step anew", {}),
    "old_logp": ("the policy's log-probs of the samples from before the first step", OLD_LOGP),
    "ref_logp": ("the reference's log-probs of the samples", REF_LOGP),
    "advantages": ("group_advantages(samples.rewards, config.G, config.std)", ADVANTAGES),
    "mask": ("samples.mask", MASK),
    "clip": ("config.clip", CLIP),
    "beta": ("config.beta", BETA),
}


def stand_ins(name: str) -> Iterator[tuple[str, Callable[[Taken], tuple[Tensor]]]]:
    """What may stand in for an argument, each with its name."""
    for mistake, value_of in ARGUMENTS[name][1].items():
        yield mistake, lambda step, value_of=value_of: step.own(name, value_of(step))
    for mistake, of in TEMPERATURES.items() if name.endswith("logp") else ():
        yield (
            f"{mistake} {name}",
            lambda step, of=of: step.own(
                name, step.logp(step.reference if name == "ref_logp" else step.before, of(step.config.temperature))
            ),
        )


def wrong_arguments(steps: list[Taken]) -> str:
    """What is wrong with the arguments that grpo_loss got; "" if nothing is, or if it was not called."""
    if not all(step.calls.losses for step in steps):
        return ""
    if any(arguments["old_logp carries gradient"] for step in steps for arguments in step.calls.losses):
        return "old_logp carries gradient, which cancels that of logp: compute it under torch.no_grad()"
    for step in steps:
        if len(rows := step.handed("logp")[0]) != len(step.samples.mask):
            return f"grpo_loss gets {len(rows)} rows of the {len(step.samples.mask)} samples: it is to get all of them"
    found = {}
    for name, (meant, _) in ARGUMENTS.items():
        seen = [step.seen(name) for step in steps]
        if not all(probe.is_right for probe in seen):
            found[name] = named(stand_ins(name), seen) or f"grpo_loss gets another {name}: it is to be {meant}"
    for mistake in TEMPERATURES:
        if len(alike := [name for name in found if found[name] == f"{mistake} {name}"]) > 1:
            found |= dict.fromkeys(alike, f"{mistake} {', '.join(alike)}")
    for both, two in TOGETHER.items():
        if two <= set(found.values()):
            found = {name: both if text in two else text for name, text in found.items()}
    return joined(found.values())
