"""Configurations that ship with the package: exact sizes of known models, and when a plan goes by them."""

from __future__ import annotations

import configparser
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_hpc.config.loader import from_dict
from gspo_hpc.config.schema import Config
from gspo_hpc.models import architecture, catalog
from gspo_hpc.planning.estimates import parameters
from gspo_hpc.planning.fixes import search
from gspo_hpc.planning.plan import make_plan

# Parameters as published. safetensors: "total" of the model's page on the Hub. index: metadata.total_size of its
# model.safetensors.index.json, bytes of bfloat16, halved. weights: the sum over its tensors, a tied head once (files of
# Qwen3-0.6B and Qwen3-1.7B store it twice: 751,632,384 and 2,031,739,904).
PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,  # weights
    "Qwen3-1.7B": 1_720_574_976,  # weights
    "Qwen3-4B": 4_022_468_096,  # safetensors
    "Qwen3-8B": 8_190_735_360,  # safetensors; index 16,381,470,720
    "Qwen3-14B": 14_768_307_200,  # safetensors; index 29,536,614,400
    "Qwen3-32B": 32_762_123_264,  # index 65,524,246,528
    "Qwen2.5-0.5B": 494_032_768,  # safetensors
    "Qwen2.5-1.5B": 1_543_714_304,  # safetensors
    "Qwen2.5-3B": 3_085_938_688,  # safetensors
    "Qwen2.5-7B": 7_615_616_512,  # index 15,231,233,024
    "Qwen2.5-14B": 14_770_033_664,  # index 29,540,067,328
    "Qwen2.5-32B": 32_763_876_352,  # safetensors
    "Qwen2.5-72B": 72_706_203_648,  # index 145,412,407,296
    "Qwen2.5-Math-7B": 7_615_616_512,  # safetensors: the shapes of Qwen2.5-7B
    "Llama-3.1-8B": 8_030_261_248,  # safetensors
    "Llama-3.1-70B": 70_553_706_496,  # safetensors
    "Qwen3-30B-A3B": 30_532_122_624,  # safetensors
    "Qwen3-235B-A22B": 235_093_634_560,  # safetensors
    "Mixtral-8x7B": 46_702_792_704,  # index 93,405,585,408
    "SmolLM2-135M": 134_515_008,  # safetensors
    "Llama-3.2-1B": 1_235_814_400,  # safetensors
    "Llama-3.2-3B": 3_212_749_824,  # safetensors
    "Mistral-7B-v0.3": 7_248_023_552,  # safetensors
    "SmolLM2-360M": 361_821_120,  # safetensors
    "SmolLM2-1.7B": 1_711_376_384,  # safetensors
    "deepseek-llm-7B": 6_910_365_696,  # sum over the parameters of the loaded model
    "deepseek-coder-1.3B": 1_346_471_936,  # safetensors
    "deepseek-coder-6.7B": 6_740_512_768,  # safetensors
    "Llama-2-7B": 6_738_415_616,  # safetensors
    "Llama-2-13B": 13_015_864_320,  # safetensors
    "Llama-2-70B": 68_976_648_192,  # safetensors
    "TinyLlama-1.1B": 1_100_048_384,  # safetensors
    "Qwen3-Coder-480B-A35B": 480_154_875_392,  # safetensors
}


