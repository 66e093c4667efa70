"""Everything on one device: on a pretended accelerator, a tensor that was left behind on the CPU is an error.

The tensors of the pretended device say that they are on "mps", and compute on the CPU. An operation that mixes them
with tensors on the CPU fails as it would on a real accelerator, where only copies and indices may cross, and tensors
without dimensions.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

import passk
import run
import tinylm
from lab import explain, explained

DEVICE = torch.device("mps:0")
CROSSING = ("aten._to_copy", "aten.copy_", "aten.index.Tensor")


class OnDevice(torch.Tensor):
    """A tensor of the pretended device; `inner` holds its values."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        # To torch's own code it is on "meta", for which there are no drivers to be missing; to Python it is on DEVICE.
        options = {"dtype": inner.dtype, "device": "meta", "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), **options)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @property
    def device(self):
        return DEVICE

    def tolist(self):
        return self.inner.tolist()

    def numpy(self):
        raise TypeError("can't convert a tensor of an accelerator to numpy: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return dispatch(operation, args, kwargs or {})


def dispatch(operation, args, kwargs):
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = any(isinstance(tensor, OnDevice) for tensor in tensors)
    here = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
    if there and here and not str(operation).startswith(CROSSING):
        raise RuntimeError(f"Expected all tensors to be on the same device: {operation}")
    target = kwargs.get("device")
    if target is not None:
        there = torch.device(target).type in (DEVICE.type, "meta")  # torch's own code asks for what it takes it for
        kwargs = kwargs | {"device": torch.device("cpu")}
    if str(operation).startswith("aten.copy_"):
        there = isinstance(args[0], OnDevice)
    plain_args, plain = tree_map(lambda value: value.inner if isinstance(value, OnDevice) else value, (args, kwargs))
    out = operation(*plain_args, **plain)
    if str(operation).split(".")[1].endswith("_"):  # in place: what came in goes out
        return out if out is None else args[0]
    return tree_map(lambda value: OnDevice(value) if there and isinstance(value, torch.Tensor) else value, out)


class Pretend(TorchDispatchMode):
    """Makes tensors that are asked for on the pretended device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return dispatch(operation, args, kwargs or {})


@pytest.fixture
def on_device(monkeypatch):
    """The pretended device; with generators, which nobody can make for it, of the CPU."""
    torch.optim.Adam([torch.zeros(1)])  # the first optimizer imports a lot, which must find torch as it is

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls)

    tensor = torch.tensor  # makes its result where no mode sees it

    def tensor_on(data, dtype=None, device="cpu"):
        return tensor(data, dtype=dtype).to(device)

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "tensor", tensor_on)
    torch.__future__.set_swap_module_params_on_conversion(True)
    with Pretend():
        yield DEVICE
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_the_pretended_device_refuses_a_mixture(on_device):
    there = torch.arange(3.0, device=on_device)
    assert there.device == on_device and (there + 1).device == on_device and there.cpu().device.type == "cpu"
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.arange(3.0)
    with pytest.raises(TypeError):
        there.numpy()


def test_training_and_evaluation_leave_nothing_on_the_cpu(on_device, sft, reference, monkeypatch):
    model = copy.deepcopy(sft).to(on_device)
    assert {weight.device for weight in model.parameters()} == {on_device}
    config = reference.GRPOConfig(iters=2, P=4, G=4, eval_every=2)
    adam, fused = torch.optim.Adam, []
    monkeypatch.setattr(
        torch.optim, "Adam", lambda *args, **kwargs: fused.append(kwargs["fused"]) or adam(*args, **kwargs)
    )
    history = reference.train_grpo(model, config)
    assert fused == [False], "the oldest torch refuses it on mps"
    on_cpu = reference.train_grpo(copy.deepcopy(sft), config)
    assert history[-1]["sampled_accuracy"] == pytest.approx(on_cpu[-1]["sampled_accuracy"], abs=1e-4)


def test_pass_at_k_leaves_nothing_on_the_cpu(on_device, sft):
    model = copy.deepcopy(sft).to(on_device)
    prompts = tinylm.problems()[1][:20].to(on_device)
    right = passk.count_right(model, prompts, 8, 1.0, torch.Generator(on_device))
    assert right.shape == (20,)
    assert tinylm.success_probability(model, prompts).device == on_device


def test_groups_to_look_at_leave_nothing_on_the_cpu(on_device, sft, reference):
    model = copy.deepcopy(sft).to(on_device)
    run.call_tasks(reference, model)
    prompts = explain.shown_prompts(model, 2, 1.0)
    assert prompts.device == on_device
    shown = explain.show_groups(reference, model, prompts, reference.GRPOConfig(G=4), model)
    assert shown.count("of 4 answers are right") == 2


def test_a_step_to_look_at_leaves_nothing_on_the_cpu(on_device, sft, reference, tmp_path):
    model, config = copy.deepcopy(sft).to(on_device), reference.GRPOConfig()
    step = explain.explain_step(reference, model, explain.prompt_of("37+48=", model, 1.0), config)
    assert "85$" in explain.step_as_text(step)
    explained.draw_step(step, config, tmp_path / "step.png")
