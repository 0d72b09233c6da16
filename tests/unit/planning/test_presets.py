"""Every file in configs/: it plans as valid, has the layout of its name, fits its hardware, and is short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo_hpc.config import loader
from gspo_hpc.config.schema import Config, as_dict
from gspo_hpc.launch.slurm import submit
from gspo_hpc.models import architecture as model_config
from gspo_hpc.models import catalog
from gspo_hpc.planning.estimates import adapters, devices, parameters, phases
from gspo_hpc.planning.plan import make_plan
from gspo_hpc.rewards import registry
from gspo_hpc.system.text import GIB
from tests.examples import example

PROJECT = Path(__file__).resolve().parents[3]
FILES = sorted((PROJECT / "configs").glob("*.yaml"))
LARGE = [path for path in FILES if not path.stem.endswith("_cpu")]
MAX_LINES = 60
HEADROOM = 0.2  # of a GPU's memory, for activations, logits and peaks


def architecture(config: Config) -> model_config.Architecture:
    """Return the architecture in the catalog, whatever is in the model's folder here."""
    return model_config.parse(catalog.content(str(catalog.find(str(config.model.path)))))


by_name = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
large_by_name = pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)


@by_name
def test_it_is_valid_and_nothing_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)  # paths in configs/ are relative to it
    config = loader.load(path)
    plan = make_plan(config)
    assert plan.broken == () and plan.warnings == ()
    assert config.missing() == []
    assert config.run.name == path.stem
    registry.check(config.reward)
    script = submit.dry_run(config)
    assert f"#SBATCH --nodes={config.cluster.nodes}\n" in script and f"--job-name={path.stem}\n" in script


@large_by_name
def test_its_layout_can_be_tried_on_cpus(path: Path) -> None:
    """`train --dry-run` advises it where there are no GPUs: the memory of those that the config names is no limit."""
    plan = make_plan(loader.load(path, ["cluster.platform=cpu"]))
    assert plan.broken == () and plan.not_run == () and plan.memory is None
    assert any("the memory of a GPU is no limit" in note for note in plan.notes)


def test_there_is_one_for_each_usual_layout() -> None:
    stems = {path.stem for path in LARGE}
    for model, layout in (
        ("qwen3_0.6b", "1gpu"),
        ("qwen2.5_7b", "tp2"),
        ("qwen2.5_7b", "tp2_pp2"),
        ("qwen2.5_32b", "tp4_pp4"),
        ("llama3.1_70b", "tp8_pp8"),
        ("qwen3_30b_a3b", "tp2_ep4_etp2"),
        ("qwen3_30b_a3b", "ep8"),
        ("qwen3_235b_a22b", "tp4_pp2_ep32"),
        ("qwen3_8b", "tp2_cp4_32k"),
    ):
        assert f"{model}_{layout}" in stems


@large_by_name
def test_gradients_are_summed_beside_the_passes_where_there_are_replicas(path: Path) -> None:
    config = loader.load(path)
    own = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    assert config.parallel.overlap_grad_reduce == ((config.world_size or 1) > own)


@large_by_name
def test_model_and_layout_are_those_of_the_name(path: Path) -> None:
    config = loader.load(path)
    model = catalog.find(str(config.model.path))
    assert model is not None
    name = model.lower().replace("-", "_").replace("llama_", "llama")
    assert path.stem.startswith(f"{name}_")
    words = path.stem.removeprefix(f"{name}_").split("_")
    promised = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1}
    for word in words:
        if found := re.fullmatch(r"(tp|pp|cp|ep|etp)(\d+)", word):
            promised[found[1]] = int(found[2])
        elif found := re.fullmatch(r"(\d+)k", word):
            assert config.rollout.max_prompt_length + config.rollout.max_response_length == int(found[1]) * 1024
        elif word != "lora":
            assert word == "1gpu" and config.world_size == 1
    assert ("lora" in words) == (config.adapter.type == "lora")
    p, layout = config.parallel, make_plan(config).layout
    has_experts = architecture(config).experts is not None
    assert promised == {
        "tp": p.tensor_model_parallel_size,
        "pp": p.pipeline_model_parallel_size,
        "cp": p.context_parallel_size,
        "ep": p.expert_model_parallel_size,
        "etp": layout["expert_tensor_parallel_size"] if has_experts else 1,
    }
    assert p.tensor_model_parallel_size <= config.cluster.gpus_per_node  # inside the node
    assert p.pipeline_model_parallel_size == 1 or config.memory.recompute_granularity == "full"


