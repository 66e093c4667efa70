"""The door between the tests and a student's functions: `answer(grpo, question)`.

Questions and answers are plain data: tensors, numbers, strings, lists and dicts. So the same tests can ask a module in
their own process, as at home, or one in another process, as in grading, where this package and `tinylm.py` are all that
stands beside the student's code. Whatever that code does becomes data here, or words; nothing here knows what is right.

A question is the arguments of one function, by the names below. An answer holds "problem", "" or why there is nothing
else in it: a few lines about an exception. Otherwise, by task:

    1  ask_samples     "samples": of each call the five fields, or what came instead
    2  ask_advantages  "value"
    3  ask_k3          "value"; "gradient" of the weighted sum with respect to logp, None if there is none
    4  ask_loss        "value", "gradient", "metrics", "attached" (the keys of metrics that carry gradient)
    5  ask_steps       "steps": of each call samples, metrics, attached; then the "policy" and the "reference", all
                       weights in one row; what the step "changed" and may not; its "calls", which are hints
"""

import dataclasses
from functools import partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

import tinylm
from lab.door.calls import watched
from lab.door.errors import describe
from lab.door.models import built, flat

NAMES = {1: "sample_group", 2: "group_advantages", 3: "k3_kl", 4: "grpo_loss", 5: "grpo_step"}
BUILDS_ON = {4: (3,), 5: (1, 2, 3, 4)}  # task -> the earlier tasks that its function calls
OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": partial(torch.optim.Adam, fused=True)}  # fused, as train_grpo has it
SAMPLES = ("prompts", "responses", "mask", "rewards", "texts")  # the fields of `grpo.Samples`


class Problem(Exception):
    """Why a student's function gave nothing to look at, in words."""


def answer(grpo: ModuleType, question: dict) -> dict:
    """What the module's function of question["task"] makes of the question."""
    ask = {1: ask_samples, 2: ask_advantages, 3: ask_k3, 4: ask_loss, 5: ask_steps}
    question = dict(question)
    task = question.pop("task")
    try:
        return {"problem": "", **ask[task](grpo, **question)}
    except Problem as problem:
        return {"problem": str(problem)}
    except Exception as error:  # of what was returned: a property that raises, say
        return {"problem": f"what it returned cannot be looked at: {type(error).__name__}: {error}"}


def call(grpo: ModuleType, task: int, *args, calls=None):
    """What the task's function returns. Raises Problem if it raises, returns None, or changes a tensor in place."""
    function = getattr(grpo, NAMES[task], None)
    if function is None:
        raise Problem("grpo.py no longer has a function of this name")
    before = [arg.detach().clone() if isinstance(arg, Tensor) else None for arg in args]
    problem = ""
    try:
        result = function(*args)
    except NotImplementedError as error:
        problem = str(error) or "is not written yet: open grpo.py"
    except (Exception, SystemExit) as error:
        problem = describe(error, function, calls)
    if problem:
        raise Problem(problem)
    if result is None:
        raise Problem("it returned None: is the return statement missing?")
    for position, (arg, copied) in enumerate(zip(args, before, strict=True), start=1):
        if copied is not None and not torch.equal(arg.detach(), copied):
            raise Problem(f"it changed its argument number {position} in place: work on a copy")
    return result


# A student's values as plain data --------------------------------------------------------------------------------


def plain(value):
    """The value as plain data: a tensor detached, on the CPU; of anything unknown the name of its type, in a set."""
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor).cpu().clone()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    return {"a": type(value).__name__}


def kinds(returned) -> str:
    """The types of what was returned: "(Tensor, dict)"."""
    if isinstance(returned, tuple | list):
        return f"({', '.join(type(part).__name__ for part in returned)})"
    return f"a {type(returned).__name__}"


def pair(returned, wanted: str) -> tuple:
    """What was returned, if it is two values of which the second is a dict. Raises Problem."""
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise Problem(f"it must return {wanted}; it returned {kinds(returned)}")
    return tuple(returned)


def fields(samples) -> dict:
    """The five fields of a Samples. Raises Problem if one is missing."""
    for name in SAMPLES:
        if not hasattr(samples, name):
            raise Problem(f"it must return a Samples; a {type(samples).__name__} has no {name!r}")
    return {name: plain(getattr(samples, name)) for name in SAMPLES}


