"""The experiments of the README's "Things to try": which runs they compare, their answers, and what these claim."""

from typing import NamedTuple

from lab.flags import run_parser, settings_of

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


def command(variant: str) -> str:
    """The command that a student runs for it."""
    changes = dict(VARIANTS[variant])
    estimator = changes.pop("kl", None)
    args = run_parser().parse_args([])
    default = settings_of(args)
    vars(args).update(changes)
    flags = " ".join(word for word in settings_of(args) if word not in default)
    return f"`run.py{' ' * bool(flags)}{flags}`" + (f", {estimator} in `k3_kl`" if estimator else "")
