"""The answer key: what each experiment of the README gives over several seeds, written to experiments.md.

    python solutions/experiments.py              everything that is missing, then solutions/experiments.md and pictures
    python solutions/experiments.py --seeds 20   more seeds; what is there already is not run again

A run is one variant of the settings with one seed, which is that of its starting policy and of GRPO alike. So the runs
of one seed begin at the same policy, and differences to the default are taken between those. A process per core; each
finished run is kept in solutions/experiments/runs/, so that the command, stopped and started again, goes on.

The key is written from the first half of the seeds. Every claim in an answer is an expression that is checked on the
other half, and on ten random halves of all, of which nine must bear it out: what one set of seeds happened to show is
no answer. The figures of all runs are kept in experiments/figures.json, from which a test checks the claims again.

In order: the experiments, one run, claims, tables and pictures, the command.
"""
# ruff: noqa: PLC0415  torch and matplotlib take seconds to import: only where they are needed, so that --help is quick

import copy
import hashlib
import json
import os
import random
import sys
import textwrap
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from measuring.calibration import LAST
from measuring.calibration import figures as measure

from lab.files import whole_file
from lab.flags import Parser, number, run_parser, settings_of
from lab.pictures import BLUE, KS, OTHERS, draw_band, save_figure, smooth

OUT = HERE / "experiments.md"
FOLDER = HERE / "experiments"  # the pictures, and the runs

# 1. The experiments ----------------------------------------------------------------------------------------------

# What differs from the default; "kl" is the estimator in the loss. The names appear in the answers below.
VARIANTS = {
    "default": {},
    "reuse": {"inner_steps": 8},
    "noclip": {"inner_steps": 8, "clip": 1000.0},
    "pairs": {"G": 2, "P": 64},
    "nostd": {"std": False},
    "noleash": {"beta": 0.0},
    "leash": {"beta": 0.5},
    "cold": {"temperature": 0.5},
    "slow": {"lr": 1e-4},
    "fast": {"lr": 1e-3},
    "G4": {"G": 4},
    "G16": {"G": 16},
    "P4": {"P": 4},
    "P64": {"P": 64},
    "long": {"iters": 1000},
    "k1": {"kl": "k1"},
    "k2": {"kl": "k2"},
    "k1_leash": {"kl": "k1", "beta": 0.5},
    "k2_leash": {"kl": "k2", "beta": 0.5},
    "fooled": {"verifier": "lenient"},
    "fooled_leash": {"verifier": "lenient", "beta": 0.5},
    "step": {"iters": 1},
}
COLUMNS = {  # in the tables: the key in an answer -> (heading, decimals)
    "sampled": ("sampled", 2),
    "greedy": ("greedy", 2),
    "entropy": ("entropy", 2),
    "zero": ("zero-signal", 2),
    "kl": ("KL", 2),
    "pass64": ("pass@64 - SFT", 3),
    "lowest": ("lowest sampled", 2),
    "train_kl": ("KL in training", 2),
    "clip": ("clip fraction", 3),
}
Figures = dict[str, dict[str, list[float]]]  # variant -> key -> a value for each seed
Means = dict[str, dict[str, float]]  # variant -> key -> mean over some of the seeds


class Experiment(NamedTuple):
    """One row of the README's "Things to try". {variant[key]} stands where a measured mean goes."""

    name: str
    title: str
    variants: list[str]  # beside the default
    tip: str  # for students who learn alone, folded away in the README: where to look
    numbers: str  # and, folded away below it, what to compare with
    answer: str
    hint: str  # for marking
    claims: list[str]  # what numbers and answer say, as Python expressions of the same names