def attached(metrics: dict) -> list[str]:
    """The keys of the metrics that keep the graph alive."""
    return [str(key) for key, value in metrics.items() if isinstance(value, Tensor) and value.requires_grad]


def gradient(grpo: ModuleType, task: int, value, logp: Tensor) -> Tensor | None:
    """The gradient of a scalar with respect to logp; None where there is none. Raises Problem."""
    if not isinstance(value, Tensor) or value.dim() or not value.requires_grad:
        return None
    problem = ""
    try:
        (found,) = torch.autograd.grad(value, logp, allow_unused=True)
    except RuntimeError as error:
        problem = describe(error, getattr(grpo, NAMES[task]))
    if problem:
        raise Problem(problem)
    return found


# The five questions ----------------------------------------------------------------------------------------------


def ask_samples(grpo: ModuleType, model: dict, prompts: Tensor, G: int, temperature: float, seed: int, times: int):
    """`times` calls with one generator. The global generator is seeded as well, as it must not matter."""
    torch.manual_seed(0)
    policy, generator = built(model).requires_grad_(False), torch.Generator().manual_seed(seed)
    return {"samples": [fields(call(grpo, 1, policy, prompts, G, temperature, generator)) for _ in range(times)]}


def ask_advantages(grpo: ModuleType, rewards: Tensor, G: int, normalize_std: bool, **eps: float):
    """eps: its default if it is not in the question."""
    return {"value": plain(call(grpo, 2, rewards, G, normalize_std, *eps.values()))}


def ask_k3(grpo: ModuleType, logp: Tensor, ref_logp: Tensor, weights: Tensor):
    """The gradient is that of sum(weights * k3)."""
    logp = logp.clone().requires_grad_()
    k3 = call(grpo, 3, logp, ref_logp)
    is_alike = isinstance(k3, Tensor) and k3.shape == weights.shape
    return {"value": plain(k3), "gradient": gradient(grpo, 3, (k3 * weights).sum(), logp) if is_alike else None}


def ask_loss(grpo: ModuleType, logp: Tensor, **others):
    """others: old_logp, ref_logp, advantages, mask, clip, beta, in the order of the function's arguments."""
    logp = logp.clone().requires_grad_()
    loss, metrics = pair(call(grpo, 4, logp, *others.values()), "(loss, metrics), a scalar and a dict")
    found = {"value": plain(loss), "gradient": gradient(grpo, 4, loss, logp)}
    return found | {"metrics": plain(metrics), "attached": attached(metrics)}


def ask_steps(
    grpo: ModuleType,
    policy: dict,
    reference: dict,
    optimizer: str,
    prompts: Tensor,
    config: dict,
    seed: int,
):
    """A step for each row of prompts [steps, P, Tp], by one optimizer ("SGD" or "Adam"), with one generator."""
    torch.manual_seed(0)
    model, ref_model = built(policy), built(reference)
    generator, steps = torch.Generator().manual_seed(seed), []
    try:
        config = grpo.GRPOConfig(**config)
    except Exception as error:
        raise Problem(f"GRPOConfig is no longer what it was: {type(error).__name__}: {error}") from None
    optimizer = OPTIMIZERS[optimizer](model.parameters(), lr=config.lr)
    before = circumstances(model, ref_model, optimizer, config)
    for rows in prompts:
        with watched(grpo, model, optimizer) as calls:
            returned = call(grpo, 5, model, ref_model, optimizer, rows, config, generator, calls=calls)
        samples, metrics = pair(returned, "(samples, metrics), a Samples and a dict")
        steps.append({"samples": fields(samples), "metrics": plain(metrics), "attached": attached(metrics)})
    after = circumstances(model, ref_model, optimizer, config)
    return {
        "steps": steps,
        "policy": flat(model),
        "reference": flat(ref_model),
        "reference has gradient": any(weight.grad is not None for weight in ref_model.parameters()),
        "changed": [what for what, state in after.items() if state != before[what]],
        "calls": plain(vars(calls)),
    }


def circumstances(policy: tinylm.TinyLM, reference: tinylm.TinyLM, optimizer, config) -> dict:
    """What a step may use but not leave changed."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {
        "the optimizer's settings": groups,
        "config": {field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "requires_grad of the policy's weights": [weight.requires_grad for weight in policy.parameters()],
        "requires_grad of the reference's weights": [weight.requires_grad for weight in reference.parameters()],
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's default type": torch.get_default_dtype(),
    }
