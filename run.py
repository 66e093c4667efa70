"""Train TinyLM with GRPO from the SFT checkpoint; save a plot, the metrics as CSV, and the trained checkpoint.

    python run.py                                                      the default run
    python run.py --G 2 --out pairs.png --versus grpo_tinylm.csv       an experiment, drawn beside an earlier run
    python run.py --redraw grpo_tinylm.csv pairs.csv --out both.png    earlier runs alone, without training
    python run.py --show 3                                             three groups to look at, again and again
    python run.py --seeds 3                                            three seeds: their mean, and how far they spread
    python run.py --explain 37+48=                                     one step, token by token, without training
    python run.py --help                                               every flag with its default

In order: checks before anything is trained, training, saving, and `work`, which you may read first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # -P and -I leave it out

from lab.flags import run_parser
from lab.start import begin

if __name__ == "__main__":  # before the imports that take seconds: a wrong flag is told at once
    PARSER = run_parser()
    ARGS = begin(PARSER)

import argparse
import copy
import gc
import math
from dataclasses import replace
from types import ModuleType

from tqdm import tqdm

import tinylm
from lab import explain
from lab.device import check_device
from lab.explained import PARTS_MARK, STEP_MARK, look
from lab.files import check_marked, check_run, files_of, free_name, lock_on, save_each
from lab.flags import Parser, settings_of
from lab.history import History, Run, first_line, print_table, read_csv, write_csv
from lab.pictures import MOST_RUNS, REDRAW_MARK, plot
from lab.start import find_grpo, load_grpo, outliving_readers, reason_and_status, stopped_by_signals, wants_reference
from lab.tasks import call_tasks, config_of, is_the_labs, watched_gradient
from lab.verifiers import verifying


def check(args: argparse.Namespace, settings: list[str]) -> list[Run]:
    """The earlier runs to draw. Raises ValueError, before anything is trained, if something will not do."""
    earlier = args.versus + args.redraw
    new = 0 if args.redraw else 1
    if new + len(earlier) > MOST_RUNS:
        raise ValueError(f"one picture holds {MOST_RUNS} runs at most")
    runs = [read_csv(path) for path in earlier]
    if args.redraw:
        check_marked(args.out, REDRAW_MARK)
        return runs
    if args.explain_parts is not None:
        check_marked(args.out, PARTS_MARK)
    elif not args.explain:
        check_run(args.out, first_line(settings))
    elif not args.text:
        check_marked(args.out, STEP_MARK)
    check_device(args.device)
    find_grpo(args.solutions)
    return runs


def train(grpo: ModuleType, model: tinylm.TinyLM, args: argparse.Namespace) -> tuple[list[History], int]:
    """Train `model` in place with the functions of `grpo`, and copies of it with further seeds. Returns the histories
    so far, one for each seed, and the exit status; tells on stderr why it stopped early.
    """
    config, start = config_of(grpo, args), copy.deepcopy(model)
    prompts = explain.shown_prompts(model, args.show, args.temperature) if args.show else None
    histories: list[History] = []

    def report(row: dict[str, float]) -> None:
        evaluated = "sampled_accuracy" in row
        line = f"iteration {row['iteration']} of {args.iters}"
        if args.seeds > 1:
            line += f", seed {config.seed}"
        if row["iteration"] > 0:
            (row["gradient"],) = norm
            if not math.isfinite(row["gradient"]):
                raise FloatingPointError(f"the gradient is not finite at iteration {row['iteration']}: lower --lr")
            metrics = f"reward {row['reward']:.2f}, KL {row['kl']:.3f}"
            line += f": {metrics}"
            bar.set_postfix_str(metrics, refresh=False)
            bar.update()
        histories[-1].append(row)
        if evaluated and (args.show or (bar.disable and row["iteration"] > 0)):
            accuracy = f"accuracy {row['sampled_accuracy']:.3f} sampled, {row['greedy_accuracy']:.3f} greedy"
            bar.write(f"{line}, {accuracy}")
        if evaluated and args.show:
            bar.write(explain.show_groups(grpo, policy, prompts, config, start))
        sys.stdout.flush()

    try:
        call_tasks(grpo, model)
        # `disable=None` switches the bar off where there is no terminal: there, `report` prints lines instead.
        with tqdm(total=args.iters * args.seeds, disable=None, leave=False) as bar, watched_gradient() as norm:
            for seed in range(args.seed, args.seed + args.seeds):
                policy = copy.deepcopy(start) if histories else model
                config = replace(config, seed=seed)
                histories.append([])
                grpo.train_grpo(policy, config, report)
        return histories, 0
    except (NotImplementedError, ValueError) as error:
        if not is_the_labs(error):
            raise
        print(error, file=sys.stderr)
    except FloatingPointError as error:
        print(f"run.py: {error}", file=sys.stderr)
    except KeyboardInterrupt as stop:
        if not histories or len(histories[0]) < 2:  # row 0 is the evaluation before training
            raise
        reason, status = reason_and_status(stop)
        done = f"iteration {max(0, len(histories[-1]) - 1)} of {args.iters}"
        done += f", seed {config.seed}" if args.seeds > 1 else ""
        print(f"run.py: stopped by {reason} after {done}", file=sys.stderr)
        return histories, status
    return histories, 2


def save(model: tinylm.TinyLM, runs: list[Run], out: Path, stopped: bool, trained: bool) -> bool:
    """Write the checkpoint if `trained`, the CSV of the first of the runs, and the plot of all. Returns whether all of
    them were written; says where each of them is.
    """
    picture, table, checkpoint = files_of(out)
    writers = {checkpoint: lambda path: tinylm.save_checkpoint(model, path)} if trained else {}
    writers |= {table: lambda path: write_csv(runs[0], stopped, path), picture: lambda path: plot(runs, path)}
    saved, remarks, problems = save_each(writers)
    if remarks or problems:
        could_not = f"could not save {', '.join(problems)}" if problems else ""
        print(f"run.py: {'; '.join(filter(None, [*remarks, could_not]))}", file=sys.stderr)
    print(f"saved {', '.join(map(str, saved)) or 'nothing'}" + ("" if trained else "; no checkpoint"))
    return not problems


def work(parser: Parser, args: argparse.Namespace) -> int:
    """Check, train, show, save. Returns the exit status."""
    settings = settings_of(args)
    try:
        earlier = check(args, settings)
    except ValueError as error:
        parser.error(str(error))
    if args.redraw:
        try:
            plot(earlier, args.out, REDRAW_MARK)
        except OSError as error:
            parser.error(f"could not save: {error}")
        print(f"saved {args.out}")
        return 0
    with verifying(args.verifier):
        grpo = load_grpo(find_grpo(args.solutions))
        if args.explain or args.explain_parts is not None:
            return look(grpo, args)
        gc.freeze()  # torch's objects are many, and stay: collecting garbage is quicker without going through them
        model = tinylm.load_or_train_sft().to(args.device)
        histories, status = train(grpo, model, args)
    histories = [history for history in histories if len(history) > 1]  # row 0 is the evaluation before training
    if not histories:
        return status
    stopped = len(histories) < args.seeds or len(histories[-1]) <= args.iters
    # A run that was stopped does not replace a whole one with the same settings.
    out = free_name(args.out) if stopped and args.out.exists() else args.out
    run = Run(out.stem, settings, histories[0], tuple(histories[1:]))
    print_table(run)
    trained = status != 2 or len(run.history) > args.iters  # 2: a last step spoilt the weights, if those of this seed
    whole = save(model, [run, *earlier], out, stopped, trained)
    return status if whole else 2


def main(parser: Parser, args: argparse.Namespace) -> int:
    """The command with its flags: alone on its files, and stopped by signals as by Ctrl-C. Returns the exit status."""
    args.solutions = args.solutions or (wants_reference() and not args.redraw)
    try:
        with lock_on(args.out), stopped_by_signals(), outliving_readers():
            return work(parser, args)
    except TimeoutError:  # of the lock
        parser.error(f"--out {args.out}: another run is writing these files: wait for it, or name this run otherwise")


if __name__ == "__main__":
    sys.exit(main(PARSER, ARGS))