EXPERIMENTS = [
    Experiment(
        "reuse",
        "Eight inner steps, with the clip and without",
        ["reuse", "noclip"],
        """
        Look at the first thirty iterations, not only at the end: how far can eight steps on one batch carry a
        policy if nothing stops it?
        """,
        """
        At iteration 10 greedy accuracy was {reuse[greedy10]:.2f} with the clip and {noclip[greedy10]:.2f}
        without, from {default[greedy_start]:.2f}.
        """,
        """
        Without the clip the policy follows each batch too far, at once: at iteration 10 its greedy accuracy is
        {noclip[greedy10]:.2f} where with the clip it is {reuse[greedy10]:.2f} (both began at
        {default[greedy_start]:.2f}), the mean KL of those ten iterations is {noclip[kl10]:.2f} instead of
        {reuse[kl10]:.2f}, and the sampled accuracy falls to {noclip[lowest]:.2f} before it recovers, where with the
        clip it never falls far below where it began ({reuse[lowest]:.2f}). By the end it has made up for much of that,
        not for all: {noclip[sampled]:.2f} sampled. Eight steps on a batch, clipped, end where two do or a little lower:
        {reuse[sampled]:.2f} against {default[sampled]:.2f}. More steps on the same samples are no more information.
        """,
        """
        Full marks for KL and greedy accuracy read off both pictures, with the early dent; an answer that compares only
        where the runs end has missed what the clip does.
        """,
        [
            "noclip['greedy10'] < reuse['greedy10'] - 0.05",
            "noclip['kl10'] > 1.5 * reuse['kl10']",
            "noclip['lowest'] < reuse['lowest'] - 0.03",
            "reuse['lowest'] > default['start'] - 0.05",
            "default['greedy_start'] < reuse['greedy10'] + 0.06",
            "reuse['sampled'] < default['sampled'] + 0.01",
            "noclip['sampled'] > noclip['lowest'] + 0.2",
            "noclip['sampled'] < reuse['sampled'] - 0.03",
        ],
    ),
    Experiment(
        "pairs",
        "Groups of two, as many samples",
        ["pairs"],
        """
        When are two answers to a problem of use? Work out the share of useless pairs for one problem that is
        answered right with probability p, then for p = 0, 0.5 and 1.
        """,
        """
        At the end {pairs[zero]:.2f} of the pairs were without signal, {default[zero]:.2f} of the groups of
        eight; sampled accuracy {pairs[sampled]:.2f} against {default[sampled]:.2f}.
        """,
        """
        A pair says something only if one answer is right and one wrong: without signal are p^2 + (1 - p)^2 of the pairs
        of a problem, averaged over the problems (at the mean of p the formula gives too little, for most problems are
        nearly always or nearly never solved). The mean over the held-out problems is {pairs[expected_zero]:.2f} at the
        end, and {pairs[zero]:.2f} were measured; with G = 8 it is {default[expected_zero]:.2f} and {default[zero]:.2f}.
        All the same the run does not learn less: sampled accuracy ends at {pairs[sampled]:.2f} against
        {default[sampled]:.2f}. There are four times as many groups, from four times as many problems, and what counts
        is how much signal a batch holds, not which share of its groups does.
        """,
        """
        The formula or an equal argument for the share is needed; so is the observation that the accuracy does not
        suffer. A student who predicts a loss from the share alone has stopped before looking.
        """,
        [
            "pairs['zero'] > default['zero'] + 0.2",
            "abs(pairs['zero'] - pairs['expected_zero']) < 0.06",
            "abs(default['zero'] - default['expected_zero']) < 0.1",
            "pairs['sampled'] > default['sampled'] - 0.02",
        ],
    ),
    Experiment(
        "nostd",
        "Mean only, as in Dr. GRPO",
        ["nostd"],
        """
        Compute |A| for one right answer of eight, and for four of eight, with the std and without. Which of the
        two groups does the division favour?
        """,
        """
        Sampled accuracy ended at {nostd[sampled]:.2f} without the std and {default[sampled]:.2f} with it, the
        KL in training (median) at {nostd[train_kl]:.3f} and {default[train_kl]:.3f}.
        """,
        """
        Dividing by the std makes groups louder whose rewards are nearly all equal: with one right answer of eight the
        std is 0.33, with four 0.5, so the very easy and the very hard problems gain by half. Here that hardly matters:
        {nostd[sampled]:.2f} sampled and {nostd[greedy]:.2f} greedy without the std, {default[sampled]:.2f} and
        {default[greedy]:.2f} with it. All advantages become two to three times smaller, which Adam, who divides by the
        size of the gradient, would undo, were it not for the KL term: beta stays as it is, and so weighs two to three
        times more against the reward. The KL in training is a little lower for it, {nostd[train_kl]:.3f} against
        {default[train_kl]:.3f} in the median.
        """,
        """
        The point is which groups: those near 0 or G right. 'All advantages get smaller' is true and worth half; with
        the KL term's weight, all of it.
        """,
        [
            "abs(nostd['sampled'] - default['sampled']) < 0.04",
            "abs(nostd['greedy'] - default['greedy']) < 0.04",
            "nostd['train_kl'] < default['train_kl']",
        ],
    ),
    Experiment(
        "louder",
        "Which problems the std makes louder",
        ["step"],
        """
        Which groups have rewards that are nearly all equal, and whose problems are they?
        """,
        """
        {step[extreme]:.2f} of the starting policy's groups with signal had one right answer of eight, or seven;
        theirs were {step[loud]:.2f} of all |A| with the std, {step[quiet]:.2f} without.
        """,
        """
        The very hard and the very easy ones. The std of a group with one right answer of eight, or seven, is 0.33, and
        0.5 with four: dividing makes |A| three times larger at the edges and twice in the middle. Without the std |A|
        itself says how much a group disagrees, 2p(1 - p) in the mean, most at p = 1/2. The groups at the edges are no
        rarity: {step[extreme]:.2f} of those with signal, when training begins, and theirs are {step[loud]:.2f} of all
        |A| with the std, {step[quiet]:.2f} without. So the std spends more of each step on problems that are nearly
        solved, or nearly hopeless; Dr. GRPO calls that a bias towards too easy and too hard questions.
        """,
        """
        Both ends are asked for. The mean |A| of a group, 2 sqrt(p(1 - p)) against 2p(1 - p), is worth a bonus.
        """,
        [
            "step['extreme'] > 0.15",
            "step['loud'] > 1.25 * step['quiet']",
        ],
    ),
    Experiment(
        "leash",
        "No leash, strong leash",
        ["noleash", "leash"],
        """
        Read KL and accuracy together, for all three. What would the leash be good for if the verifier could be
        fooled?
        """,
        """
        KL at the end {noleash[kl]:.2f}, {default[kl]:.2f} and {leash[kl]:.2f} for beta 0, 0.04 and 0.5; sampled
        accuracy {noleash[sampled]:.2f}, {default[sampled]:.2f} and {leash[sampled]:.2f}.
        """,
        """
        Without the KL term the run ends where the default does, {noleash[sampled]:.2f} against {default[sampled]:.2f},
        and not much further from the reference (KL {noleash[kl]:.2f} against {default[kl]:.2f}): 0.04 is a leash that
        hardly pulls. With 0.5 the policy stays closer, at {leash[kl]:.2f}, and pays with accuracy:
        {leash[sampled]:.2f}. A verifier that cannot be fooled makes the leash a cost without a benefit; with a learned
        reward it would be what keeps the policy from exploiting it.
        """,
        """
        Both runs must be compared with the default in KL and in accuracy; the last thought, why one wants a leash at
        all, is worth a bonus.
        """,
        [
            "leash['kl'] < default['kl'] - 0.02",
            "leash['sampled'] < default['sampled'] - 0.03",
            "abs(noleash['sampled'] - default['sampled']) < 0.04",
            "abs(noleash['kl'] - default['kl']) < 0.05",
        ],
    ),
    Experiment(
        "cold",
        "Temperature 0.5",
        ["cold"],
        """
        Which policy is it whose accuracy is plotted? Compare greedy accuracy, which does not depend on the
        temperature.
        """,
        """
        Without signal were {cold[zero]:.2f} of the groups at the end, {default[zero]:.2f} in the default run;
        greedy accuracy began at {cold[greedy_start]:.2f} and {default[greedy_start]:.2f}.
        """,
        """
        At temperature 0.5 the policy is sharper from the start, so the answers of a group agree more often: without
        signal are {cold[zero]:.2f} of the groups at the end, against {default[zero]:.2f}. Its sampled accuracy begins
        higher, at {cold[start]:.2f} instead of {default[start]:.2f}, before anything was learnt: that is the
        sharpening, and greedy accuracy, which no temperature changes, begins at {cold[greedy_start]:.2f} in both. A
        step of the same size in the logits is twice as large in logits / 0.5, so to be colder is also to have a higher
        learning rate, and the largest KL spike is larger: {cold[worst_kl]:.0f} nats against {default[worst_kl]:.0f} in
        the mean.
        """,
        """
        Wanted: more zero-signal groups, with the reason. Comparing the two sampled accuracies without noticing that
        they belong to different policies costs half.
        """,
        [
            "cold['zero'] > default['zero'] + 0.05",
            "cold['start'] > default['start'] + 0.05",
            "abs(cold['greedy_start'] - default['greedy_start']) < 0.001",
            "cold['worst_kl'] > default['worst_kl']",
        ],
    ),
    Experiment(
        "rate",
        "The learning rate, a third and three times",
        ["slow", "fast"],
        """
        Put the first twenty iterations of the fast run beside those of the default: which curves differ
        already?
        """,
        """
        At iteration 10 greedy accuracy was {fast[greedy10]:.2f} against {default[greedy10]:.2f}, the mean KL so
        far {fast[kl10]:.2f} against {default[kl10]:.2f}.
        """,
        """
        A third of the rate is slower and safe: {slow[sampled]:.2f} sampled after 300 iterations against
        {default[sampled]:.2f}. Three times the rate is too much, and several curves say so within ten iterations: the
        mean KL is {fast[kl10]:.2f} against {default[kl10]:.2f}, the clip fraction of the first thirty is
        {fast[clip]:.3f} against {default[clip]:.3f}, and greedy accuracy stands at {fast[greedy10]:.2f} where the
        default has {default[greedy10]:.2f}. The sampled accuracy ends at {fast[sampled]:.2f} on average, and far from
        the same on all seeds: the table's range tells how low the worst one ends.
        """,
        """
        The KL, the clip fraction and greedy accuracy are all early signs, and each earns full marks if it is read off
        the first iterations. Only the end of a curve is late, and half.
        """,
        [
            "slow['sampled'] < default['sampled'] - 0.02",
            "fast['kl10'] > 2 * default['kl10']",
            "fast['clip'] > 2 * default['clip']",
            "fast['greedy10'] < default['greedy10'] - 0.03",
            "fast['sampled'] < default['sampled'] - 0.05",
        ],
    ),
    Experiment(
        "group",
        "The group size",
        ["G4", "G16"],
        """
        Keep two axes apart: per iteration, and per answer sampled (G = 16 draws four times as many as G = 4).
        """,
        """
        Sampled accuracy after 300 iterations was {G4[sampled]:.2f}, {default[sampled]:.2f} and
        {G16[sampled]:.2f} for G = 4, 8 and 16.
        """,
        """
        Per iteration more answers are better: {G4[sampled]:.2f}, {default[sampled]:.2f} and {G16[sampled]:.2f} sampled
        for G = 4, 8 and 16, and the share of groups without signal falls from {G4[zero]:.2f} to {G16[zero]:.2f}. Per
        answer sampled that is dear: G = 16 draws twice as many as G = 8. More prompts in smaller groups do at least as
        well at an equal number of answers: 64 prompts with G = 2 end at {pairs[sampled]:.2f}.
        """,
        """
        Two axes are asked for, iterations and answers; an answer that keeps them apart is right even if it finds the
        difference too small to call.
        """,
        [
            "G4['sampled'] < default['sampled'] < G16['sampled']",
            "G16['zero'] < G4['zero']",
            "pairs['sampled'] > default['sampled'] - 0.02",
        ],
    ),
    Experiment(
        "prompts",
        "The number of prompts",
        ["P4", "P64"],
        """
        Four problems say little about the other 7,596: how far does a step that helps them hurt the rest?
        """,
        """
        Sampled accuracy ended at {P4[sampled]:.2f}, {default[sampled]:.2f} and {P64[sampled]:.2f} for 4, 16 and
        64 prompts.
        """,
        """
        Both change: with 4 prompts an iteration the curves jump and end low, at {P4[sampled]:.2f}, because a step then
        follows 32 answers to four problems and undoes part of what the others had; with 64 they are smooth and reach
        {P64[sampled]:.2f}, against {default[sampled]:.2f}. The number of optimizer steps is the same in all three, so
        what the larger batch buys is steps in a better direction, at four times the samples. Noise is not harmless:
        with the same rate, a noisier gradient ends lower, not merely less smoothly.
        """,
        """
        Whoever says that the noise goes first and the mean stays should be asked to look again at 4 prompts.
        """,
        [
            "P4['sampled'] < default['sampled'] - 0.05",
            "P64['sampled'] > default['sampled'] + 0.02",
        ],
    ),
    Experiment(
        "long",
        "A thousand iterations",
        ["long"],
        """
        Two things can stop it: too little signal, and steps too coarse for what is left to learn. Which curves
        show which?
        """,
        """
        Sampled accuracy after 1,000 iterations was {long[sampled]:.2f}, its best on the way {long[best]:.2f};
        after 300 {default[sampled]:.2f}.
        """,
        """
        It climbs on, but slowly: {long[sampled]:.2f} after 1,000 iterations against {default[sampled]:.2f} after 300.
        Two curves show why. The groups without signal: {long[zero]:.2f} of them teach nothing at the end, against
        {default[zero]:.2f} after 300. And the KL, whose spikes go with sudden losses of accuracy: the best evaluation
        on the way was {long[best]:.2f}. The rate is constant, and its noise limits what can be held as much as the
        missing signal limits what can be gained; a smaller rate towards the end would help.
        """,
        """
        The zero-signal curve or the KL spikes earn full marks, with a reason; entropy is accepted with one.
        """,
        [
            "long['sampled'] > default['sampled'] - 0.02",
            "long['zero'] > default['zero'] + 0.05",
            "long['best'] > long['sampled']",
        ],
    ),
    Experiment(
        "estimator",
        "k1 and k2 in the loss",
        ["leash", "k1_leash", "k2_leash", "k1", "k2"],
        """
        Differentiate k1, k2 and k3 with respect to logp. What is left of a gradient that is the same for every
        token, on average?
        """,
        """
        With beta 0.5 the KL ended at {k1_leash[kl]:.2f} (k1), {k2_leash[kl]:.2f} (k2) and {leash[kl]:.2f} (k3).
        """,
        """
        The gradient of k1 with respect to logp is 1 for every token, and the mean of a constant times the gradient of
        logp is zero (but for the weights 1/|o_i|, which make it favour longer answers a little): k1 in the loss is
        noise, not a leash, and with beta = 0.5 the KL ends at {k1_leash[kl]:.2f} where k3 holds it at {leash[kl]:.2f}.
        k2 does pull, more gently than k3: KL {k2_leash[kl]:.2f}; its gradient is that of the divergence itself, KL(pi
        || pi_ref), and k3's, 1 - u, is in the mean that of KL(pi_ref || pi). With beta = 0.04 the three cannot be told
        apart: {k1[sampled]:.2f}, {k2[sampled]:.2f} and {default[sampled]:.2f} sampled.
        """,
        """
        The gradient of k1 is the point; 'k1 can be negative' is true, but not the reason.
        """,
        [
            "k1_leash['kl'] > leash['kl'] + 0.03",
            "leash['kl'] < k2_leash['kl'] < k1_leash['kl']",
            "abs(k1['sampled'] - default['sampled']) < 0.05",
            "abs(k2['sampled'] - default['sampled']) < 0.05",
        ],
    ),
    Experiment(
        "fooled",
        "A verifier that can be fooled",
        ["fooled", "fooled_leash"],
        """
        Read the training reward and the accuracy together: which of the two does the policy see? And what has
        the leash to do with answers that the starting policy hardly ever gives?
        """,
        """
        The reward of the last 30 iterations was {fooled[reward]:.2f}, the sampled accuracy, which the strict
        verifier measures, {fooled[sampled]:.2f} (at its best, on the way, {fooled[best]:.2f}), the KL
        {fooled[kl]:.1f}; with beta 0.5 {fooled_leash[reward]:.2f}, {fooled_leash[sampled]:.2f} and
        {fooled_leash[kl]:.2f}. Try other seeds: not every one finds the hole.
        """,
        """
        It learns the reward, not the sum. At first it gets better at adding, up to {fooled[best]:.2f} sampled;
        then one of its rare answers with a leading zero, or without an end, is scored as right, stands out in a
        group of wrong ones, is pushed up, and soon all answers look so ("07$", "1011"): the reward goes on to
        {fooled[reward]:.2f}, as if all were well, while the accuracy falls to {fooled[sampled]:.2f}. Of all
        that training measures the KL says it most clearly, at {fooled[kl]:.1f} where the default run has
        {default[kl]:.2f}: the policy is far from any that adds. That is what the leash is for: with beta 0.5
        the KL stays at {fooled_leash[kl]:.2f} and the accuracy at {fooled_leash[sampled]:.2f}, at a lower
        reward. Whether a run finds the hole at all is a matter of chance, for it must first be sampled: some
        seeds never do.
        """,
        """
        Reward up while accuracy falls is the point, and that only a measure the policy is not trained on can tell. Full
        marks with the KL, or the leash, as the remedy. 'The verifier is wrong' is where the answer begins.
        """,
        [
            "fooled['reward'] > 0.85",
            "fooled['reward'] > fooled_leash['reward'] + 0.05",
            "fooled['sampled'] < default['sampled'] - 0.2",
            "fooled['best'] > fooled['sampled'] + 0.15",
            "fooled['kl'] > 5 * default['kl']",
            "fooled_leash['kl'] < fooled['kl'] - 0.5",
            "fooled_leash['sampled'] > fooled['sampled'] + 0.15",
        ],
    ),
    Experiment(
        "credit",
        "A right first digit in a wrong answer",
        ["step"],
        """
        Look for a wrong answer that begins with the right digit, and at the number in that cell; then add up
        the numbers on that digit over the whole column.
        """,
        """
        {step[first_right]:.2f} of the starting policy's wrong answers begin so. The push on that digit was
        {step[alone]:+.3f} in one such answer, and {step[together]:+.3f} over its group, in the mean.
        """,
        """
        In its own answer it is pushed down as hard as the wrong digit: the advantage belongs to the answer, every token
        gets it, and nothing says which one was wrong ({step[alone]:+.3f} in the mean; {step[first_right]:.2f} of the
        wrong answers begin with the right digit). But a token is pushed once for each answer that has it, from the same
        prompt. All right answers have this digit, too, and the advantages of a group sum to 0: over the group the push
        on it is that of the wrong answers that begin otherwise, turned round, {step[together]:+.3f} in the mean, and 0
        where all begin alike. It points down in only {step[down]:.3f} of the groups, where a wrong answer is shorter
        than the right one, so that 1/|o| gives its tokens more weight. The group sorts out what a single reward cannot.
        """,
        """
        'Pushed down with the rest' is half; the sum over the group, or the remark that right answers push the same
        digit up, is the other half.
        """,
        [
            "step['first_right'] > 0.6",
            "step['alone'] < 0",
            "step['together'] > 0",
            "step['down'] < 0.1",
        ],
    ),
    Experiment(
        "passk",
        "pass@k without a leash",
        ["noleash"],
        """
        Is the difference larger than its band?
        """,
        """
        In pass@64 the run without a leash was {noleash[pass64]:+.3f} from the starting policy, the default run
        {default[pass64]:+.3f}.
        """,
        """
        No: at k = 64 the run without a leash is {noleash[pass64]:+.3f} from the starting policy, the default run
        {default[pass64]:+.3f}. Both differences are about as large as their spread over seeds, and a leash of 0.04
        hardly differs from none. Answers are lost where a policy is moved violently, by three times the rate say
        ({fast[pass64]:+.3f}), not where the KL term is missing.
        """,
        """
        Accept any answer that compares the difference with the band in the picture and stops there.
        """,
        [
            "abs(noleash['pass64'] - default['pass64']) < 0.015",
            "fast['pass64'] < default['pass64'] - 0.01",
        ],
    ),
]


