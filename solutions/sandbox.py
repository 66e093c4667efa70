"""The process in which one submission is graded. `grade.py` starts it, names the tests, and reads what it signs.

The tests and the student's code share this interpreter, so nothing here is a wall. What it does is refuse what no
solution needs (processes, threads, signals, sockets, other people's files, frames), notice what was replaced, and keep
the way from the end of a test to the signed reply short. Only a container does the rest: README.md says what that is.

There is no class in this file, for `object.__subclasses__()` would lead to it. The state stands in two SimpleNamespaces
which nothing leads to that the student's code could find (a test looks).

    grade.py -> here   a line of JSON per test: {"nonce", "test", "wrong"}; the first line is the configuration
    here -> grade.py   "nonce kind changed refused message signature", the texts in hexadecimal. The kinds: "ready";
                       "imported" or "broken", once, when the student's module was loaded; "passed" or "failed"
"""
# ruff: noqa: PLC0415  torch, numpy and pytest are imported under the sandbox's own sys.path

import builtins
import functools
import hashlib
import importlib
import json
import operator
import os
import signal
import sys
import types
from pathlib import Path

FILE_SIZE, WRITES = 16 * 2**20, 100  # bytes to which a file may grow; how often files may be opened for writing
SAMPLES = ("prompts", "responses", "mask", "rewards", "texts")
# Here nothing at all may change.
LAB_MODULES = "flags start inputs examine diagnose"
LAB_MODULES += " diagnose.samples diagnose.advantages diagnose.k3 diagnose.loss diagnose.symptoms"
STRICT = ("tinylm", "test_grpo", "conftest", "lab", "lab.diagnose.step", *(f"lab.{m}" for m in LAB_MODULES.split()))
CRITICAL = (*STRICT, "builtins", "math", "statistics", "torch", "torch.nn.functional", "torch.testing")
# pytest's own plugins that grading does not need; several keep its configuration where a student's code could find it.
WITHOUT = """assertion cacheprovider debugging doctest faulthandler junitxml legacypath logging pastebin threadexception
             unittest unraisableexception warnings"""

# 1. What is refused: an audit hook, which Python code cannot take off ------------------------------------------------

FORBIDDEN = """os.exec os.fork os.forkpty os.kill os.killpg os.link os.posix_spawn os.spawn os.startfile os.symlink
    os.system subprocess.Popen pty.spawn signal.pthread_kill sys.addaudithook sys.settrace sys.setprofile
    sys._current_frames sys._current_exceptions sys.monitoring.register_callback gc.get_objects gc.get_referrers
    gc.get_referents mmap.__new__ resource.setrlimit resource.prlimit fcntl.fcntl fcntl.ioctl fcntl.flock fcntl.lockf
    socket.__new__ socket.connect socket.bind socket.getaddrinfo winreg.OpenKey webbrowser.open sqlite3.connect"""
# These raise no audit event of their own: `disarm` puts one in their place.
SILENT = """_posixsubprocess.fork_exec subprocess._fork_exec _thread.start_new_thread _thread.start_new
    _thread.start_joinable_thread threading._start_new_thread threading._start_joinable_thread _signal.signal
    signal.signal _signal.setitimer signal.setitimer _signal.alarm signal.alarm _signal.pidfd_send_signal
    signal.pidfd_send_signal torch.from_file torch.UntypedStorage.from_file torch._C.PyTorchFileWriter"""
NEVER = {*FORBIDDEN.split(), *SILENT.split()}
# Refused when the student's code asks, itself or through a module that would hand it the answer.
INTROSPECTION = {"object.__getattr__", "object.__setattr__", "object.__delattr__", "code.__new__", "sys._getframe"}
GO_BETWEENS = ("inspect", "traceback", "pdb", "bdb", "code", "dis", "doctest", "trace", "unittest", "ctypes")
LISTS = {"os.listdir", "os.scandir"}
CHANGES = """os.remove os.rename os.rmdir os.mkdir os.truncate os.chmod os.chown os.utime os.setxattr
    os.removexattr"""
