"""What `colab_grpo_trl.md` says of TRL, held against the installed package: settings, names, errors, sentences.

Needs what the guide installs: `solutions/guide.py --run` starts it in the guide's environment, after the blocks. In the
environment of the other tests, where there is no TRL, it is skipped.
"""

import ast
import contextlib
import dataclasses
import inspect
import os
import re
import sys
import warnings
from collections import defaultdict
from importlib import metadata, resources
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="what the guide installs is not here: solutions/guide.py --run runs this file")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import peft
import torch
import transformers
import trl
from datasets import Dataset
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PrinterCallback, Trainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.trainer import utils

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "solutions" / "tests"), str(ROOT / "solutions"), str(ROOT)]

import test_guide
from guiding.document import GUIDE, block

import grpo
import tinylm

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
TEXT = GUIDE.read_text(encoding="utf-8")
FLAT = " ".join(TEXT.split())
CONFIGS = [trl.GRPOConfig, trl.RLOOConfig, trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, OnlineDPOConfig]
TRAINERS = [trl.GRPOTrainer, trl.RLOOTrainer, trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, OnlineDPOTrainer]
QUIET = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "report_to": "none", "save_strategy": "no"}
QUIET |= {"dataloader_pin_memory": False, "disable_tqdm": True, "max_steps": 1}
PAIR = {"prompt": "37+48=", "chosen": "85$", "rejected": "95$"}


def rows_of(first_cell: str) -> list[list[str]]:
    """The cells of the rows of every table of the guide whose header starts with `first_cell`."""
    tables = re.findall(rf"^\| {re.escape(first_cell)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    assert tables, f"no table starts with {first_cell!r}"
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for rows in tables for row in rows.splitlines()]


def blocks() -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def default_of(field: dataclasses.Field):
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


# Small policies, and trainers that are not trained -----------------------------------------------------------------


@pytest.fixture(scope="module")
def convert():
    return block("convert")