def one_line(text: str) -> str:
    """The text without its line breaks and indentation."""
    return " ".join(text.split())


def command(variant: str) -> str:
    """The command that a student runs for it."""
    changes = dict(VARIANTS[variant])
    estimator = changes.pop("kl", None)
    args = run_parser().parse_args([])
    default = settings_of(args)
    vars(args).update(changes)
    flags = " ".join(word for word in settings_of(args) if word not in default)
    return f"`run.py{' ' * bool(flags)}{flags}`" + (f", {estimator} in `k3_kl`" if estimator else "")


# 2. One run ------------------------------------------------------------------------------------------------------


def estimators() -> dict:
    """Other estimators of KL(pi || pi_ref) to put into `k3_kl`: functions of logp and ref_logp [N, Tr]."""
    return {
        "k1": lambda logp, ref_logp: logp - ref_logp,
        "k2": lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2,
    }


def kinds(prompts) -> dict[str, list[int]]:
    """Which of the problems [P, Tp] are of which kind."""
    import tinylm

    rows = {"no carry, two digits": [], "carry, two digits": [], "three digits": []}
    for i, text in enumerate(tinylm.decode(prompts)):
        left, right = map(int, text.rstrip("=").split("+"))
        carry = left % 10 + right % 10 > 9
        kind = "three digits" if left + right > 99 else "carry, two digits" if carry else "no carry, two digits"
        rows[kind].append(i)
    return rows


