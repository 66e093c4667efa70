"""lab/flags.py: what run.py's flags are, what is refused, and how quickly."""

from dataclasses import fields

import pytest
from helpers import LAB, TINY, assert_one_line, finish, names, start

from lab.flags import run_parser


def test_flags_are_the_fields_of_the_config(reference):
    flags = vars(run_parser().parse_args([]))
    config = {field.name: field.default for field in fields(reference.GRPOConfig)}
    others = ("device", "out", "solutions", "show", "versus", "redraw", "seeds", "verifier")
    others += ("explain", "explain_parts", "text")
    assert {name: flags[name] for name in flags if name not in others} == config
    given = "--iters 1 --prompts 2 --G 3 --inner-steps 4 --lr 5 --clip 1000 --beta 7 --no-std --temperature 8 --seed 9"
    changed = vars(run_parser().parse_args([*given.split(), "--eval-every", "11"]))
    assert all(changed[name] != default for name, default in config.items()), "a flag does not reach its field"


def test_help_gives_every_default_and_imports_no_torch(tmp_path, no_torch, reference):
    result = finish(start(tmp_path, LAB / "run.py", "--help", PYTHONPATH=no_torch))
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.partition("--help ")[2].split())
    for field in fields(reference.GRPOConfig):
        flag = {"std": "no-std", "P": "prompts N"}.get(field.name, f"{field.name.replace('_', '-')} N")
        default = "divide" if field.name == "std" else field.default
        assert f"(default: {default})" in text.partition(f" --{flag} ")[2].partition(" --")[0], flag
    assert "RL_SOLUTIONS=1" in text and "current folder" in text


@pytest.mark.parametrize(
    "flags",
    [
        *("--iters 0", "--iters 1.5", "--iters many", "--prompts 0", "--inner-steps 0", "--eval-every 0"),
        *("--G 0", "--no-std --G 1", "--lr 0", "--lr -0.1", "--lr nan", "--lr inf", "--beta -0.04", "--beta inf"),
        *("--clip 0", "--clip -1", "--clip nan", "--temperature 0", "--temperature -1", "--temperature nan"),
        *("--seed -1", "--seed 9223372036854775808", "--unknown 1", "--iter 3", "stray"),
    ],
)
def test_bad_flag_is_one_line_before_torch_is_imported(tmp_path, no_torch, flags):
    (tmp_path / "file").touch()
    result = finish(start(tmp_path, LAB / "run.py", "--solutions", *flags.split(), PYTHONPATH=no_torch))
    assert_one_line(result, "run.py: ", " ".join(flags.split()[-2:-1]))
    assert (names(tmp_path), result.stdout) == ({"file"}, "")


@pytest.mark.parametrize("flags", ["--clip 1000", "--beta 0", "--G 2", "--temperature 0.5", "--lr 1e-9"])
def test_unusual_flag_is_accepted(flags):
    name, value = flags.split()
    assert vars(run_parser().parse_args([name, value]))[name[2:]] == float(value)


@pytest.mark.parametrize(
    "out",
    [
        *("clip", "clip.txt", "clip.csv", "run.py", ".png", "missing/clip.png", "file/clip.png", f"{'x' * 300}.png"),
        *("tinylm_sft.png", "TinyLM_SFT.svg", "passk.png", "tinylm_grpo.png"),
    ],
)
def test_a_name_that_will_not_do_is_one_line(call, tmp_path, out):
    (tmp_path / "file").touch()
    assert_one_line(call("--out", out), f"run.py: --out {out}: ")
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta", ""])
def test_device_that_is_not_there_is_one_line(call, tmp_path, device):
    assert_one_line(call(*TINY, "--device", device), f"--device {device}")
    assert names(tmp_path) == set()


def test_solutions_that_are_not_there_are_one_line(tmp_path, own_lab):
    for flags, extra in ((["--solutions"], {}), ([], {"RL_SOLUTIONS": "1"})):
        result = finish(start(tmp_path, own_lab / "run.py", *flags, **extra))
        assert_one_line(result, "solutions/grpo.py")