@pytest.fixture(scope="module")
def folder(convert, tmp_path_factory) -> Path:
    """A TinyLM with random weights as a GPT-2, saved as in the guide's part 1."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("trl") / "policy"
    convert["to_gpt2"](tinylm.TinyLM()).save_pretrained(path)
    convert["character_tokenizer"]().save_pretrained(path)
    return path


@pytest.fixture
def policy(folder):
    return lambda **changes: GPT2LMHeadModel.from_pretrained(folder, **changes)


@pytest.fixture(scope="module")
def tokenizer(convert):
    return convert["character_tokenizer"]()


@pytest.fixture
def grpo_trainer(policy, tokenizer, tmp_path):
    """A function that builds a GRPOTrainer: two prompts with four answers each, unless told otherwise."""

    def build(
        reward=lambda completions, **kwargs: [0.0] * len(completions), data=None, model=None, more=None, **changes
    ):
        settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4}
        config = trl.GRPOConfig(tmp_path, **QUIET | settings | changes)
        data = Dataset.from_dict(data or {"prompt": ["37+48=", "10+15="] * 4, "answer": ["85", "25"] * 4})
        trainer = trl.GRPOTrainer(model or policy(), reward, config, data, processing_class=tokenizer, **more or {})
        trainer.remove_callback(PrinterCallback)
        trainer.model.train()  # as `train` does first of all; until then a batch would count as evaluation
        return trainer

    return build


def asked(*prompts: str, times: int = 4) -> list[dict]:
    """Rows for `_generate_and_score_completions`: each prompt `times` times in a row."""
    return [{"prompt": prompt, "answer": "85"} for prompt in prompts for _ in range(times)]


# Settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_default_in_the_tables_of_settings(config):
    fields = {field.name: field for field in dataclasses.fields(config)}
    rows = rows_of(f"`{config.__name__}`")
    assert len(rows) >= 6
    for name, default, *_ in rows:
        field = fields[name.strip("`")]
        assert default_of(field) == ast.literal_eval(default.strip("`")), f"{config.__name__}.{name}: {default}"


def test_settings_that_are_filled_in():
    config = trl.GRPOConfig("x", **QUIET | {"bf16": None}, per_device_train_batch_size=8, gradient_accumulation_steps=8)
    assert config.bf16 is True and config.steps_per_generation == 8 and config.generation_batch_size == 64
    assert trl.GRPOConfig("x", **QUIET | {"bf16": None}, fp16=True).bf16 is False
    for given, meant in {True: "group", False: "none"}.items():
        assert trl.GRPOConfig("x", **QUIET, scale_rewards=given).scale_rewards == meant


# Names --------------------------------------------------------------------------------------------------------------

# Files, environment variables, columns of a data set, and what is a variable inside of a method of TRL's.
OTHER_NAMES = [
    "grpo.py",
    "tinylm.py",
    "trl_vs_lab.png",
    "colab_grpo_trl.ipynb",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "torchrun",
    "gloo",
    "kl",
    "Conv1D",
    "answer",
    "messages",
    "answers",
    "trainer_state",
    "log_extra",
    "log_metric",
    "num_labels",
    "normalize_std",
    "use_kernels",
    "coef_1",
    "coef_2",
    "per_token_kl",
    "tool_mask",
    "completion_mask",
    "per_token_logps.detach",
    "frac_reward_zero_std",
    "TrainOutput",
    "training_loss",
    "return_outputs",
    "trainer.state.log_history",
]


def test_every_name_in_the_text_is_one_of_the_package():
    """A code span that reads like a name is TRL's, the lab's, or in a block that `--run` executes; or it is listed."""
    in_blocks = set(re.findall(r"[A-Za-z_]\w*", "\n".join(blocks())))
    known = set(OTHER_NAMES) | in_blocks | set(dir(trl)) | set(dir(utils)) | set(dir(trl.experimental.utils))
    known |= {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    known |= {name for trainer in TRAINERS for name in [*dir(trainer), *inspect.signature(trainer.__init__).parameters]}
    known |= set(re.findall(r"[A-Za-z_]\w*", " ".join(cell for row in rows_of("older") for cell in row)))
    known |= set(dir(transformers)) | {"nn.Linear", "transformers.Trainer", *dir(torch)}
    known |= {f"tinylm.{name}" for name in dir(tinylm)} | set(dir(grpo)) | set(vars(grpo.GRPOConfig()))
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    unknown = set()
    for span in re.findall(r"`([^`\n]+)`", prose):
        name = re.match(r"([A-Za-z_][\w.]*)(=[^=]*|\(.*\))?$", span)
        if not name or name.group(1) in known or name.group(1).split(".")[-1] in known:
            continue
        unknown.add(span)
    assert not unknown, f"nobody knows {sorted(unknown)}: a slip, or a name that is gone"


def test_names_that_are_gone_are_gone():
    gone = [name for old, new in rows_of("older") if new.startswith("gone") for name in re.findall(r"`(\w+)`", old)]
    assert {"PPOTrainer", "decode_and_strip_padding", "max_prompt_length", "reference_free"} <= set(gone)
    for name in gone:
        assert not hasattr(trl, name) or (name.endswith("Config") and name != "PPOConfig"), f"{name} is back in trl"
        assert not hasattr(utils, name), f"{name} is back in trl.trainer.utils"
    assert not hasattr(trl, "OnlineDPOTrainer") and not hasattr(utils, "pad_to_length")
    names = {config: {field.name for field in dataclasses.fields(config)} for config in CONFIGS}
    assert "max_prompt_length" not in names[trl.GRPOConfig] and "reference_free" not in names[trl.DPOConfig]
    assert "max_seq_length" not in names[trl.SFTConfig] and "max_length" in names[trl.SFTConfig]
    arguments = inspect.signature(trl.GRPOTrainer.__init__).parameters
    assert {"reward_funcs", "processing_class"} <= set(arguments) and not {"reward_functions", "tokenizer"} & set(
        arguments
    )
    assert trl.experimental.utils.pad_to_length


def test_kto_pair_is_refused(policy, tokenizer, tmp_path):
    config = trl.DPOConfig(tmp_path, **QUIET, loss_type="kto_pair")
    trainer = trl.DPOTrainer(policy(), args=config, train_dataset=Dataset.from_list([PAIR]), processing_class=tokenizer)
    with pytest.raises(ValueError, match="Unknown loss type: kto_pair") as error:
        trainer.train()
    named = re.findall(r"'(\w+)'", str(error.value))
    row = next(row for row in rows_of("`DPOConfig`") if row[0] == "`loss_type`")
    assert len(named) == 15 and "12 more" in row[-1] and {"sigmoid", "hinge", "ipo"} < set(named)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gradient_checkpointing": False}, "`gradient_checkpointing` is deprecated .* Use `activation_checkpointing`"),
        ({"vllm_importance_sampling_cap": 2.0}, "deprecated .* Use `vllm_importance_sampling_clip_max`"),
    ],
)
def test_names_that_are_going_say_so(change, told):
    with pytest.warns(FutureWarning, match=re.sub(" ", r"\\s", told)):
        trl.GRPOConfig(
            "x", **{name: value for name, value in QUIET.items() if name != "activation_checkpointing"}, **change
        )


def test_the_guides_own_settings_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trl.GRPOConfig("x", **QUIET)


def test_liger_is_going(grpo_trainer):
    with contextlib.suppress(ImportError), pytest.warns(FutureWarning, match='model_init_kwargs={"use_kernels": True}'):
        grpo_trainer(use_liger_kernel=True)


# Errors -------------------------------------------------------------------------------------------------------------


def messages() -> list[str]:
    """Each error of the text block in part 5, on one line, without the indented advice."""
    part = TEXT.partition("# 5. When it goes wrong")[2]
    block = re.search(r"^```text\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL).group(1)
    paragraphs = re.sub(r"^    .*\n", "", block, flags=re.MULTILINE).split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs]


def two_arguments(prompts, completion_ids):
    return [1.0] * len(prompts)


def one_for_each_group(prompts, **kwargs):
    return [1.0] * 16


def provoke(name: str, grpo_trainer, convert, monkeypatch):
    """Do what raises the error whose message starts with or holds `name`."""
    if name == "KeyError":
        grpo_trainer(data={"question": ["37+48="] * 8}).train()
    elif name == "two_arguments":
        grpo_trainer(two_arguments).train()
    elif name == "one_for_each_group":
        wide = {"per_device_train_batch_size": 128, "num_generations": 8}
        grpo_trainer(one_for_each_group, {"prompt": ["37+48="] * 16}, **wide).train()
    elif name == "OSError":
        grpo_trainer(model=convert["to_gpt2"](tinylm.TinyLM()), beta=0.04)
    elif name == "generation_batch_size":
        trl.GRPOConfig("x", **QUIET, per_device_train_batch_size=60)
    elif name == "max_prompt_length":
        trl.GRPOConfig("x", max_prompt_length=6)
    elif name == "DataParallel":
        monkeypatch.setattr(trl.GRPOConfig, "n_gpu", property(lambda config: 2))
        grpo_trainer()
    elif name == "args.max_steps":
        grpo_trainer(data={"prompt": ["37+48="]}, max_steps=-1).train()
    else:
        raise AssertionError(name)


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.partition(":")[0])
def test_every_error_text_is_what_trl_says(message, grpo_trainer, convert, monkeypatch):
    names = [
        "KeyError",
        "two_arguments",
        "one_for_each_group",
        "OSError",
        "max_prompt_length",
        "DataParallel",
        "args.max_steps",
    ]
    name = next((name for name in names if name in message), "generation_batch_size")
    with pytest.raises(Exception) as error:
        provoke(name, grpo_trainer, convert, monkeypatch)
    assert " ".join(f"{type(error.value).__name__}: {error.value}".split()) == message


def test_too_few_prompts_train_nothing_and_say_little(grpo_trainer, caplog):
    trainer = grpo_trainer(data={"prompt": ["37+48="]})
    transformers.logging.enable_propagation()
    assert trainer.train().global_step == 0 and trainer.state.global_step == 0
    line = "There seems not to be a single sample in your epoch_iterator, stopping training at step 0!"
    assert line in FLAT and line in caplog.text


# Sentences: each stands in the guide word for word, and is checked ---------------------------------------------------


def said(*sentences: str) -> None:
    for sentence in sentences:
        assert sentence in FLAT, f"the guide no longer says {sentence!r}: change this test with it"


def test_every_trainer_extends_transformers():
    said("Every trainer of TRL extends `transformers.Trainer`", "every configuration extends `TrainingArguments`")
    assert all(issubclass(trainer, Trainer) for trainer in TRAINERS)
    assert all(issubclass(config, transformers.TrainingArguments) for config in CONFIGS)


def test_what_is_overridden():
    sentence = re.search(r"`GRPOTrainer` overrides, of `Trainer`: (.*?)\. ", FLAT).group(1)
    names = re.findall(r"`(\w+)`", sentence)
    assert len(names) == 8
    for name in set(names) - {"_compute_loss"}:
        assert name in vars(trl.GRPOTrainer) and hasattr(Trainer, name), name
    assert not hasattr(Trainer, "_compute_loss") and "_compute_loss" in vars(trl.GRPOTrainer)


def test_answers_are_sampled_in_train_mode(grpo_trainer):
    said("model.generate in TRAIN mode", "dropout acts unless `disable_dropout=True`")
    trainer, modes = grpo_trainer(), []
    generate = trainer.model.generate
    trainer.model.generate = lambda *args, **kwargs: modes.append(trainer.model.training) or generate(*args, **kwargs)
    trainer.train()
    assert modes == [True]


def test_dropout_changes_the_log_probs_unless_disabled(grpo_trainer, policy):
    def ratios_differ(**changes):
        model = policy(resid_pdrop=0.3, attn_pdrop=0.3)
        trainer = grpo_trainer(model=model, num_iterations=2, **changes)
        batch = trainer._generate_and_score_completions(asked("37+48=", "10+15="))
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
        return not torch.allclose(logps, batch["old_per_token_logps"], atol=1e-5)

    assert ratios_differ() and not ratios_differ(disable_dropout=True)


def test_who_pads_and_where_the_mask_is_made(grpo_trainer, tokenizer):
    said(
        "lists of ids, not padded",
        "lists of ids, cut after the first end-of-sequence",
        "the mask from the lists' lengths",
    )
    trainer = grpo_trainer()
    prompts, *_ = trainer._tokenize_prompts(["37+48=", "7+8="])
    assert [len(ids) for ids in prompts] == [6, 4]
    answers = ["$", "8$", "85$", "185$", "1850", "5$", "$", "12$"]
    ids = tinylm.encode([text.ljust(4, "7") for text in answers])  # what stands after the end is no part of it
    trainer.model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, ids], dim=1)
    lists, logprobs = trainer._generate_single_turn(tokenizer(["37+48="] * 8)["input_ids"], None, {}, 4)
    assert [tokenizer.decode(row) for row in lists] == answers and logprobs is None
    batch = trainer._generate_and_score_completions(asked("37+48=", "7+8="))
    assert tokenizer.batch_decode(batch["prompt_ids"][[0, 4]]) == ["37+48=", "__7+8="]
    assert batch["prompt_mask"][4].tolist() == [0, 0, 1, 1, 1, 1]
    assert batch["completion_mask"].sum(dim=1).tolist() == [len(text) for text in answers]
    assert torch.equal(batch["completion_mask"].float(), tinylm.response_mask(ids))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"num_iterations": 2}, True),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, False),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, True),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "generation_batch_size": 8}, False),
    ],
)
def test_when_old_log_probs_are_computed(changes, needed, grpo_trainer):
    said("`gradient_accumulation_steps % (steps_per_generation * num_iterations) != 0`")
    trainer = grpo_trainer(**changes)
    args = trainer.args
    assert (args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) != 0) == needed
    batch = trainer._generate_and_score_completions(asked("37+48=", "10+15="))
    assert ("old_per_token_logps" in batch) == needed


def test_vllms_answers_get_old_log_probs_and_far_ones_are_dropped(grpo_trainer):
    said("or if vLLM sampled them", "an answer whose weight is above 3 is dropped")
    trainer = grpo_trainer()
    ids = tinylm.encode(["85$"] * 8).tolist()
    batch = {}

    def sample(prompt_ids, *rest):
        return ids, batch["logps"]

    trainer._generate_single_turn = sample
    batch["logps"] = None
    trainer.num_iterations = 2  # so that the trainer's own log-probs are there to be read
    own = trainer._generate_and_score_completions(asked("37+48=", "10+15="))["old_per_token_logps"]
    trainer.num_iterations, trainer.use_vllm = 1, True
    batch["logps"] = own.tolist()
    batch["logps"][0][0] -= 1.0  # a ratio of e, 2.7
    batch["logps"][1][0] -= 1.2  # 3.3
    out = trainer._generate_and_score_completions(asked("37+48=", "10+15="))
    assert "old_per_token_logps" in out
    expected = torch.tensor([2.71828, 0, *[1] * 6]).unsqueeze(1)
    torch.testing.assert_close(out["importance_sampling_ratio"], expected, rtol=1e-4, atol=1e-4)
    assert trainer._metrics["train"]["sampling/importance_sampling_ratio/min"] == [0.0]


def test_the_reference_is_read_again_or_not_there(grpo_trainer, policy):
    assert grpo_trainer().ref_model is None
    model = policy()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    trainer = grpo_trainer(model=model, beta=0.04)
    assert trainer.ref_model.lm_head.weight.abs().sum() > 0, "it is a copy of the policy, not read from its path"


def test_what_a_reward_function_gets(grpo_trainer):
    said("`prompts`, `completions`, `completion_ids`, one list for each further column of the data set")
    got = {}

    def reward(**kwargs):
        got.update(kwargs)
        kwargs["log_extra"]("length", [len(text) for text in kwargs["completions"]])
        kwargs["log_metric"]("answers", float(len(kwargs["completions"])))
        return [None, 1.0, 0.0, 1.0, *[None] * 4]

    trainer = grpo_trainer(reward, num_iterations=1)
    batch = trainer._generate_and_score_completions(asked("37+48=", "10+15="))
    assert set(got) == {
        "prompts",
        "completions",
        "completion_ids",
        "answer",
        "trainer_state",
        "log_extra",
        "log_metric",
    }
    assert got["answer"] == ["85"] * 8 and got["trainer_state"].global_step == 0
    assert trainer._metrics["train"]["answers"] == [8.0] and len(trainer._logs["extra"]["length"]) == 8
    assert batch["advantages"][0] == 0 and (batch["advantages"][4:] == 0).all()  # no verdict: no part in the group
    two_of_three = torch.tensor([1 / 3, -2 / 3, 1 / 3]) / (3**-0.5 + 1e-4)
    torch.testing.assert_close(batch["advantages"][1:4], two_of_three)


def test_what_is_returned(grpo_trainer):
    said("`return_outputs=True` is refused", "a `TrainOutput` of `global_step`, `training_loss`, `metrics`")
    trainer = grpo_trainer(num_iterations=2, beta=0.04, logging_steps=1)
    batch = trainer._generate_and_score_completions(asked("37+48=", "10+15="))
    names = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
    assert names | {"old_per_token_logps", "ref_per_token_logps", "num_items_in_batch"} == set(batch)
    diagram = TEXT.partition("# 2. Where each piece lives")[2].partition("```\n")[0]
    assert all(name in diagram for name in names | {"old_per_token_logps", "ref_per_token_logps"})
    with pytest.raises(ValueError, match="does not support returning outputs"):
        trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert trainer.train()._fields == ("global_step", "training_loss", "metrics")
    assert "reward" in trainer.state.log_history[0]


def test_a_model_as_a_reward_function(grpo_trainer, tokenizer):
    said("`AutoModelForSequenceClassification` with `num_labels=1`")
    size = {"vocab_size": len(tinylm.VOCAB), "n_positions": 10, "n_embd": 16, "n_layer": 1, "n_head": 1}
    judge = GPT2ForSequenceClassification(GPT2Config(**size, num_labels=1, pad_token_id=tinylm.PAD))
    trainer = grpo_trainer(judge, more={"reward_processing_classes": tokenizer})
    trainer._generate_and_score_completions(asked("37+48=", "10+15="))
    assert trainer._metrics["train"]["reward"][0] != 0


# The value of the loss, by TRL's own code on log-probs that are given ------------------------------------------------


def loss_at_ratio_one(loss_type: str, lengths: list[int], advantages: tuple[float, ...] = (1, -1, 1, -1)) -> float:
    """What `_compute_loss` returns on a group of four with these advantages, all ratios 1 and beta 0."""
    mask = (torch.arange(4) < torch.tensor(lengths).unsqueeze(1)).long()
    logps = -torch.arange(1.0, 17).view(4, 4) / 8
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, torch.zeros_like(logps), None),
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=trl.GRPOConfig("x", **QUIET),
        _metrics={"train": defaultdict(list)},
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type=loss_type,
        importance_sampling_level="token",
        current_gradient_accumulation_steps=1,
        max_completion_length=4,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros_like(mask)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": torch.tensor(advantages, dtype=torch.float32), "num_items_in_batch": mask.sum()}
    return trl.GRPOTrainer._compute_loss(fake, None, inputs).item()


@pytest.mark.parametrize(
    ("loss_types", "equal", "unequal"),
    [
        (["grpo"], True, True),
        (["dapo", "bnpo", "dr_grpo", "luspo"], True, False),
        (["cispo", "sapo", "vespo"], False, False),
    ],
)
def test_where_the_loss_starts(loss_types, equal, unequal):
    said(
        'With `loss_type="grpo"` every answer counts alike, so the loss is 0',
        "0 only if the answers of a group are equally",
    )
    for name in loss_types:
        assert (abs(loss_at_ratio_one(name, [3, 3, 3, 3])) < 1e-6) == equal, name
        assert (abs(loss_at_ratio_one(name, [1, 2, 3, 4])) < 1e-6) == unequal, name


def test_what_the_sum_over_tokens_is_divided_by():
    """With all ratios 1 a token's loss is -A: only the averaging is left, as the table of loss types has it."""
    lengths, advantages = [1, 2, 3, 4], (2.0, -1.0, 0.5, 3.0)
    sums = [-length * advantage for length, advantage in zip(lengths, advantages, strict=True)]
    expected = {"grpo": -sum(advantages) / 4, "bnpo": sum(sums) / 10, "dapo": sum(sums) / 10}
    expected |= {"dr_grpo": sum(sums) / (4 * 4), "luspo": sum(sums) / 4}
    divided_by = {row[0].strip('`"'): row[1] for row in rows_of("`loss_type`")}
    assert divided_by["dr_grpo"] == "answers * `max_completion_length`"
    assert divided_by["luspo"] == "the number of answers alone" and "local" in divided_by["bnpo"]
    for name, value in expected.items():
        assert loss_at_ratio_one(name, lengths, advantages) == pytest.approx(value), name


