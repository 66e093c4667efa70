"""A tiny model, made on the spot, in place of the one that the guide's part 7 downloads; and what is changed for it."""
# ruff: noqa: PLC0415  what `guide.py --install` installs can only be imported afterwards

import contextlib
import io
from pathlib import Path

from guiding.document import GUIDE

GPU_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How part 7 is changed for the tiny model: {what stands in the guide, once: what is run}. Random weights never multiply
# right, so a second reward can be earned, by digits; at a rate at which six steps show it, and more would show no more.
EARNABLE = """\
def digit_share(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in texts]


untrained = {name: weight.clone() for name, weight in qwen.state_dict().items()}
"""
EARNED = """
earned = [row["rewards/digit_share/mean"] for row in trainer.state.log_history if "reward" in row]
assert len(earned) == QWEN_STEPS and earned[-1] > 4 * earned[0], f"the reward does not rise: {earned}"
moved = [name for name, weight in qwen.state_dict().items() if not torch.equal(weight, untrained[name])]
assert len(moved) == len(untrained), f"weights that stayed as they were: {set(untrained) - set(moved)}"
print("a reward that the tiny model can earn:", *(f"{share:.2f}" for share in earned))
"""
SUBSTITUTIONS = {
    f'MODEL = "{GPU_MODEL}"': "MODEL = {folder!r}",
    'QWEN_STEPS = int(os.environ.get("LAB_STEPS", "200"))': "QWEN_STEPS = 6",
    "    learning_rate=1e-6,": "    learning_rate=0.1,",
    "    reward_funcs=[correct],": "    reward_funcs=[correct, digit_share],",
    "trainer.train()\ntrainer.save_model": f"trainer.train(){EARNED}trainer.save_model",
    "args = GRPOConfig(\n    **qwen_task": f"{EARNABLE}args = GRPOConfig(\n    **qwen_task",
}


def tiny_qwen(folder: Path) -> None:
    """Save a Qwen2 of two layers with random weights, its tokenizer and its chat template to `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    pad, start, end = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ["What is 17 * 24?", "Work out the product step by step."],
        trainers.BpeTrainer(vocab_size=300, special_tokens=[pad, start, end], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=end, chat_template=CHAT_TEMPLATE, padding_side="left"
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def put_tiny_model(cells, folder: Path) -> None:
    """Make a tiny model in `folder`, and change part 7 so that it is trained. Raises ValueError where that fails."""
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tiny_qwen(folder)
    for old, new in SUBSTITUTIONS.items():
        places = [cell for cell in cells.cells if cell.cell_type == "code" and old in cell.source]
        if len(places) != 1 or places[0].source.count(old) != 1:
            raise ValueError(f"{GUIDE.name} must have {old!r} once, in a block")
        places[0].source = places[0].source.replace(old, new.replace("{folder!r}", repr(str(folder))))
