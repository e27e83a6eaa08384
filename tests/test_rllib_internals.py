"""The private names of Ray that are used: each is listed with its reason and is still there.

``INTERNALS`` is the list, and ``docs/rllib-internals.md`` shows it. After moving to another
version of Ray, run this file first: every name that is gone fails by itself, with the lines that use
it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rllib-internals.md"
SOURCES = ("rerpi_rllib", "benchmarks", "tests")


@dataclass(frozen=True)
class Internal:
    """A private name of Ray.

    ``owner`` is the class or module that defines it, ``used_by`` names the part of this project in
    words, and ``parameters`` are the arguments that are passed, for what is called or overridden.
    """

    owner: str
    name: str
    used_by: str
    why: str
    parameters: tuple[str, ...] = ()


INTERNALS: tuple[Internal, ...] = (
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_value_error",
        "the configuration",
        "Raises RLlib's validation error, which a user can turn into a warning.",
        ("errmsg",),
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_rl_module_spec",
        "the configuration",
        "Whether the user gave a module of their own: the public property fills in ours.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_model_config",
        "the configuration",
        "Whether the user gave a model configuration, which would have no effect.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_model_config_auto_includes",
        "the configuration",
        "Hands the settings of networks and loss to the module. RLlib's algorithms override it too.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_train_batch_size_per_learner",
        "the configuration",
        "Whether the user chose a batch size for each learner or one for all.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_dont_auto_sync_env_runner_states",
        "the configuration and its test",
        "Skips the exchange of connector states between EnvRunners where there are none.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_is_frozen",
        "the configuration",
        "Whether the state is that of a checkpoint, whose values were accepted before.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_env_to_module_connector",
        "the configuration and the EnvRunner",
        "Whether the user added connectors, which only RLlib's sampling loop runs.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_module_to_env_connector",
        "the configuration and the EnvRunner",
        "As above, for the connectors from the module to the environment.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_learner_class",
        "the configuration",
        "Whether the user gave a learner of their own, which its settings are for.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_torch_grad_scaler_class",
        "the learner",
        "Whether the user asked for a gradient scaler, which only RLlib's update applies.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm_config.AlgorithmConfig",
        "_torch_lr_scheduler_classes",
        "the learner",
        "As above, for torch's learning rate schedulers.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm.Algorithm",
        "_counters",
        "the algorithm",
        "The old API stack counts trained steps there.",
    ),
    Internal(
        "ray.rllib.algorithms.algorithm.Algorithm",
        "_compile_iteration_results_old_api_stack",
        "the algorithm",
        "Adds the learner's metrics to the old stack's results under the new stack's names.",
        ("episodes_this_iter", "step_ctx", "iteration_results"),
    ),
    Internal(
        "ray.tune.trainable.trainable.Trainable",
        "_time_total",
        "the algorithm",
        "A resumed run continues the clock of the run it resumes.",
    ),
    Internal(
        "ray.rllib.utils.checkpoints.Checkpointable",
        "_check_component",
        "the algorithm",
        "Whether a checkpoint should include the replay.",
        ("name", "components", "not_components"),
    ),
    Internal(
        "ray.rllib.core.learner.learner.Learner",
        "_check_is_built",
        "the learner",
        "The first thing that RLlib's `update` does.",
    ),
    Internal(
        "ray.rllib.core.learner.learner.Learner",
        "_make_batch_if_necessary",
        "the learner",
        "Turns the training data into a batch on the learner's device.",
        ("training_data",),
    ),
    Internal(
        "ray.rllib.core.learner.torch.torch_learner.TorchLearner",
        "_convert_batch_type",
        "the learner",
        "Copies batches to a GPU from pinned memory.",
        ("batch", "to_device", "pin_memory", "use_stream"),
    ),
    Internal(
        "ray.rllib.core.learner.learner.Learner",
        "_weights_seq_no",
        "the learner",
        "RLlib's `update` counts it up, and EnvRunners compare it to skip weights that they have.",
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_weights_seq_no",
        "the algorithm",
        "Lets EnvRunners take the weights of a checkpoint, also if theirs are newer.",
    ),
    Internal(
        "ray.rllib.core.learner.learner.Learner",
        "_log_steps_trained_metrics",
        "the learner",
        "Logs the trained steps once for all updates of a call.",
        ("batch",),
    ),
    Internal(
        "ray.rllib.core.learner.learner.Learner",
        "_named_optimizers",
        "the tests",
        "Compares the optimizers of the two API stacks.",
    ),
    Internal(
        "ray.rllib.core.learner.torch.torch_learner.TorchLearner",
        "_update",
        "the learner",
        "One update by RLlib: forward pass, gradients, clipping, step.",
        ("batch",),
    ),
    Internal(
        "ray.rllib.core.learner.torch.torch_learner.TorchLearner",
        "_device",
        "the learner",
        "The device of the networks.",
    ),
    Internal(
        "ray.rllib.core.learner.learner_group.LearnerGroup",
        "_learner",
        "the benchmarks and the tests",
        "The learner of this process.",
    ),
    Internal(
        "ray.rllib.core.rl_module.rl_module.RLModule",
        "_forward_train",
        "the module",
        "Computes the loss. RLlib documents it as a method to override.",
        ("batch",),
    ),
    Internal(
        "ray.rllib.core.rl_module.rl_module.RLModule",
        "_forward_exploration",
        "the module",
        "Samples actions. RLlib documents it as a method to override.",
        ("batch",),
    ),
    Internal(
        "ray.rllib.core.rl_module.rl_module.RLModule",
        "_forward_inference",
        "the module",
        "Gives greedy actions. RLlib documents it as a method to override.",
        ("batch",),
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_sample",
        "the EnvRunner",
        "The sampling loop, which ours replaces where nothing needs RLlib's.",
        ("num_timesteps", "num_episodes", "explore", "random_actions", "force_reset"),
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_needs_initial_reset",
        "the EnvRunner",
        "Whether the next call of `sample` begins with new episodes.",
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_callbacks",
        "the EnvRunner",
        "Whether the user added callbacks, which only RLlib's loop calls.",
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_device",
        "the EnvRunner",
        "The device of the policy.",
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_done_episodes_for_metrics",
        "the EnvRunner",
        "Hands finished episodes to RLlib's metrics.",
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_ongoing_episodes_for_metrics",
        "the EnvRunner",
        "Hands pieces of unfinished episodes to RLlib's metrics.",
    ),
    Internal(
        "ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner",
        "_increase_sampled_metrics",
        "the EnvRunner",
        "Counts the sampled steps and episodes.",
        ("num_steps", "num_episodes_completed"),
    ),
    Internal(
        "ray.rllib.env.env_runner.EnvRunner",
        "_try_env_reset",
        "the EnvRunner",
        "Resets the environments, and rebuilds them if that fails.",
        ("seed", "options"),
    ),
    Internal(
        "ray.rllib.env.env_runner.EnvRunner",
        "_seed",
        "the EnvRunner",
        "The seed of the first reset.",
    ),
    Internal(
        "ray.rllib.env.env_runner.EnvRunner",
        "_log_env_steps",
        "the EnvRunner",
        "Counts the steps in Ray's own metrics.",
        ("metric", "num_steps"),
    ),
    Internal(
        "ray.rllib.env.env_runner.EnvRunner",
        "_metrics_num_env_steps_sampled",
        "the EnvRunner",
        "The counter for the line above.",
    ),
    Internal(
        "ray.rllib.env.single_agent_episode.SingleAgentEpisode",
        "_start_time",
        "the EnvRunner",
        "An episode's duration is computed from it.",
    ),
    Internal(
        "ray.rllib.env.single_agent_episode.SingleAgentEpisode",
        "_last_step_time",
        "the EnvRunner",
        "As above.",
    ),
    Internal(
        "ray.rllib.env.env_runner_group.EnvRunnerGroup",
        "_worker_manager",
        "the algorithm",
        "Kills an EnvRunner that hangs and marks it as unhealthy, so that RLlib starts it anew.",
    ),
    Internal(
        "ray.rllib.core.learner.learner_group.LearnerGroup",
        "_worker_manager",
        "the algorithm and its faults",
        "Whether all remote learners are alive; ends the others when they are replaced.",
    ),
    Internal(
        "ray.rllib.core.learner.learner_group.LearnerGroup",
        "_is_shut_down",
        "the algorithm's faults",
        "Marks a group as shut down whose processes are gone.",
    ),
    Internal(
        "ray.rllib.policy.torch_policy_v2.TorchPolicyV2",
        "_optimizers",
        "the old stack's policy and its test",
        "The optimizers that RLlib made of ours and saves in checkpoints.",
    ),
    Internal(
        "ray.tune.registry",
        "_global_registry",
        "the environments",
        "Whether the user registered an environment of that name, for which Tune has no public call.",
    ),
    Internal(
        "ray.train",
        "_internal",
        "the soak",
        "Where Tune has what saves the checkpoint of a trial, which nothing public does.",
    ),
    Internal(
        "ray.train._internal.checkpoint_manager",
        "_CheckpointManager",
        "the soak",
        "Deletes old checkpoints of a process without Tune as Tune does.",
    ),
    Internal(
        "ray.tune.trainable.trainable.Trainable",
        "_storage",
        "the soak",
        "Lets an algorithm outside of Tune save as in a trial: written elsewhere, then copied.",
    ),
)


def markdown_table() -> str:
    """Return the table of the page as Markdown."""
    rows = ["| Name | Where Ray defines it | Used by | Why |", "| --- | --- | --- | --- |"]
    rows += [f"| `{i.name}` | `{i.owner}` | {i.used_by} | {i.why} |" for i in INTERNALS]
    return "\n".join(rows)


def resolve(path: str) -> object:
    """Return the module or class with this dotted path."""
    module, _, attribute = path.rpartition(".")
    if attribute[0].isupper():
        return getattr(importlib.import_module(module), attribute)
    return importlib.import_module(path)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def members_in_source(node: ast.ClassDef) -> set[str]:
    """Return the private names that a class defines in its body or sets on ``self``."""
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            names.add(child.attr)
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            names.add(child.target.id)
        elif isinstance(child, ast.Assign):
            names |= {target.id for target in child.targets if isinstance(target, ast.Name)}
    return set(filter(is_private, names))


@functools.cache
def private_members(owner: type) -> frozenset[str]:
    """Return the private names that a class of Ray defines itself, without those of its bases."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(node, ast.ClassDef)
    return frozenset({name for name in vars(owner) if is_private(name)} | members_in_source(node))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Parse every source file of this project except this one."""
    paths = [p for d in SOURCES for p in sorted((ROOT / d).rglob("*.py")) if p != Path(__file__)]
    return {path: ast.parse(path.read_text()) for path in paths}


def accesses(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Yield private names that are read, written, defined or imported, with line and receiver."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            yield node.attr, node.lineno, value.id if isinstance(value, ast.Name) else ""
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"getattr", "setattr", "hasattr"}
            and isinstance(node.args[1], ast.Constant)
            and is_private(node.args[1].value)
        ):
            receiver = node.args[0]
            yield (
                node.args[1].value,
                node.lineno,
                receiver.id if isinstance(receiver, ast.Name) else "",
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            for name in [*node.module.split("."), *(alias.name for alias in node.names)]:
                if is_private(name):
                    yield name, node.lineno, "ray"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ray":
                    yield from (
                        (n, node.lineno, "ray") for n in alias.name.split(".") if is_private(n)
                    )


@functools.cache
def own_names() -> frozenset[str]:
    """Return private names that this project defines and its classes do not inherit from Ray."""
    names: set[str] = set()
    for path, tree in trees().items():
        bases = {node: ray_bases(cls) for node, cls in classes_derived_from_ray(path)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                theirs = frozenset().union(*map(private_members, bases.get(node, ())))
                names |= members_in_source(node) - theirs
    return frozenset(names)


@functools.cache
def own_functions() -> frozenset[str]:
    """Return the functions of this project's modules, which are called as ``module._function``."""
    bodies = [node for tree in trees().values() for node in tree.body]
    return frozenset(node.name for node in bodies if isinstance(node, ast.FunctionDef))