# Families that are planned only. checkpoint: "total" of the model's page on the Hub, or the sum of its tensors, with
# the layer that predicts further tokens (MTP) and the routers' correction biases, which a plan leaves out. decoder and
# vision: counted from the headers of its safetensors files, and added.
PLANNED_ONLY = {
    "gpt-oss-20b": 20_914_757_184,  # checkpoint
    "gpt-oss-120b": 116_829_156_672,  # checkpoint
    "DeepSeek-V3": 671_026_419_200,  # checkpoint, without MTP
    "GLM-4.5": 358_337_791_296,  # checkpoint
    "GLM-4.5-Air": 110_468_824_832,  # checkpoint
    "Qwen3-Next-80B-A3B": 81_324_862_720,  # checkpoint
    "Qwen3.5-4B": 4_659_865_088,  # checkpoint
    "Qwen3.5-9B": 8_953_803_264 + 456_010_480,  # decoder and vision
    "Qwen3.5-27B": 27_781_427_952,  # checkpoint
    "Qwen3.5-35B-A3B": 34_660_610_688 + 446_571_248,  # decoder and vision
    "Qwen3.5-122B-A10B": 122_111_526_912 + 451_290_864,  # decoder and vision
    "Qwen3-VL-2B": 2_127_532_032,  # checkpoint
    "Qwen3-VL-4B": 4_437_815_808,  # checkpoint
    "Qwen3-VL-8B": 8_767_123_696,  # checkpoint
    "Qwen3-VL-32B": 33_357_390_064,  # checkpoint
    "Qwen3-VL-30B-A3B": 31_070_754_032,  # checkpoint
    "Qwen3-VL-235B-A22B": 235_670_022_896,  # checkpoint
    "Qwen2.5-VL-3B": 3_754_622_976,  # checkpoint
    "Qwen2.5-VL-7B": 8_292_166_656,  # checkpoint
    "Qwen2.5-VL-32B": 33_452_718_336,  # checkpoint
}
WITH_MTP = ("GLM-4.5", "GLM-4.5-Air", "Qwen3-Next-80B-A3B", "Qwen3.5-4B", "Qwen3.5-27B")
CORRECTED = ("DeepSeek-V3", "GLM-4.5", "GLM-4.5-Air")  # routers have a bias for each expert
ROUNDED = {"Qwen3.5-397B-A17B": 397, "Kimi-K2": 1030}  # billions, as their makers say


def left_out(name: str, arch: architecture.Architecture) -> int:
    """The parameters of a checkpoint that no plan counts."""
    hidden, last = arch.hidden_size, arch.num_layers - 1
    experts = arch.experts.count if arch.experts is not None and name in CORRECTED else 0
    found = experts * sum(map(arch.has_experts, range(arch.num_layers)))
    if name in WITH_MTP:  # one more layer as the last one is, two norms before and one behind a matrix
        layer = replace(arch, num_layers=1, mixers=arch.mixers[last:], vocab_size=0, first_parameters=0)
        if layer.experts is not None:
            layer = replace(layer, experts=replace(layer.experts, dense_layers=()))
        ends = 2 * arch.vocab_size * hidden if name.startswith("GLM") else 0  # an embedding and a head of its own
        found += parameters.parameters(layer) - hidden + experts + 2 * hidden**2 + 3 * hidden + ends
    return found


@pytest.mark.parametrize("name", catalog.names())
def test_parameters_are_those_published(name: str) -> None:
    arch = architecture.counted(catalog.content(name))
    found = parameters.parameters(arch)
    if name in ROUNDED:
        assert found / 1e9 == pytest.approx(ROUNDED[name], rel=0.005)
    else:
        assert found + left_out(name, arch) == (PUBLISHED | PLANNED_ONLY)[name]
    refused = architecture.untrained(f"models/{name}", "own")
    assert (refused is None) == (name in PUBLISHED), refused


# Variants with other parameters than the model that they are like: safetensors.
PUBLISHED_VARIANTS = {
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Mistral-7B": 7_241_732_096,
    "Mistral-7B-v0.2": 7_241_732_096,
}
READ = {"sliding_window", "quantization_config"}  # of variants that are not trained for it


@pytest.mark.parametrize("name", catalog.variants())
def test_variants_have_the_sizes_that_their_name_says(name: str) -> None:
    """A variant that names the wrong model, or a key that nothing reads, would plan another model's memory."""
    like = catalog.variants()[name]["like"]
    assert name not in PUBLISHED | PLANNED_ONLY
    assert re.findall(r"-([\d.]+B)", name)[:1] == re.findall(r"-([\d.]+B)", like)[:1]
    found = parameters.parameters(architecture.counted(catalog.content(name)))
    expected = parameters.parameters(architecture.counted(catalog.content(like)))
    assert found == PUBLISHED_VARIANTS.get(name, expected)
    assert catalog.variants()[name].keys() <= {"like", *READ, *catalog.content(like)}


def test_every_model_is_there_and_installed_with_the_package(project: Path) -> None:
    every = PUBLISHED | PLANNED_ONLY | ROUNDED
    assert set(catalog.names()) == set(every)
    setup = configparser.ConfigParser()
    setup.read(project / "setup.cfg")
    (pattern,) = setup["options.package_data"]["gspo_hpc.models"].split()
    assert len([*(project / "gspo_hpc" / "models").glob(pattern)]) == len(every) + 2  # and variants, and families