def mistake(right: int, text: str) -> str:
    """The name of what is wrong with an answer; "" if it is right."""
    if not text.endswith("$") or not text[:-1].isdecimal() or text[:-1] != str(int(text[:-1])):
        return "not a number, or not ended"
    difference = int(text[:-1]) - right
    names = {0: "", -10: "10 too small", 10: "10 too large", -100: "100 too small", 100: "100 too large"}
    if difference in names:
        return names[difference]
    return "off by 1" if abs(difference) == 1 else "off by 9 or 11" if abs(difference) in (9, 11) else "other"


def anatomy(model, samples: int = 32) -> dict[str, dict[str, float]]:
    """What the policy answers on the held-out problems: exact accuracy by kind, and the share of each mistake."""
    import torch

    import tinylm

    _, prompts = tinylm.problems()
    p = tinylm.success_probability(model, prompts)
    rows = prompts.repeat_interleave(samples, dim=0)
    texts = tinylm.decode_and_strip_padding(tinylm.generate(model, rows, generator=torch.Generator().manual_seed(0)))
    rights = [int(text.rstrip("$_")) for text in tinylm.decode(tinylm.answers(rows))]
    counts = Counter(mistake(right, text) for right, text in zip(rights, texts, strict=True))
    return {
        "kinds": {kind: p[numbers].mean().item() for kind, numbers in kinds(prompts).items()},
        "mistakes": {name: times / len(texts) for name, times in counts.items() if name},
    }