def test_every_loss_type_is_in_the_table():
    listed = {row[0].strip('`"') for row in rows_of("`loss_type`")}
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    tests = re.findall(r"self\.loss_type (?:==|in) (\[.*?\]|\".*?\")", source)
    assert {name for test in tests for name in re.findall(r'"(\w+)"', test)} == listed
    with pytest.raises(ValueError, match="Unknown loss type"):
        loss_at_ratio_one("none of them", [3, 3, 3, 3])


# Utilities ----------------------------------------------------------------------------------------------------------


def peak(function, *args) -> float:
    """MiB that a call holds at its peak on the CPU, beside what was there."""
    with torch.profiler.profile(profile_memory=True) as record:
        function(*args)
    now = top = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            top = max(top, now)
    return top / 2**20


def test_selective_log_softmax_saves_memory():
    said("7.8 MiB beside the 62.5 MiB of logits", "`log_softmax` and `gather` 62.5 MiB")
    logits, index = torch.randn(8, 64, 32_000), torch.randint(32_000, (8, 64))

    def naive(logits, index):
        return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    assert logits.nbytes / 2**20 == 62.5
    assert round(peak(naive, logits, index), 1) == 62.5
    assert round(peak(utils.selective_log_softmax, logits, index), 1) == 7.8


def test_who_uses_selective_log_softmax():
    said("not what `GRPOTrainer` uses any more", "trainers in `trl.experimental` do")
    assert "selective_log_softmax" not in inspect.getsource(trl.trainer.grpo_trainer)
    package = Path(trl.__file__).parent
    assert any("selective_log_softmax" in path.read_text() for path in (package / "experimental").rglob("*_trainer.py"))