@functools.cache
def classes_derived_from_ray(path: Path) -> tuple[tuple[ast.ClassDef, type], ...]:
    """Return the classes of a file of the package that derive from one of Ray's."""
    if path.relative_to(ROOT).parts[0] != "rerpi_rllib" or path.name == "__main__.py":
        return ()
    nodes = [node for node in trees()[path].body if isinstance(node, ast.ClassDef) and node.bases]
    if not nodes:
        return ()
    module = path.relative_to(ROOT).with_suffix("")
    parts = module.parts[:-1] if module.name == "__init__" else module.parts
    found = importlib.import_module(".".join(parts))
    pairs = [(node, getattr(found, node.name)) for node in nodes]
    return tuple((node, cls) for node, cls in pairs if ray_bases(cls))


def ray_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] == "ray"]


@functools.cache
def names_in_ray() -> frozenset[str]:
    """Return all private names that RLlib and Tune define anywhere."""
    package = Path(ray.__file__).parent
    definition = re.compile(r"def (_[a-zA-Z]\w*)\(|self\.(_[a-zA-Z]\w*)(?::[^=\n]+)? = ")
    names: set[str] = set()
    for directory in ("rllib", "tune"):
        for path in (package / directory).rglob("*.py"):
            if not {"examples", "tests", "tuned_examples"} & set(path.parts):
                for pair in definition.findall(path.read_text()):
                    names.update(filter(None, pair))
    return frozenset(names)