def kl_to(sft, model, temperature: float, samples: int = 16) -> float:
    """The mean k3 over the tokens that `model` samples on the held-out problems: KL(model || sft), nats per token.

    The runs' own "kl" will not do: it is what the loss uses, which may be k1 or k2.
    """
    import torch

    import grpo
    import tinylm

    _, prompts = tinylm.problems()
    rows = prompts.repeat_interleave(samples, dim=0)
    responses = tinylm.generate(model, rows, temperature, torch.Generator().manual_seed(1))
    mask = tinylm.response_mask(responses)
    with torch.no_grad():
        logp, ref_logp = (tinylm.token_logp(policy, rows, responses, temperature) for policy in (model, sft))
    return ((grpo.k3_kl(logp, ref_logp) * mask).sum() / mask.sum()).item()


def ahead(sft, model) -> list[float]:
    """The exact pass@k of `model` less that of `sft`, for k from 1 to 64."""
    import tinylm

    _, prompts = tinylm.problems()
    wrong, wrong_sft = (1 - tinylm.success_probability(policy, prompts).double() for policy in (model, sft))
    return [(wrong_sft**k - wrong**k).mean().item() for k in range(1, 65)]


def one_step(sft, groups: int = 8) -> dict[str, float]:
    """What the first step does, from `groups` groups to each held-out problem.

    Right first digits, "first_right": the share of the wrong answers that begin with the right digit. In the groups in
    which there is such an answer beside a right one, "alone": the mean push on the digit in one such answer,
    "together": that over the group, "down": the share of the groups in which that points down.

    Of the groups with signal, "extreme": the share in which 1 or G - 1 answers are right; "loud" and "quiet": the share
    of all |A| that is theirs, with the std and without.
    """
    import torch

    import grpo
    import tinylm
    from lab.explain import look

    _, prompts = tinylm.problems()
    config = grpo.GRPOConfig()
    prompts = prompts.repeat_interleave(groups, dim=0)
    samples = grpo.sample_group(sft, prompts, config.G, generator=torch.Generator().manual_seed(0))
    advantages = grpo.group_advantages(samples.rewards, config.G)
    with torch.no_grad():
        logp = tinylm.token_logp(sft, samples.prompts, samples.responses)
    first = look(grpo, logp, logp, logp, advantages, samples.mask, config).gradient[:, 0].view(-1, config.G)
    first = len(prompts) * first  # as if each group were a batch of its own
    right = (samples.responses[:, 0] == tinylm.answers(samples.prompts)[:, 0]).view(-1, config.G)
    wrong = (samples.rewards == 0).view(-1, config.G)
    some = (right & wrong).any(dim=1) & ~wrong.all(dim=1)
    added_up = (first * right).sum(dim=1)[some]
    times = wrong.sum(dim=1)
    extreme = (times == 1) | (times == config.G - 1)
    sizes = [grpo.group_advantages(samples.rewards, config.G, std).abs().view(-1, config.G) for std in (True, False)]
    loud, quiet = ((size[extreme].sum() / size.sum()).item() for size in sizes)
    return {
        "first_right": (right & wrong).sum().item() / wrong.sum().item(),
        "down": (added_up < -1e-6).float().mean().item(),
        "alone": first[right & wrong & some.unsqueeze(1)].mean().item(),
        "together": added_up.mean().item(),
        "extreme": extreme.sum().item() / ((times > 0) & (times < config.G)).sum().item(),
        "loud": loud,
        "quiet": quiet,
    }