class _Asked(dict[str, Any]):
    """A mapping that knows which of its keys were read."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", catalog.names())
def test_a_shipped_config_has_only_what_is_read(name: str) -> None:
    content = _Asked(catalog.content(name))
    architecture.counted(content)
    assert content.keys() <= content.keys_read


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/scratch/QWEN2.5-7b-instruct/", "Qwen2.5-7B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "Llama-3.1-70B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "Mistral-7B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-Instruct-v0.3"),
        ("meta-llama/Llama-3.2-1B-Instruct", "Llama-3.2-1B"),
        ("meta-llama/Llama-3.2-3B-Instruct", "Llama-3.2-3B"),
        ("Qwen/Qwen3-30B-A3B-FP8", "Qwen3-30B-A3B-FP8"),
        ("Qwen/Qwen2.5-Math-7B-Instruct", "Qwen2.5-Math-7B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B-Instruct-2507"),
        ("qwen3_30b_a3b_thinking_2507", "Qwen3-30B-A3B-Thinking-2507"),
        ("models/Qwen2_5-7B-Instruct", "Qwen2.5-7B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.3-70B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-R1-Distill-Qwen-7B"),
        ("Qwen/QwQ-32B", "QwQ-32B"),  # sizes of Qwen2.5-32B, by its card and the printed config of the preview
        ("Qwen/QwQ-32B-Preview", "QwQ-32B-Preview"),
        ("Qwen/Qwen3-4B-Instruct-2506", None),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3-VL-30B-A3B"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder-30B-A3B"),
        ("zai-org/GLM-4.6", "GLM-4.6"),
        ("zai-org/GLM-4.5-Air-Base", "GLM-4.5-Air"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-R1"),
        ("moonshotai/Kimi-K2-Instruct", "Kimi-K2"),
        ("deepseek-ai/deepseek-llm-7b-chat", "deepseek-llm-7B"),
        ("deepseek-ai/deepseek-llm-7b-base", "deepseek-llm-7B"),
        ("deepseek-ai/deepseek-math-7b-instruct", "deepseek-math-7B"),
        ("deepseek-ai/deepseek-coder-6.7b-instruct", "deepseek-coder-6.7B"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "SmolLM2-1.7B"),
        ("HuggingFaceTB/SmolLM2-360M", "SmolLM2-360M"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("meta-llama/Llama-2-70b-hf", "Llama-2-70B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("OpenRLHF/Llama-3-8b-sft-mixture", "Llama-3-8B-sft-mixture"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama-1.1B"),
        ("agentica-org/DeepScaleR-1.5B-Preview", "DeepScaleR-1.5B-Preview"),
        ("moonshotai/Kimi-Dev-72B", "Kimi-Dev-72B"),
        ("Qwen/Qwen2-Math-7B-Instruct", "Qwen2-Math-7B"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "Qwen2.5-7B-Instruct-1M"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen3-Coder-480B-A35B"),
        ("Qwen3-30B-A3B/model", None),
        ("Qwen2-57B", None),  # which has the letters of Qwen2.5-7B
        ("Qwen3-17B", None),
        ("Qwen-34B", None),
        ("qwen3_1_7b", "Qwen3-1.7B"),
        ("qwen3-06b", "Qwen3-0.6B"),
        ("", None),
    ],
)
def test_names(path: str, name: str | None) -> None:
    assert catalog.find(path) == name


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("google/gemma-3-27b-it", "Gemma3ForConditionalGeneration"),
        ("google/gemma-2b", "GemmaForCausalLM"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "DeepseekV3ForCausalLM"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "DeepseekV32ForCausalLM"),
        ("deepseek_v3_of_mine", "DeepseekV3ForCausalLM"),
        ("Qwen/Qwen2-VL-7B-Instruct", "Qwen2VLForConditionalGeneration"),
        ("THUDM/glm-4-9b-chat", "ChatGLMModel"),
        ("THUDM/GLM-4-9B-0414", "Glm4ForCausalLM"),
        ("zai-org/GLM-4.5V", "Glm4vMoeForConditionalGeneration"),
        ("Qwen/Qwen2-57B-A14B", None),  # a family that is trained
        ("acme/DeepSeek-V3-Distill-Qwen2.5-7B", None),  # a Qwen2.5
        ("acme/Phi-4-distill-Qwen3-8B", None),
        ("acme/Kimi-K2-Thinking-to-Llama-3.1-8B", None),
        ("acme/gemma-3-12b-it-Claude-Opus-Distill", None),  # a Gemma, but the teacher might stand first
        ("acme/gemma-2-9b-merged", None),
        ("acme/phi-4-vision-mine", None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", None),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", None),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "DeciLMForCausalLM"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", None),
        ("moonshotai/Kimi-K2.5", "KimiK25ForConditionalGeneration"),  # sees, as Kimi-K2 does not
        ("moonshotai/Kimi-K2_5", "KimiK25ForConditionalGeneration"),
        ("deepseek-ai/DeepSeek-V9.1", None),
        ("deepseek-ai/DeepSeek-R1-AWQ", "DeepseekV3ForCausalLM"),
        ("deepseek-ai/DeepSeek-V3.5", None),  # nobody knows what a further version is
        ("deepseek-ai/DeepSeek-V3.1-mine", "DeepseekV3ForCausalLM"),
        ("internlm/internlm2_5-7b-chat", "InternLM2ForCausalLM"),
        ("google/codegemma-7b-it", "GemmaForCausalLM"),
        ("google/paligemma2-3b-pt-224", "PaliGemmaForConditionalGeneration"),
        ("google/medgemma-27b-text-it", "Gemma3ForCausalLM"),
        ("microsoft/Phi-3-vision-128k-instruct", "Phi3VForCausalLM"),
        ("microsoft/Phi-4-mini-flash-reasoning", "Phi4FlashForCausalLM"),
        ("THUDM/glm-4-9b-chat-hf", "GlmForCausalLM"),
        ("Qwen/Qwen3.5-99B-A9B", "Qwen3_5MoeForConditionalGeneration"),
        ("HuggingFaceTB/SmolLM3-3B", "SmolLM3ForCausalLM"),
        ("tiiuae/Falcon3-7B-Instruct", None),  # a Llama
        ("01-ai/Yi-34B-Chat", None),
        ("allenai/OLMo-2-1124-7B-Instruct", "Olmo2ForCausalLM"),
        ("Qwen/Qwen3-8B", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("google/gemma-200b", None),
        ("", None),
    ],
)
def test_families_that_are_known_by_name(path: str, family: str | None) -> None:
    found = catalog.family(path)
    assert (found and found.architecture) == family
    assert (architecture.untrained(path, "own") is None) is (family is None)


def test_no_family_that_is_known_by_name_is_one_that_is_trained() -> None:
    families = json.loads((catalog._FOLDER / "families.json").read_text("utf-8"))
    assert all(catalog.family(name) is not None for name in families)
    for name, (family, kind) in families.items():
        assert family not in architecture.SUPPORTED and kind in ("text", "vision", "audio"), name
    trained = [name for name in catalog.names() if architecture.untrained(name, "own") is None]
    assert trained and not any(catalog.family(name) for name in trained)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("acme/DeepSeek-V3-Distill-Qwen2.5-7B", "Its name names deepseek-v3 and qwen2.5: only its config.json tells"),
        ("acme/Qwen3-8B-Kimi-K2-Distill", "Its name names qwen3 and kimi"),
        ("acme/gemma-2-9b-merge", "Its name says that it is made of other models (merge)"),
        ("acme/phi-4-vl", "Its name says that it is more than a text model (vl)"),
    ],
)
def test_a_name_of_two_families_is_left_open_and_the_file_decides(path: str, told: str, tmp_path: Path) -> None:
    """It is planned without sizes, and not refused: whoever has the folder gets an answer from it."""
    plan = make_plan(of(path))
    assert plan.valid and not plan.not_run and plan.unknown_model == path and architecture.find(of(path)) is None
    assert any(told in note for note in plan.notes)
    folder = tmp_path / Path(path).name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(catalog.content("Qwen2.5-7B")))
    there, arch = make_plan(of(str(folder))), architecture.find(of(str(folder)))
    assert arch is not None and arch.family == "Qwen2ForCausalLM" and there.notes == () and not there.not_run


def test_a_file_without_an_architecture_says_which_to_add() -> None:
    content = dict(catalog.content("Qwen3-8B")) | {"model_type": "qwen3"}
    content.pop("architectures")
    with pytest.raises(ValueError, match=r'model_type qwen3: add "architectures": \["Qwen3ForCausalLM"\]'):
        architecture.parse(content)
    with pytest.raises(ValueError, match="architecture None is not supported"):
        architecture.parse(content | {"model_type": "other"})


def test_a_family_that_a_bridge_may_know() -> None:
    """Text models may be trained through a bridge, so nothing is known of them; what sees is refused by name."""
    assert architecture.untrained("google/gemma-2-9b", "mcore_bridge") is None
    told = architecture.untrained("google/gemma-3-27b-it", "mcore_bridge")
    assert told is not None and "only text models are trained" in told


def of(path: str, **sections: Any) -> Config:
    return from_dict({"model": {"path": path}, **sections})


def test_a_plan_of_a_model_that_is_not_there_uses_the_shipped_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = of("models/qwen2.5-7B-Instruct", cluster={"gpus_per_node": 8}, rollout={"tensor_parallel_size": 8})
    plan = make_plan(config)
    assert [item.message for item in plan.broken] == [
        "num_attention_heads (28) of the model must be divisible by rollout.tensor_parallel_size (8)",
    ]
    (note,) = [text for text in plan.notes if "does not exist" in text]
    assert "uses the config of Qwen2.5-7B" in note and "A run needs the folder itself" in note
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (note,) = [text for text in make_plan(of("Qwen/Qwen2.5-7B-Instruct")).notes if "Qwen2.5-7B" in text]
    assert note.startswith("Qwen/Qwen2.5-7B-Instruct is not in the cache of the hub: this plan uses the config of")
    assert note.endswith("A run downloads the model.")
    assert str(search.find(config)[0]) == "rollout.tensor_parallel_size=4"
    arch = architecture.find(config)
    assert arch is not None and arch.num_layers == 28
    with pytest.raises(ValueError, match="has no config.json"):  # what a run reads
        architecture.read("models/qwen2.5-7B-Instruct")
    too_long = of("Qwen/Qwen2.5-7B", rollout={"max_response_length": 32768})
    assert "must fit max_position_embeddings (32768)" in make_plan(too_long).broken[0].message
    lengths = {fix.changes[0].key for fix in search.find(too_long)}
    assert "rollout.max_response_length" in lengths


def test_a_folder_that_is_there_is_read_itself(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    config = of(str(folder))
    assert architecture.find(config) is None
    (note,) = make_plan(config).notes
    assert note == (
        f"{folder / 'config.json'} is not there: heads, layers, experts and positions of the model are not checked, "
        "nor whether this version trains it. A local folder with the model's config.json makes both known."
    )
    own = catalog.content("Qwen3-8B") | {"num_hidden_layers": 7}
    (folder / "config.json").write_text(json.dumps(own))
    arch = architecture.find(config)
    assert arch is not None and arch.num_layers == 7 and make_plan(config).notes == ()
    for text in ("{", "[]", '{"architectures": ["GPT2LMHeadModel"]}', '{"architectures": 3}'):
        (folder / "config.json").write_text(text)
        assert architecture.find(config) is None
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        assert "is not a readable JSON object" in make_plan(config).broken[0].message


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_another(tmp_path: Path) -> None:
    path = f"{tmp_path}/{'x' * 300}/Qwen3-8B"  # a name that no file system allows
    assert "is not a readable JSON object" in make_plan(of(path)).broken[0].message
    assert architecture.find(of(path)) is None


def test_a_name_that_is_not_known_gets_the_nearest() -> None:
    (note,) = make_plan(of("Qwen/Qwen3-80B")).notes
    assert "makes both known. Nearest model whose config comes with gspo_hpc: Qwen3-8B." in note
    (note,) = make_plan(of("somewhere/else")).notes
    assert note.endswith("makes both known.")
    assert architecture.find(of("Qwen/Qwen3-80B")) is None and architecture.find(Config()) is None