@functools.cache
def uses() -> dict[str, tuple[str, ...]]:
    """Return the private names of Ray that this project uses, each with the places that use it.

    In a class derived from one of Ray's, ``self``, ``cls`` and ``super()`` are looked up in Ray's
    classes. Everywhere else a name counts if Ray defines it and this project does not.
    """
    found: dict[str, set[str]] = {}

    def add(name: str, path: Path, line: int) -> None:
        found.setdefault(name, set()).add(f"{path.relative_to(ROOT)}:{line}")

    for path, tree in trees().items():
        within_ray: set[tuple[str, int]] = set()
        for node, cls in classes_derived_from_ray(path):
            theirs = frozenset().union(*map(private_members, ray_bases(cls)))
            for method in ast.walk(node):
                if isinstance(method, ast.FunctionDef) and method.name in theirs:
                    add(method.name, path, method.lineno)
            for name, line, receiver in accesses(node):
                if receiver in {"self", "cls", "super"}:
                    within_ray.add((name, line))
                    if name in theirs:
                        add(name, path, line)
        for name, line, receiver in accesses(tree):
            if (name, line) in within_ray:
                continue
            is_own = name in own_names() or (receiver and name in own_functions())
            if receiver == "ray" or (name in names_in_ray() and not is_own):
                add(name, path, line)
        for call in ast.walk(tree):
            # Needs of settings name the attributes that they look at.
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Need":
                name = ast.literal_eval(call.args[0])
                if name in names_in_ray():
                    add(name, path, call.lineno)
    return {name: tuple(sorted(places)) for name, places in sorted(found.items())}