def path_of(variant: str, seed: int) -> Path:
    return FOLDER / "runs" / f"{variant}_{seed}.json"


def policy_of(seed: int) -> Path:
    return FOLDER / "runs" / f"sft_{seed}.pt"


def origin(variant: str) -> dict:
    """What a run's result depends on beside its seed: kept with it, so that an outdated one is run again."""
    files = [HERE / "grpo.py", HERE.parent / "tinylm.py"]
    files += [HERE.parent / "lab" / "verifiers.py"] if "verifier" in VARIANTS[variant] else []
    code = b"".join(path.read_bytes() for path in files)
    return {"changes": VARIANTS[variant], "code": hashlib.sha256(code).hexdigest()}


def run_one(job: tuple[str, int]) -> None:
    """Train, measure, and keep the result."""
    import grpo
    import tinylm
    from lab.verifiers import verifying

    variant, seed = job
    changes = dict(VARIANTS[variant])
    sft = tinylm.load_checkpoint(policy_of(seed))
    model = copy.deepcopy(sft)
    k3_kl = grpo.k3_kl
    try:
        grpo.k3_kl = estimators().get(changes.pop("kl", None), k3_kl)
        with verifying(changes.pop("verifier", "strict")):
            config = grpo.GRPOConfig(seed=seed, **changes)
            history = grpo.train_grpo(model, config)
    finally:
        grpo.k3_kl = k3_kl
    measured = measure(sft, model, history) | {"k3 KL after, nats per token": kl_to(sft, model, config.temperature)}
    result = origin(variant) | {"figures": measured, "history": history, "ahead": ahead(sft, model)}
    if variant == "step":
        result["one_step"] = one_step(sft)
    if variant == "default":
        result |= {"before": anatomy(sft), "after": anatomy(model)}
    with whole_file(path_of(variant, seed)) as temporary:
        temporary.write_text(json.dumps(result), encoding="utf-8")


def train_policy(seed: int) -> None:
    """Train the starting policy of a seed. One that is there may be of older code, and takes only seconds."""
    import tinylm

    tinylm.save_checkpoint(tinylm.train_sft(seed), policy_of(seed))


