"""lab/files.py: whole files or none, and what may be replaced."""

import shutil
from pathlib import Path

import pytest
from helpers import TINY, names

import run
from lab.files import check_run, whole_file
from lab.flags import run_parser, settings_of
from lab.history import first_line


def test_folder_without_write_permission(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ValueError, match=r"cannot write to the folder .*Permission denied"):
        check_run(tmp_path / "clip.png", first_line([]))


def test_run_replaces_its_own_files_and_no_others(runs, tmp_path, monkeypatch):
    source, _ = runs["first"]
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)

    def check(*flags: str) -> None:
        args = run_parser().parse_args(flags)
        run.check(args, settings_of(args))

    first = [*TINY, "--solutions"]
    for same in (first, [*first, "--lr", "3e-4"], [*first, "--out", "grpo_tinylm.png"]):
        check(*same)
    for other in (TINY, [*first, "--seed", "1"], [*first, "--no-std"], []):  # TINY alone: another grpo.py
        with pytest.raises(ValueError, match=r"is there already.*--out"):
            check(*other)
    check(*first, "--seed", "1", "--out", "seed1.png")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["clip.png", "clip.csv", "clip.pt"])
@pytest.mark.parametrize("content", [b"", b"# run.py\n", b"\xff\xfe\x00 not text", b"a,b\n1,2\n"])
def test_foreign_file_is_never_replaced(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        check_run(tmp_path / "clip.png", first_line(settings_of(run_parser().parse_args([]))))
    assert (tmp_path / name).read_bytes() == content and names(tmp_path) == {name}


def test_folder_of_a_files_name_is_never_replaced(tmp_path):
    (tmp_path / "clip.csv").write_text("# run.py --G 4\n", encoding="utf-8")
    check_run(tmp_path / "clip.png", first_line(["--G 4"]))
    (tmp_path / "clip.pt").mkdir()
    with pytest.raises(ValueError, match=r"clip\.pt"):
        check_run(tmp_path / "clip.png", first_line(["--G 4"]))


def test_whole_file_leaves_all_or_nothing(tmp_path):
    path = tmp_path / "file.txt"
    with pytest.raises(KeyboardInterrupt), whole_file(path) as temporary:
        temporary.write_text("half", encoding="utf-8")
        assert not path.exists()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with whole_file(path) as temporary:
        temporary.write_text("first", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), whole_file(path) as temporary:
        temporary.write_text("ha", encoding="utf-8")
        raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == "first"  # the old file survives a failure
    with whole_file(path) as temporary:
        temporary.write_text("second", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "second"
    assert list(tmp_path.iterdir()) == [path]