CHANGES = set(CHANGES.split())
UNSAFE_MODULES = """_posixsubprocess _ctypes _thread _signal _dbm _gdbm readline _testcapi _testinternalcapi
    _testlimitedcapi _xxsubinterpreters _interpreters cffi _cffi_backend"""
UNSAFE_MODULES = set(UNSAFE_MODULES.split())
DEVICES = ("/dev/null", "/dev/urandom", "/proc/cpuinfo", "/sys")


def below(path: str, *folders: str) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def absolute(path, fspath=os.fspath, getcwd=os.getcwd, windows=os.name == "nt") -> str:
    """The path without "..", made with string methods alone: the functions of os.path can be replaced."""
    path = fspath(path)
    path = path.decode("utf-8", "replace") if isinstance(path, bytes) else path
    if not path.startswith("/") and path[1:2] != ":":
        path = f"{getcwd()}/{path}"
    if windows:
        path = path.replace("\\", "/").lower()
    parts = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return ("" if windows else "/") + "/".join(parts)


def make_rules(work: str, home: str, libraries: list[str], private: list[str]) -> types.SimpleNamespace:
    """Files may be read in `work` and `libraries` unless they lie in `private`; where folders are nested, the
    innermost counts. They may be written in `home` only. `notes` gets a line for each kind of thing refused to the
    student's code.
    """
    libraries = [*map(absolute, libraries)]
    folders = [*libraries, absolute(Path(os.__file__).parent)]
    names = (*GO_BETWEENS, "_pytest", "pluggy")
    return types.SimpleNamespace(
        work=absolute(work),
        home=absolute(home),
        libraries=libraries,
        private=[*map(absolute, private)],
        own={absolute(f"{work}/{name.replace('.', '/')}{end}") for name in STRICT for end in (".py", "/__init__.py")}
        | {absolute(__file__)},
        go_betweens=tuple(f"{folder}/{name}" for folder in folders for name in names),
        writes=0,
        notes=[],
    )


def readable(rules, path: str) -> bool:
    around = [folder for folder in (rules.work, *rules.libraries, *rules.private) if below(path, folder)]
    return bool(around) and max(around, key=len) not in rules.private


def trusted(rules, filename: str) -> bool:
    """Whether code of this file is ours, or a library's, and not the student's."""
    if filename.startswith("<"):
        return filename.startswith("<frozen ")
    path = absolute(filename)
    return path in rules.own or (readable(rules, path) and not below(path, rules.work))


