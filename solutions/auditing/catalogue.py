"""The whole catalogue, in the order of the table: mistakes, variations, combinations of mistakes."""

from auditing import task1, task2, task3, task4, task5
from auditing.entries import Combination, Entry, tasks

MISTAKES = [*task1.MISTAKES, *task2.MISTAKES, *task3.MISTAKES, *task4.MISTAKES, *task5.MISTAKES]
MISTAKES += [*task1.ONCE_PASSED, *task3.ONCE_PASSED, *task4.ONCE_PASSED, *task5.ONCE_PASSED]
VARIATIONS = [*task1.VARIATIONS, *task2.VARIATIONS, *task3.VARIATIONS, *task4.VARIATIONS, *task5.VARIATIONS]

# The first five pairs cancel each other when the tasks are graded together: a task's tests must grade it alone.
COMBINED = [
    ("advantages with the sign flipped", "loss not negated"),
    ("reversed ratio", "arguments of k3_kl swapped"),
    ("mask the wrong way round", "mask the wrong way round in the loss"),
    ("loss not negated", "gradient ascent on the loss"),
    ("repeat for repeat_interleave", "groups interleaved"),
    ("rewards shaped [P, G]", "advantages shaped [P, G]"),
    ("repeat for repeat_interleave", "mask drops the end-of-sequence"),
    ("greedy for sampling", "rewards as int64"),
    ("sample std", "mean over the batch"),
    ("max for min", "one average over all tokens of the batch"),
    ("KL with the wrong sign", "mask ignored"),
    ("beta dropped", "no clip"),
    ("old_logp recomputed inside the loop", "no zero_grad"),
    ("temperature missing from all log-probs", "one inner step, whatever inner_steps says"),
    ("k2 for k3", "old_logp refreshed after every step"),
    ("sample_group not written", "group_advantages not written", "k3_kl not written", "grpo_loss not written"),
    ("repeat for repeat_interleave", "view(G, -1) for view(-1, G)", "k3 negated", "loss not negated"),
]
BY_NAME = {mistake.name: mistake for mistake in MISTAKES}
COMBINATIONS = [Combination(tuple(BY_NAME[name] for name in names)) for names in COMBINED]
ENTRIES: list[Entry] = [*MISTAKES, *VARIATIONS, *COMBINATIONS]


def chosen(words: str, name: str | None) -> list[Entry]:
    """The entries whose "taskN name" holds all these words, in any case; with `name`, only the one of that name."""

    def fits(entry: Entry) -> bool:
        label = "".join(f"task{task} " for task in tasks(entry)) + entry.name
        return name in (None, entry.name) and all(word in label.lower() for word in words.lower().split())

    return [entry for entry in ENTRIES if fits(entry)]
