"""The runs: each a variant of the settings with one seed, which is that of its starting policy and of GRPO alike.

A finished run is kept in a file of its own, with what it depends on, so that nothing is run twice unless that changes.
"""

import copy
import hashlib
import json
import multiprocessing
from pathlib import Path

from manifest import LAB
from measuring.calibration import ahead, figures
from tqdm import tqdm

import grpo
import tinylm
from answering import questions
from answering.policies import anatomy, kl_to, one_step
from lab.files import whole_file
from lab.pictures import EVERY_K
from lab.verifiers import verifying

RUNS = LAB / "solutions" / "experiments" / "runs"
# Other estimators of KL(pi || pi_ref) to put into `k3_kl`: functions of logp and ref_logp [N, Tr].
ESTIMATORS = {
    "k1": lambda logp, ref_logp: logp - ref_logp,
    "k2": lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2,
}


def path_of(variant: str, seed: int) -> Path:
    return RUNS / f"{variant}_{seed}.json"


def policy_of(seed: int) -> Path:
    return RUNS / f"sft_{seed}.pt"


def origin(variant: str) -> dict:
    """What a run's result depends on beside its seed: kept with it, so that an outdated one is run again."""
    changes = questions.VARIANTS[variant]
    files = ["solutions/grpo.py", "tinylm.py", *(["lab/verifiers.py"] if "verifier" in changes else [])]
    code = b"".join((LAB / name).read_bytes() for name in files)
    return {"changes": changes, "code": hashlib.sha256(code).hexdigest()}


def is_there(variant: str, seed: int) -> bool:
    """Whether the run is there, whole, and of the variant and the code as they are now."""
    try:
        result = json.loads(path_of(variant, seed).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(result, dict) and result.items() >= origin(variant).items()


def train_policy(seed: int) -> None:
    """Train the starting policy of a seed. One that is there may be of older code, and takes only seconds."""
    tinylm.save_checkpoint(tinylm.train_sft(seed), policy_of(seed))


def run_one(job: tuple[str, int]) -> None:
    """Train, measure, and keep the result."""
    variant, seed = job
    changes = dict(questions.VARIANTS[variant])
    sft = tinylm.load_checkpoint(policy_of(seed))
    model = copy.deepcopy(sft)
    k3_kl = grpo.k3_kl
    try:
        grpo.k3_kl = ESTIMATORS.get(changes.pop("kl", None), k3_kl)
        with verifying(changes.pop("verifier", "strict")):
            config = grpo.GRPOConfig(seed=seed, **changes)
            history = grpo.train_grpo(model, config)
    finally:
        grpo.k3_kl = k3_kl
    measured = figures(sft, model, history) | {"k3 KL after, nats per token": kl_to(sft, model, config.temperature)}
    result = origin(variant) | {"figures": measured, "history": history, "ahead": ahead(sft, model, EVERY_K)}
    if variant == "step":
        result["one_step"] = one_step(sft)
    if variant == "default":
        result |= {"before": anatomy(sft), "after": anatomy(model)}
    with whole_file(path_of(variant, seed)) as temporary:
        temporary.write_text(json.dumps(result), encoding="utf-8")


def run_missing(seeds: int, jobs: int) -> None:
    """All variants with the seeds from 0 on, but for what is there already, in so many processes at a time."""
    RUNS.mkdir(parents=True, exist_ok=True)
    missing = [
        (variant, seed) for seed in range(seeds) for variant in questions.VARIANTS if not is_there(variant, seed)
    ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pool.map(train_policy, sorted({seed for _, seed in missing}), chunksize=1)
        for _ in tqdm(pool.imap_unordered(run_one, missing), total=len(missing), unit="run", disable=None):
            pass


def read_runs(seeds: int) -> dict[str, list[dict]]:
    """The results of all variants, seed by seed."""
    return {
        variant: [json.loads(path_of(variant, seed).read_text(encoding="utf-8")) for seed in range(seeds)]
        for variant in questions.VARIANTS
    }