@pytest.mark.parametrize(
    "internal", INTERNALS, ids=lambda i: f"{i.owner.rpartition('.')[2]}.{i.name}"
)
def test_ray_still_has_the_name(internal):
    places = ", ".join(uses().get(internal.name, ()))
    advice = f"It is used by {internal.used_by}: {internal.why} See {places}, then correct INTERNALS."
    gone = f"Ray {ray.__version__} has no {internal.owner}.{internal.name} any more. {advice}"
    try:
        owner = resolve(internal.owner)
    except (ImportError, AttributeError) as error:
        raise AssertionError(gone) from error
    if isinstance(owner, type):
        assert internal.name in private_members(owner), gone
    else:
        assert hasattr(owner, internal.name), gone
    if internal.parameters:
        signature = inspect.signature(getattr(owner, internal.name))
        missing = set(internal.parameters) - set(signature.parameters)
        assert not missing, (
            f"In Ray {ray.__version__}, {internal.owner}.{internal.name}{signature} does not take "
            f"{', '.join(sorted(missing))} any more. {advice}"
        )


def test_every_private_name_in_use_is_listed():
    listed = {internal.name for internal in INTERNALS}
    missing = {name: places for name, places in uses().items() if name not in listed}
    assert not missing, (
        "These private names of Ray are used and not listed in INTERNALS. Use something public, or "
        f"add them there and to {PAGE.name}; if a name is meant to be this project's own, choose one "
        f"that Ray does not have: {missing}"
    )


def test_every_listed_name_is_in_use():
    unused = sorted({internal.name for internal in INTERNALS} - set(uses()))
    assert not unused, f"Nothing uses these names any more, remove them from INTERNALS: {unused}"


def test_the_page_shows_the_list():
    assert markdown_table() in PAGE.read_text(), (
        f"The table in {PAGE.relative_to(ROOT)} differs from INTERNALS. It should be:\n\n"
        f"{markdown_table()}"
    )