def is_there(variant: str, seed: int) -> bool:
    """Whether the run is there, whole, and of the variant and the code as they are now."""
    try:
        result = json.loads(path_of(variant, seed).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(result, dict) and result.items() >= origin(variant).items()


# 3. Figures and claims -------------------------------------------------------------------------------------------


def read(variant: str, seeds: int) -> list[dict]:
    """The results of a variant, seed by seed."""
    return [json.loads(path_of(variant, seed).read_text(encoding="utf-8")) for seed in range(seeds)]


def figures_of(result: dict) -> dict[str, float]:
    """The figures of one run under the names that the answers use; those of COLUMNS, and of the way there."""
    history, measured = result["history"], result["figures"]
    evaluated = [row for row in history if "entropy" in row]
    kl = [row["kl"] for row in history[1:]]
    tenth = next(row for row in evaluated if row["iteration"] >= min(10, history[-1]["iteration"]))
    return {
        "sampled": measured["sampled accuracy after"],
        "greedy": measured["greedy accuracy after"],
        "entropy": measured["entropy after, nats per token"],
        "zero": measured[f"zero-signal groups, last {LAST} iterations"],
        "kl": measured["k3 KL after, nats per token"],
        "pass1": measured["pass@1, GRPO - SFT"],
        "pass64": measured["pass@64, GRPO - SFT"],
        "lowest": min(row["sampled_accuracy"] for row in evaluated),
        "train_kl": median(kl),
        "clip": fmean(row["clip_fraction"] for row in history[1:][:LAST]),
        "start": evaluated[0]["sampled_accuracy"],
        "greedy_start": evaluated[0]["greedy_accuracy"],
        "sampled10": tenth["sampled_accuracy"],
        "greedy10": tenth["greedy_accuracy"],
        "kl10": fmean(kl[:10]),
        "best": max(row["sampled_accuracy"] for row in evaluated),
        "expected_zero": evaluated[-1]["expected_zero_signal"],
        "worst_kl": max(kl),
        "reward": fmean(row["reward"] for row in history[1:][-LAST:]),
    } | result.get("one_step", {})


def all_figures(results: dict[str, list[dict]]) -> Figures:
    """Of all variants, each figure as a list over the seeds."""
    rows = {variant: [figures_of(result) for result in runs] for variant, runs in results.items()}
    return {variant: {key: [row[key] for row in of_it] for key in of_it[0]} for variant, of_it in rows.items()}


def means_of(figures: Figures, seeds: list[int]) -> Means:
    """The means over some of the seeds, under the names that the answers use."""
    return {
        variant: {key: fmean(values[seed] for seed in seeds) for key, values in keys.items()}
        for variant, keys in figures.items()
    }


def true_of(claim: str, means: Means) -> bool:
    """Whether these means bear the claim out."""
    return bool(eval(claim, {"__builtins__": {"abs": abs, "min": min, "max": max}}, means))


def halves(seeds: int) -> list[list[int]]:
    """Ten halves of the seeds: five random ways to cut them in two, always the same."""
    generator, found = random.Random(0), []
    for _ in range(5):
        order = generator.sample(range(seeds), seeds)
        found += [sorted(order[: seeds // 2]), sorted(order[seeds // 2 :])]
    return found


def support(claim: str, figures: Figures) -> tuple[bool, int]:
    """(whether the half of the seeds bears it out that the key is not written from, how many of ten halves do)."""
    seeds = len(figures["default"]["sampled"])
    fresh = true_of(claim, means_of(figures, list(range(seeds // 2, seeds))))
    return fresh, sum(true_of(claim, means_of(figures, half)) for half in halves(seeds))


def tips(figures: Figures) -> dict[str, str]:
    """The tip to each experiment, and below it the numbers, as they stand in the README, each folded away."""
    half = len(figures["default"]["sampled"]) // 2
    means = means_of(figures, list(range(half)))
    found = {}
    for experiment in EXPERIMENTS:
        tip, numbers = (
            textwrap.fill(one_line(text).format(**means), 120, break_on_hyphens=False)
            for text in (experiment.tip, experiment.numbers)
        )
        inner = f"<details><summary>Numbers to compare with</summary>\n\n{numbers}\n\n</details>"
        found[experiment.name] = f"<details><summary>{experiment.title}</summary>\n\n{tip}\n\n{inner}\n</details>\n"
    return found


def unsupported(figures: Figures) -> list[str]:
    """What is wrong with the claims, a line for each that too few halves bear out."""
    lines = []
    for experiment in EXPERIMENTS:
        for claim in map(one_line, experiment.claims):
            fresh, of_ten = support(claim, figures)
            if not fresh or of_ten < 9:
                lines.append(f"{experiment.name}: {claim}: on the fresh half {fresh}, on {of_ten} of ten halves")
    return lines


# 4. Tables and pictures ------------------------------------------------------------------------------------------


def cell(values: list[float], decimals: int, sign: str = "") -> str:
    """The mean and, in brackets, the lowest and the highest."""
    mean, low, high = (f"{value:{sign}.{decimals}f}" for value in (fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def table(variants: list[str], figures: Figures) -> list[str]:
    """Markdown: a line for each variant; last the difference to the default run, seed by seed."""
    headings = [heading for heading, _ in COLUMNS.values()]
    lines = [f"| run | {' | '.join(headings)} | sampled - default |", "|---" * (len(headings) + 2) + "|"]
    for variant in variants:
        cells = [cell(figures[variant][key], decimals) for key, (_, decimals) in COLUMNS.items()]
        pairs = zip(figures[variant]["sampled"], figures["default"]["sampled"], strict=True)
        cells.append("" if variant == "default" else cell([one - other for one, other in pairs], 2, "+"))
        lines.append(f"| {command(variant)} | {' | '.join(cells)} |")
    return lines


def curves_of(results: list[dict]) -> list[tuple[list[float], list[list[float]]]]:
    """(iterations, a curve for each seed) of the five panels."""
    histories = [result["history"] for result in results]
    evaluated = [row["iteration"] for row in histories[0] if "entropy" in row]
    trained = [row["iteration"] for row in histories[0][1:]]
    return [
        (trained, [smooth([row["reward"] for row in h[1:]]) for h in histories]),
        (evaluated, [[h[i]["sampled_accuracy"] for i in evaluated] for h in histories]),
        (evaluated, [[h[i]["greedy_accuracy"] for i in evaluated] for h in histories]),
        (trained, [smooth([row["kl"] for row in h[1:]], median) for h in histories]),
        (trained, [smooth([row["all_right"] + row["all_wrong"] for row in h[1:]]) for h in histories]),
    ]


def picture(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """A row of panels for each variant, beside the default run in its blue."""
    figure = Figure(figsize=(17, 0.6 + 2.6 * len(variants)), layout="constrained")
    rows = figure.subplots(len(variants), 5, squeeze=False)
    names = ("Training reward", "Sampled accuracy", "Greedy accuracy", "KL, nats per token, median of 21")
    names += ("Groups without signal",)
    tops = [1.0, 1.0, 1.0, 0.05, 1.0]
    for row, variant in zip(rows, variants, strict=True):
        default = curves_of(results["default"])
        for i, (panel, (x, seeds)) in enumerate(zip(row, curves_of(results[variant]), strict=True)):
            draw_band(panel, *default[i], BLUE)
            draw_band(panel, x, seeds, OTHERS[0])
            tops[i] = max(tops[i], min(1.0, 1.1 * max(map(max, seeds)))) if i == 3 else 1.0
            panel.set_title(names[i], loc="left", fontsize=9)
            panel.grid(alpha=0.25)
        row[0].set_ylabel(command(variant).replace("`", "").replace("run.py ", "").replace(" --", "\n--"), fontsize=8)
    for row in rows:
        for panel, top in zip(row, tops, strict=True):
            panel.set_ylim(0, top)
    for panel in rows[-1]:
        panel.set_xlabel("iteration")
    figure.suptitle(
        "lines: means over the seeds; bands: from the lowest to the highest; blue: the default run", fontsize=9
    )
    save_figure(figure, path, dpi=80)


def picture_of_passk(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """GRPO - SFT in pass@k, a panel for each variant beside the default run in its blue."""
    figure = Figure(figsize=(7 * len(variants), 4.2), layout="constrained")
    panels = figure.subplots(1, len(variants), squeeze=False)[0]
    k = list(range(1, 65))
    for panel, variant in zip(panels, variants, strict=True):
        for name, colour in (("default", BLUE), (variant, OTHERS[0])):
            seeds = [[100 * value for value in result["ahead"]] for result in results[name]]
            draw_band(panel, k, seeds, colour, command(name).replace("`", ""))
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(KS, [str(number) for number in KS])
        panel.set_yscale("asinh", linear_width=0.5)
        panel.set_yticks(ticks := [-10, -3, -1, -0.3, 0, 0.3, 1, 3, 10, 30], [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set(xlabel="k", ylabel="GRPO - SFT in pass@k, points (stretched near 0)")
        panel.set_title("lines: means over the seeds; bands: from the lowest to the highest", loc="left", fontsize=9)
        panel.legend(frameon=False, fontsize=8)
        panel.grid(alpha=0.25)
    save_figure(figure, path, dpi=80)


def picture_of_step(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """One step on 37+48=, from the starting policy of seed 0."""
    import grpo
    import tinylm
    from lab.explain import explain_step
    from lab.explained import draw_step

    config = grpo.GRPOConfig()
    draw_step(explain_step(grpo, tinylm.load_checkpoint(policy_of(0)), tinylm.encode(["37+48="]), config), config, path)


def picture_of_advantages(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """|A| against the number of right answers, with the std and without."""
    import grpo
    from lab.explained import draw_parts
    from lab.parts import each_part

    draw_parts(*each_part(grpo, [2], G=8, clip=0.2), path)


# Of these experiments; of the others: picture.
DRAWN = {"passk": picture_of_passk, "credit": picture_of_step, "louder": picture_of_advantages}


def anatomy_tables(runs: list[dict]) -> list[str]:
    """Markdown: what the default run did to the answers, by kind of problem and by mistake; means over the seeds."""
    lines = []
    for title, name in (("kind of problem: sampled accuracy", "kinds"), ("mistake: share of all answers", "mistakes")):
        lines += ["", f"| {title} | before | after |", "|---|---|---|"]
        rows = {row for run in runs for when in ("before", "after") for row in run[when][name]}
        mean = {
            row: [fmean(run[when][name].get(row, 0.0) for run in runs) for when in ("before", "after")] for row in rows
        }
        for row, values in sorted(mean.items(), key=lambda item: -item[1][0]):
            lines.append(f"| {row} | {values[0]:.3f} | {values[1]:.3f} |")
    return lines


INTRO = """# The answer key

Written by `python solutions/experiments.py` from {half} seeds, each figure as the mean (lowest to highest). Every claim
of an answer was checked on {half} other seeds, and on ten random halves of all, of which at least nine bear it out.

A seed is that of the starting policy and of GRPO alike, so the runs of one seed begin at the same policy; the last
column of a table is the difference to the default run, seed by seed. The KL is the mean k3, in nats per token, of the
trained policy on the held-out problems; "KL in training" the median over all iterations of what the loss uses. The
share of groups without signal is that of the last {last} iterations, the clip fraction that of the first {last};
"lowest sampled" is that of all evaluations.

## The default run
"""


def write(seeds: int) -> list[str]:
    """Write experiments.md, its pictures and the figures. Returns what is wrong with the claims."""
    results = {variant: read(variant, seeds) for variant in VARIANTS}
    figures = all_figures(results)
    half = seeds // 2
    written = {variant: {key: values[:half] for key, values in keys.items()} for variant, keys in figures.items()}
    drawn = {variant: runs[:half] for variant, runs in results.items()}
    means = means_of(figures, list(range(half)))
    lines = [*INTRO.format(half=half, last=LAST).splitlines(), *table(["default"], written)]
    lines += [*anatomy_tables(drawn["default"]), ""]
    for experiment in EXPERIMENTS:
        image = FOLDER / f"{experiment.name}.png"
        DRAWN.get(experiment.name, picture)(experiment.variants, drawn, image)
        lines += [f"## {experiment.title}", "", *table(experiment.variants, written), ""]
        lines += [f"![{experiment.title}]({image.relative_to(HERE).as_posix()})", ""]
        for text in (one_line(experiment.answer).format(**means), f"*Marking:* {one_line(experiment.hint)}"):
            lines += [textwrap.fill(text, 120, break_on_hyphens=False), ""]
    with whole_file(OUT) as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    rounded = {v: {key: [round(x, 4) for x in values] for key, values in keys.items()} for v, keys in figures.items()}
    with whole_file(FOLDER / "figures.json") as temporary:
        rows = [f"{json.dumps(variant)}: {json.dumps(keys)}" for variant, keys in rounded.items()]
        temporary.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return unsupported(figures)


# 5. The command --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run what is missing, then write. Returns the exit status: 1 if a claim does not hold."""
    parser = Parser(description="Run every experiment of the README over seeds, and write the answer key.")
    parser.flag("--seeds", 10, number(int, 2, 1000), "seeds 0 to N-1: half to write the key, half to check it")
    parser.flag("--jobs", os.cpu_count(), number(int, 1, 1000), "processes")
    args = parser.parse_args()

    import multiprocessing

    from tqdm import tqdm

    try:
        (FOLDER / "runs").mkdir(parents=True, exist_ok=True)
        jobs = [(variant, seed) for seed in range(args.seeds) for variant in VARIANTS if not is_there(variant, seed)]
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            pool.map(train_policy, sorted({seed for _, seed in jobs}), chunksize=1)
            for _ in tqdm(pool.imap_unordered(run_one, jobs), total=len(jobs), unit="run", disable=None):
                pass
        failed = write(args.seeds)
    except OSError as error:
        parser.error(f"cannot write: {error}")
    for line in failed:
        print(line, file=sys.stderr)
    print(f"saved {OUT.name} and {len(EXPERIMENTS)} pictures")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