def student_below(rules, frame) -> bool:
    """Whether the student's code takes part in what goes on."""
    while frame is not None and trusted(rules, frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None


def student_asks(rules, frame) -> bool:
    """Whether the student's code asks, itself or through a go-between."""
    while frame is not None and absolute(frame.f_code.co_filename).startswith(rules.go_betweens):
        frame = frame.f_back
    return frame is not None and not trusted(rules, frame.f_code.co_filename)


def refuse(rules, what: str, frame) -> None:
    if what not in rules.notes and len(rules.notes) < 5 and student_below(rules, frame):
        rules.notes.append(what)
    raise PermissionError(f"the grader does not allow {what}")


def check_path(rules, path, writing: bool, frame) -> None:
    if path is None or isinstance(path, int):
        return
    path = absolute(path)
    if writing:
        rules.writes += 1
        if path != "/dev/null" and (not below(path, rules.home) or rules.writes > WRITES):
            refuse(rules, "writing, renaming or deleting files", frame)
    elif below(path, f"{rules.work}/solutions"):
        if student_below(rules, frame):
            refuse(rules, "reading the solutions", frame)
    elif not readable(rules, path) and not below(path, *DEVICES):
        refuse(rules, "reading files outside of the submission's folder", frame)


def check(rules, event: str, args: tuple, frame) -> None:
    if event in NEVER:
        refuse(rules, event, frame)
    elif event == "open":
        path, mode, flags = args
        writing = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        check_path(rules, path, bool(writing) or any(letter in (mode or "") for letter in "wax+"), frame)
    elif event in LISTS or event in CHANGES:
        for path in args[: 2 if event == "os.rename" else 1]:
            check_path(rules, path, event in CHANGES, frame)
    elif event == "import":
        if args[0].split(".")[0] in UNSAFE_MODULES and student_below(rules, frame):
            refuse(rules, f"importing {args[0]}", frame)
        if args[1] is not None and not trusted(rules, args[1]):
            refuse(rules, "importing a compiled module", frame)
    elif event == "compile":
        if isinstance(args[1], str) and trusted(rules, args[1]) and student_asks(rules, frame):
            refuse(rules, "compiling code under a library's name", frame)
    elif student_asks(rules, frame):
        refuse(rules, f"access to {args[1]}" if event.startswith("object.") else event, frame)


def make_hook(rules: types.SimpleNamespace):
    """The audit hook that applies the rules."""
    getframe, busy = sys._getframe, False
    interesting = NEVER | INTROSPECTION | LISTS | CHANGES | {"open", "import", "compile", "marshal.loads"}

    def hook(event: str, args: tuple) -> None:
        nonlocal busy
        if (event in interesting or event.startswith("ctypes.")) and not busy:
            busy = True  # looking at frames raises events too
            try:
                check(rules, event, args, getframe(1))
            finally:
                busy = False

    return hook


def disarm() -> None:
    """Put an audit event in the place of each SILENT function. (Nothing of this file: that would lead here.)"""
    for name in SILENT.split():
        path, _, attribute = name.rpartition(".")
        owner = sys.modules["torch"].UntypedStorage if path == "torch.UntypedStorage" else sys.modules.get(path)
        if hasattr(owner, attribute):
            setattr(owner, attribute, functools.partial(sys.audit, name))


# 2. What is noticed: anything replaced in what was loaded before the student's code ----------------------------------


def content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def members(thing) -> dict:
    """What a class, a dict, a list or a function is made of, under its names."""
    if isinstance(thing, types.FunctionType):
        parts = {name: getattr(thing, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
        return parts | {f"__closure__[{i}]": content(cell) for i, cell in enumerate(thing.__closure__ or ())}
    if isinstance(thing, list):
        return dict(enumerate(thing))
    return dict(vars(thing)) if isinstance(thing, type) else dict(thing)


def snapshot(modules: dict) -> list[tuple]:
    """(label, strict, live, members) of modules, their classes, and all parts of the STRICT ones."""
    watched = []
    for name, module in modules.items():
        strict = name in STRICT
        if not isinstance(module, types.ModuleType):
            continue
        watched.append((name, strict, vars(module)))
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and vars(value).get("__module__") == name:
                watched.append((f"{name}.{key}", strict, value))
                if strict:
                    functions = [(k, getattr(v, "__func__", v)) for k, v in vars(value).items()]
                    watched += [(f"{name}.{key}.{k}", True, f) for k, f in functions if type(f) is types.FunctionType]
            elif strict and type(value) in (types.FunctionType, dict, list) and key != "__builtins__":
                watched.append((f"{name}.{key}", True, value))
    return [(label, strict, live, members(live)) for label, strict, live in watched]


def again(before: list[tuple]) -> list[tuple]:
    """A fresh snapshot of the same things, but for functions."""
    rest = (part[:3] for part in before if type(part[2]) is not types.FunctionType)
    return [(label, strict, live, members(live)) for label, strict, live in rest]


def replaced(before: list[tuple]) -> set[str]:
    """The names of what is no longer what it was at `before`.

    Compared by identity, never with ==, which a replacement could answer. Outside of the STRICT modules only what can
    be called counts, and new names that hide a builtin or what a class inherits: libraries keep counters and caches.
    """
    found = set()
    for label, strict, live, was in before:
        now = members(live)
        if len(now) == len(was) and all(map(operator.is_, now.values(), was.values())):
            continue
        for name, value in was.items():
            if now.get(name, found) is not value and (strict or callable(value) or type(value) is types.ModuleType):
                found.add(f"{label}.{name}")
        hidden = [vars(base) for base in live.__mro__[1:]] if isinstance(live, type) else [vars(builtins)]
        for name in now.keys() - was.keys():
            if strict or any(name in names for names in hidden):
                found.add(f"{label}.{name}")
    return {name for name in found if not name.endswith(".__warningregistry__")}


def torch_modes() -> set[str]:
    """Modes left switched on that see every call of torch. A default device is one too, and harmless."""
    import torch
    from torch.utils._device import DeviceContext

    stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    found = {type(mode).__name__ for mode in stack if type(mode) is not DeviceContext}
    return found | {"a dispatch mode"} if torch._C._len_torch_dispatch_stack() else found


# 3. Between the tests and the student's functions --------------------------------------------------------------------


def plain(value):
    """A copy of what a student's function returned that holds nothing which could answer a test's questions itself."""
    import numpy
    import torch

    kind = type(value)
    if value is None or kind in (bool, int, float, str) or kind in numpy.sctypeDict.values():
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        vars(value).clear()
        return value
    if kind in (list, tuple):
        return kind(map(plain, value))
    if kind is dict:
        return {plain(key): plain(part) for key, part in value.items()}
    fields = [] if isinstance(value, torch.Tensor) else [name for name in SAMPLES if hasattr(value, name)]
    return type(kind.__name__, (types.SimpleNamespace,), {})(**{name: plain(getattr(value, name)) for name in fields})


def anatomy(args: tuple) -> list:
    """Of each model among `args`: classes, names of attributes, types of parameters."""
    from torch.nn import Module

    modules = [part for arg in args if isinstance(arg, Module) for part in Module.modules(arg)]
    return [(type(part), list(vars(part)), [type(p) for p in part._parameters.values()]) for part in modules]


def known_wrong(handout: types.ModuleType) -> types.ModuleType:
    """A module whose five functions are wrong in value alone: each task has a test that must reject them."""
    import tinylm

    module = types.ModuleType("grpo")
    vars(module).update(vars(handout))

    def sample_group(model, prompts, G, temperature=1.0, generator=None):
        rows = prompts.repeat_interleave(G, dim=0)
        responses = tinylm.generate(model, rows, temperature, generator)
        mask, texts = tinylm.response_mask(responses), tinylm.decode_and_strip_padding(responses)
        return handout.Samples(rows, responses, 1 - mask, 0.3 + mask.sum(dim=1) / 7, texts)

    def group_advantages(rewards, G, normalize_std=True, eps=1e-4):
        return 0.3 + 0.7 * rewards

    def k3_kl(logp, ref_logp):
        return 0.3 + 0.7 * (logp - ref_logp)

    def grpo_loss(logp, old_logp, ref_logp, advantages, mask, clip=0.2, beta=0.04):
        loss = -((logp - old_logp).exp() * advantages.unsqueeze(1)).mean()
        return loss, dict.fromkeys(("clip_fraction", "kl", "ratio"), 0.3 + 0 * loss.detach())

    def grpo_step(model, ref_model, optimizer, prompts, config, generator=None):
        samples = sample_group(model, prompts, config.G, config.temperature, generator)
        return samples, dict.fromkeys(("clip_fraction", "kl", "ratio", "loss"), 0.3 + 0 * samples.rewards.sum())

    for function in (sample_group, group_advantages, k3_kl, grpo_loss, grpo_step):
        setattr(module, function.__name__, function)
    return module


# 4. One test ---------------------------------------------------------------------------------------------------------


def make_state(config: dict, replies: int, rules: types.SimpleNamespace) -> types.SimpleNamespace:
    """What is known of the submission and of the test that runs."""
    return types.SimpleNamespace(
        key=config["key"].encode(),
        nonce=config["nonce"],
        sha256=hashlib.sha256,
        write=os.write,
        replies=replies,
        rules=rules,
        harmless=set(config["harmless"]),
        changed=set(),
        handout=sys.modules["handout"],
        wrong_module=known_wrong(sys.modules["handout"]),
        wrong=False,
        loaded=None,  # (the student's module, None) or (None, why it cannot be imported)
        everything=[],
        critical=[],
        ended=False,
        phases={},
        message="",
        points=[],
    )


def remember(state) -> None:
    """Take the snapshots, when all is loaded and in place."""
    state.everything = snapshot(sys.modules)
    state.critical = snapshot({name: sys.modules[name] for name in CRITICAL if name in sys.modules})
    state.critical.append(("torch.Tensor", False, sys.modules["torch"].Tensor, {}))
    for name in ("sys.modules", "sys.meta_path", "sys.path_hooks", "gc.callbacks"):
        live = getattr(sys.modules[name.split(".")[0]], name.split(".")[1])
        state.everything.append((name, name != "sys.modules", live, members(live)))
    look(state)  # imports what it needs


def look(state) -> None:
    state.changed.update(replaced(state.everything), torch_modes())


def send(state, kind: str, message: str = "") -> None:
    lists = (sorted(state.changed - state.harmless)[:20], state.rules.notes, [message[:4000]])
    body = " ".join([state.nonce, kind, *("\n".join(x).encode("utf-8", "replace").hex() or "-" for x in lists)])
    state.write(state.replies, f"{body} {state.sha256(state.key + body.encode()).hexdigest()}\n".encode())


def watched_call(state, call, task: int, *args):
    """For Examiner.call: when a student's function returns, nothing critical may have been replaced.

    Looking after the test is not enough: what was returned can undo a replacement when it is deleted.
    """
    before, models = again(state.critical), anatomy(args)
    try:
        return plain(call(task, *args))
    finally:
        state.changed.update(replaced(before), torch_modes())
        if anatomy(args) != models:
            state.changed.add("the model that was passed")


def make_plugin(state) -> types.ModuleType:
    """A pytest plugin that stands between the tests and the student's module, and notes if a test ran to its end."""
    import pytest

    def watched(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            test(*args, **kwargs)
            state.ended = True

        return run

    def pytest_collection_modifyitems(items):
        pytest.mark._config = None  # pytest keeps its configuration here, and that knows this plugin
        for item in items:
            marker = item.get_closest_marker("points")
            state.points.append((item.name, marker.args[0] if marker else 0))
            item.obj = watched(item.obj)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(fixturedef):
        first = fixturedef.argname == "loaded" and state.loaded is None and not state.wrong
        if fixturedef.argname == "loaded" and not first:  # the student's module is imported only once
            loaded = (state.wrong_module, None) if state.wrong else state.loaded
            fixturedef.func = lambda **_: loaded
        try:
            value = yield
        except BaseException:
            if first:
                look(state)
                send(state, "broken")
            raise
        if first:
            look(state)
            send(state, "broken" if value[0] is None else "imported")
            state.loaded = value
            own, given = (getattr(module, "GRPOConfig", None) for module in (value[0], state.handout))
            if list(getattr(own, "__dataclass_fields__", ())) == list(given.__dataclass_fields__):
                value[0].GRPOConfig = given  # one that means what it says
        if fixturedef.argname == "examiner":
            value.call = functools.partial(watched_call, state, value.call)
        return value

    def pytest_runtest_makereport(call):
        if call.excinfo is not None:
            error, kind = call.excinfo.value, type(call.excinfo.value).__name__
            told = isinstance(error, AssertionError | pytest.fail.Exception)
            state.message = str(error) if told else f"{kind}: {error}"

    def pytest_runtest_logreport(report):
        state.phases[report.when] = report.outcome

    plugin = types.ModuleType("sandbox")
    hooks = (pytest_collection_modifyitems, pytest_fixture_setup, pytest_runtest_makereport, pytest_runtest_logreport)
    for function in hooks:
        setattr(plugin, function.__name__, function)
    return plugin


def run_pytest(state, *args: str) -> bool:
    """Run pytest with the plugin. Returns whether the one test selected has passed."""
    import pytest

    import conftest

    state.ended, state.phases, state.message, state.points = False, {}, "", []
    options = ["-q", "-s", "--noconftest", "-c", "pyproject.toml", "--rootdir", "."]
    options += [word for name in WITHOUT.split() for word in ("-p", f"no:{name}")]
    try:
        pytest.main([*options, *args], plugins=[conftest, make_plugin(state)])
    except BaseException as error:  # whatever the student's code let loose
        state.ended, state.message = False, f"{type(error).__name__} ended the test"
    return state.ended and state.phases == {"setup": "passed", "call": "passed", "teardown": "passed"}


def examine(state, nonce: str, test: str | None, wrong: bool) -> None:
    """Run the test and send what came of it; without a test, send the names and points of all."""
    state.nonce, state.wrong = nonce, wrong
    passed = run_pytest(state, *(["--collect-only", "test_grpo.py"] if test is None else [f"test_grpo.py::{test}"]))
    look(state)
    if test is None:
        send(state, "points", json.dumps(state.points))
    else:
        send(state, "passed" if passed else "failed", state.message or "the test was interrupted")
    state.changed.clear()
    state.rules.notes.clear()


# 5. The process ------------------------------------------------------------------------------------------------------


def leave_root(uid: int | None, needed: list[str]) -> bool:
    """Become the user `uid`, if that user can read Python and torch. Returns whether."""
    if uid is None:
        return False
    os.seteuid(uid)
    try:
        for path in needed:
            os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    finally:
        os.seteuid(0)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    return True


def limit_resources(memory: int, seconds: int, alone: bool) -> None:
    """Limits that the system enforces, as far as it has them. `alone`: no other process belongs to this user."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {"CORE": 0, "FSIZE": FILE_SIZE, "CPU": seconds} | ({"NPROC": 16} if alone else {})
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
        limits["DATA"] = memory + 1024 * int(status["VmData"].split()[0])
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")  # should memory run out, this process goes first
    except OSError:  # not Linux
        pass
    for name, limit in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)  # noqa: PLW2901
        resource.setrlimit(which, (limit, limit))
    signal.alarm(seconds)  # should grade.py itself be killed


def main() -> None:
    commands, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)  # for what the student's code prints, and in place of what it may read
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    config = json.loads(commands.readline())
    work = config["work"]
    sys.path[:] = [work, *config["path"]]
    sys.dont_write_bytecode = True
    os.chdir(work)
    import pytest
    import torch

    for name in ("handout", "conftest", "test_grpo"):
        importlib.import_module(name)
    state = make_state(config, replies, make_rules(work, config["home"], config["libraries"], config["private"]))
    run_pytest(state, "--collect-only", "test_grpo.py")  # loads what pytest loads late
    alone = leave_root(config["uid"], [os.__file__, torch.__file__, pytest.__file__, work])
    limit_resources(config["memory"], config["seconds"], alone)
    disarm()
    for name, module in list(sys.modules.items()):  # this file has two names there
        if getattr(module, "__file__", None) == __file__:
            sys.modules[name] = types.ModuleType("__main__")
    remember(state)
    os.dup2(nowhere, 2)
    sys.addaudithook(make_hook(state.rules))
    send(state, "ready", "alone" if alone else "")
    for line in commands:
        examine(state, **json.loads(line))


if __name__ == "__main__":
    main()