@large_by_name
def test_weights_gradients_and_optimizer_fit_the_gpu_that_it_names(path: Path) -> None:
    config = loader.load(path)
    arch = architecture(config)
    device = devices.find(str(config.cluster.gpu))
    for stage in range(config.parallel.pipeline_model_parallel_size):
        assert parameters.state(arch, config, stage).total <= (1 - HEADROOM) * device.memory
    engine = parameters.parameters(arch) * 2 / config.rollout.tensor_parallel_size
    assert engine < config.rollout.engine["gpu_memory_utilization"] * device.memory


@large_by_name
def test_it_recomputes_activations_only_where_memory_asks_for_it(path: Path) -> None:
    """A third more forward passes, else for nothing: without it the plan is refused, or leaves too little for peaks."""
    config = loader.load(path)
    without = make_plan(loader.load(path, ["memory.recompute_granularity=null"]))
    enough = not without.broken and without.memory is not None and without.memory.headroom >= phases.HEADROOM
    assert (config.memory.recompute_granularity is None) == enough


@large_by_name
def test_gibibytes_in_its_comments_are_those_of_the_plan(path: Path) -> None:
    """Bytes of a GPU: weights, gradients and optimizer; the trainer's weights alone; the engine's."""
    config = loader.load(path)
    arch = architecture(config)
    states = [parameters.state(arch, config, i) for i in range(config.parallel.pipeline_model_parallel_size)]
    engine = parameters.parameters(arch) * 2 / config.rollout.tensor_parallel_size
    sizes = [*(one.total for one in states), *(one.weights for one in states), engine]
    told = {int(number) for number in re.findall(r"(\d+) GiB", path.read_text())}
    assert told <= {round(size / GIB) for size in sizes}


@large_by_name
def test_it_says_for_what_it_is(path: Path) -> None:
    """The first lines name hardware; sizes in them and beside the checkpoint are those of the plan."""
    config, text = loader.load(path), path.read_text()
    head = "\n".join(line for line in text.splitlines()[:3] if line.startswith("#"))
    gigabytes = str(config.cluster.gpu).split("-")[1].removesuffix("GB")
    assert f"{gigabytes} GB" in head and f"configs/{path.name}" in head
    assert config.cluster.nodes == 1 or f"{config.cluster.nodes} nodes" in head
    quantities = make_plan(config).quantities
    for part in (f"TP {config.parallel.tensor_model_parallel_size}", f"DP {quantities['dp_size']}"):
        assert part.endswith(" 1") or part in head
    arch = architecture(config)
    found = re.search(r"interval: \d+ # about ([\d.]+) ([GT])B per checkpoint", text)
    assert found is not None
    kept = float(found[1]) * {"G": 1e9, "T": 1e12}[found[2]]
    each = 2 + 4 + 8  # bfloat16, fp32 master, two moments
    trained = adapters.of_model(arch, config) or parameters.parameters(arch)
    assert kept == pytest.approx(trained * each, rel=0.05)
    for stages, layers in re.findall(r"pipeline_model_parallel_size: (\d+) # \d+ layers: (\d+)", text):
        assert int(stages) * int(layers) == arch.num_layers


def leaves(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, its line from 0) of every value."""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode):
            yield from leaves(value, f"{name}.")
        else:
            yield name, key.start_mark.line


def value_of(config: Config, name: str) -> Any:
    found: Any = as_dict(config)
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


@by_name
def test_it_is_short_and_every_line_counts(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) < MAX_LINES and max(map(len, lines)) <= 120
    assert lines[0].startswith("# ")
    config = loader.load(path)
    for name, line in leaves(yaml.compose(text)):
        assert value_of(config, name) != value_of(Config(), name) or " # " in lines[line], f"{name} is the default"


def test_the_example_of_a_preset_passes_these_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands in CONTRIBUTING.md, under the name that it has there."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", example("A configuration preset"), re.MULTILINE | re.DOTALL)
    path = tmp_path / f"{yaml.safe_load(text)['run']['name']}.yaml"
    path.write_text(text)
    test_it_is_valid_and_nothing_is_missing(path, monkeypatch)
    test_model_and_layout_are_those_of_the_name(path)
    test_weights_gradients_and_optimizer_fit_the_gpu_that_it_names(path)
    test_gibibytes_in_its_comments_are_those_of_the_plan(path)
    test_it_says_for_what_it_is(path)
    test_it_is_short_and_every_line_counts(path)