# The other trainers -------------------------------------------------------------------------------------------------


def test_the_data_set_that_a_reward_model_is_trained_on(tokenizer, tmp_path):
    assert ["`RewardTrainer`", "preference", "`chosen`, `rejected`, perhaps `prompt`"] in rows_of("trainer")
    size = {"vocab_size": len(tinylm.VOCAB), "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 1}
    judge = GPT2ForSequenceClassification(GPT2Config(**size, num_labels=1, pad_token_id=tinylm.PAD))
    for row in (PAIR, {"chosen": "37+48=85$", "rejected": "37+48=95$"}):
        config = trl.RewardConfig(tmp_path, **QUIET)
        trainer = trl.RewardTrainer(judge, config, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        assert trainer.train().global_step == 1


def dpo_loss(policy, tokenizer, tmp_path, **changes) -> float:
    """DPO's first loss, against a reference that differs from the policy."""
    config = trl.DPOConfig(tmp_path, **QUIET, per_device_train_batch_size=1, **changes)
    torch.manual_seed(1)
    reference = policy()
    with torch.no_grad():
        reference.lm_head.weight.add_(torch.randn_like(reference.lm_head.weight))
    data = Dataset.from_list([PAIR])
    trainer = trl.DPOTrainer(policy(), reference, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer.train().training_loss


def test_label_smoothing_is_read_by_robust_alone_of_these(policy, tokenizer, tmp_path):
    said('`"sigmoid"` does not read it')
    for name, reads in {"sigmoid": False, "robust": True}.items():
        losses = [dpo_loss(policy, tokenizer, tmp_path, loss_type=name, label_smoothing=share) for share in (0.0, 0.1)]
        assert (losses[0] != losses[1]) == reads, name


def test_an_end_is_appended_to_an_answer_that_was_cut_off(policy, tokenizer, tmp_path):
    said("TRL appends an end-of-sequence where an answer has none")
    data = Dataset.from_list([{"prompt": "37+48=", "chosen": "85", "rejected": "95$"}])
    config = trl.DPOConfig(tmp_path, **QUIET)
    trainer = trl.DPOTrainer(policy(), args=config, train_dataset=data, processing_class=tokenizer)
    row = trainer.train_dataset[0]
    assert [tokenizer.decode(row[f"{name}_ids"]) for name in ("chosen", "rejected")] == ["85$", "95$"]


def test_a_missing_padding_token_becomes_the_end_silently(convert, policy, tmp_path):
    said("A tokenizer without a padding token is given the end-of-sequence as one by TRL, silently")
    bare = transformers.PreTrainedTokenizerFast(
        tokenizer_object=convert["character_tokenizer"]().backend_tokenizer, eos_token="$"
    )
    assert bare.pad_token is None
    data = Dataset.from_dict({"prompt": ["37+48="] * 8})
    config = trl.GRPOConfig(tmp_path, **QUIET)
    trl.GRPOTrainer(policy(), lambda **kwargs: [], config, data, processing_class=bare)
    assert bare.pad_token == "$"


def test_strings_skip_the_chat_template_and_messages_do_not(grpo_trainer):
    said("A string goes to the model as it is; only a list of messages")
    trainer = grpo_trainer()
    trainer.processing_class.chat_template = "{% for m in messages %}1+1={{ m['content'] }}{% endfor %}"
    try:
        as_string, *_ = trainer._tokenize_prompts(["37+48="])
        as_messages, *_ = trainer._tokenize_prompts([[{"role": "user", "content": "37+48="}]])
    finally:
        trainer.processing_class.chat_template = None
    assert trainer.processing_class.batch_decode([as_string[0], as_messages[0]]) == ["37+48=", "1+1=37+48="]


def test_rloos_baseline_is_the_mean_of_the_others(policy, tokenizer, tmp_path):
    said("an answer's baseline is the mean reward of the OTHER answers of its group, there is no division by the std")

    def reward(completions, **kwargs):
        return [1.0, 0.0, 0.0, 0.5]

    groups = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    config = trl.RLOOConfig(tmp_path, **QUIET, **groups, beta=0.0)
    data = Dataset.from_dict({"prompt": ["37+48="]})
    trainer = trl.RLOOTrainer(policy(), reward, config, data, processing_class=tokenizer)
    batch = trainer._generate_and_score_completions(asked("37+48="))
    expected = torch.tensor([1 - 0.5 / 3, -1.5 / 3, -1.5 / 3, 0.5 - 1 / 3])
    torch.testing.assert_close(batch["advantages"], expected)


def kto_trainer(policy, tokenizer, tmp_path, batch):
    right, wrong = ({"prompt": "37+48=", "completion": text, "label": text == "85$"} for text in ("85$", "95$"))
    config = trl.KTOConfig(tmp_path, **QUIET, per_device_train_batch_size=batch)
    data = Dataset.from_list([right] * 6 + [wrong] * 2)
    return trl.KTOTrainer(policy(), policy(), args=config, train_dataset=data, processing_class=tokenizer)


def test_ktos_warning_and_its_refusal(policy, tokenizer, tmp_path, caplog):
    kto_trainer(policy, tokenizer, tmp_path, 8)
    warning = "EITHER desirable_weight in [0.33, 0.44] or undesirable_weight in [2.26, 3.0] (but NOT BOTH)"
    said(warning, "A batch of one row is refused")
    assert warning in caplog.text
    with pytest.raises(ValueError, match="batch size must be > 1"):
        kto_trainer(policy, tokenizer, tmp_path, 1)


@pytest.mark.parametrize(
    ("row", "changes", "more"),
    [
        ({"text": "37+48=85$"}, {"packing": True, "packing_strategy": "wrapped", "max_length": 10}, {}),
        ({"sum": "37+48=85$"}, {"dataset_text_field": "sum"}, {}),
        ({"q": "37+48=", "a": "85$"}, {}, {"formatting_func": lambda row: row["q"] + row["a"]}),
        ({"prompt": "37+48=", "completion": "85$"}, {}, {}),
    ],
)
def test_what_sft_takes(row, changes, more, policy, tokenizer, tmp_path):
    config = trl.SFTConfig(tmp_path, **QUIET, **changes)
    data = Dataset.from_list([row] * 20)
    trainer = trl.SFTTrainer(policy(), config, train_dataset=data, processing_class=tokenizer, **more)
    batch = next(iter(trainer.get_train_dataloader()))
    counted = (batch["labels"] != -100).sum(dim=1)
    assert batch["input_ids"].shape[1] == (10 if changes.get("packing") else 9)
    assert (counted == (3 if "completion" in row else batch["input_ids"].shape[1])).all()


# Several processes ----------------------------------------------------------------------------------------------------


def test_the_versions_of_vllm():
    low, high = re.search(r"TRL 1\.16 takes vLLM ([\d.]+) to ([\d.]+)\. ", FLAT).groups()
    wanted = next(line for line in metadata.requires("trl") if line.startswith("vllm"))
    assert f">={low}" in wanted and f"<={high}" in wanted


def test_the_command_that_replaces_trl_vllm_serve(monkeypatch):
    from trl.scripts import vllm_serve  # noqa: PLC0415  a script: imported where it is looked at

    ours = " ".join(
        re.search(r"^VLLM_SERVER_DEV_MODE=1 vllm serve MODEL (.*?)^```", TEXT, re.M | re.S).group(1).split()
    )
    monkeypatch.setattr(os, "execve", lambda *args: None)
    with pytest.warns(FutureWarning, match="will be removed in v2.0.0") as record:
        vllm_serve.main(vllm_serve.ScriptArguments(model="MODEL"))
    theirs = str(record[0].message)
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL" in theirs
    assert ours.replace("\\ ", "") in theirs


def test_the_vllm_settings_that_the_script_sets():
    settings = {"vllm_mode": "server", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 1024}
    config = trl.GRPOConfig("x", **QUIET, use_vllm=True, **settings)
    assert config.vllm_importance_sampling_correction
    assert next(f.default for f in dataclasses.fields(config) if f.name == "vllm_mode") == "colocate"


def test_the_configurations_that_ship_with_trl():
    for name in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2"):
        assert resources.files(trl).joinpath("accelerate_configs", f"{name}.yaml").is_file()


def test_what_shrinks_the_answers_sampled_at_once():
    def sizes(**changes):
        config = trl.GRPOConfig("x", **QUIET, **changes)
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return rows, config.generation_batch_size, config.gradient_accumulation_steps % config.steps_per_generation

    said("Set `generation_batch_size=32`: two rounds of sampling for one optimizer step")
    assert sizes(per_device_train_batch_size=8, gradient_accumulation_steps=8) == (64, 64, 0)
    assert sizes(per_device_train_batch_size=4, gradient_accumulation_steps=16) == (64, 64, 0)
    assert sizes(per_device_train_batch_size=8, gradient_accumulation_steps=8, generation_batch_size=32) == (64, 32, 0)


@pytest.fixture
def parameters() -> dict[str, tuple[int, int]]:
    """{size: (parameters, parameters of LoRA)}, of models that take no memory."""
    found = {}
    for name, sizes in test_guide.QWEN.items():
        config = transformers.Qwen2Config(
            vocab_size=sizes["vocab"],
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["mlp"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            tie_word_embeddings=sizes["tied"],
        )
        lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.device("meta"):
            model = transformers.Qwen2ForCausalLM(config)
            n = sum(weight.numel() for weight in model.parameters())
            adapted = peft.get_peft_model(model, lora)
        found[name] = n, sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    return found


def test_the_parameters_that_the_table_of_memory_counts(parameters):
    assert parameters == {name: test_guide.counts(**sizes) for name, sizes in test_guide.QWEN.items()}
