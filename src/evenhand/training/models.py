"""Loading the policy: model, tokenizer, device, precision, adapters, reference."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evenhand.core.errors import ConfigError, require
from evenhand.training.config import ModelSection
from evenhand.world.policy import WARMSTART

torch: Any = require("torch", "train", "training")

Model = Any

TOY = "toy"
"""Name of the warm start that comes with the package."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A policy ready to sample and to train.

    Attributes:
        model: a causal language model, perhaps under an adapter.
        tokenizer: of transformers.
        device: where the model lives.
        is_bf16: whether forward passes run under bf16 autocast.
        has_adapter: whether a LoRA adapter is trained instead of the weights.
    """

    model: Model
    tokenizer: Any
    device: Any
    is_bf16: bool
    has_adapter: bool

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Make the context of a forward pass."""
        if not self.is_bf16:
            return nullcontext
        return partial(torch.autocast, self.device.type, dtype=torch.bfloat16)

    def trainable(self) -> dict[str, Any]:
        """Return the parameters that are trained by name; tied ones stand once."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}


def load_model(section: ModelSection, *, seed: int = 0) -> LoadedModel:
    """Load the policy in float32 on its device, dropout off.

    Dropout is switched off because the sampler has none: with it the probability ratio would be
    noise. The random numbers of a new adapter come from `seed`.

    Raises:
        ConfigError: no such model, no tokenizer beside it, no such device, or an adapter that does
            not fit.
        MissingExtraError: peft is needed and not installed.
    """
    path = model_path(section.path)
    device = pick_device(section.device)
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(path)
    transformers = require("transformers", "train", "training")
    options = {} if section.attention is None else {"attn_implementation": section.attention}
    with _plain_errors(f"model {section.path!r} cannot be loaded"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, **options
        )
    if section.lora.rank:
        model = _with_adapter(model, section)
    _switch_dropout_off(model)
    with _plain_errors(f"device {device} cannot be used"):
        model.to(device)
    if section.gradient_checkpointing:
        with _plain_errors("gradient checkpointing cannot be switched on"):
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        # transformers recomputes in training mode only; without dropout it changes nothing else.
        model.train()
    else:
        model.eval()
    is_bf16 = section.precision == "bf16" or (section.precision == "auto" and device.type == "cuda")
    return LoadedModel(model, tokenizer, device, is_bf16, bool(section.lora.rank))


def model_path(path: str) -> str:
    """Return the folder or hub name to load; `toy` is the warm start of the package.

    Raises:
        ConfigError: a path that looks like a folder and is none.
    """
    if path == TOY:
        return str(WARMSTART)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if looks_local:
        raise ConfigError(f"model.path {path!r} is no folder; give a folder with config.json and "
                          "weights, or the name of a model on the hub")  # fmt: skip
    return path


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer beside a model.

    Raises:
        ConfigError: there is none.
    """
    transformers = require("transformers", "train", "training")
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a missing file surfaces as one of many kinds
        raise ConfigError(
            f"model {path!r} has no tokenizer that transformers can load ({_first_line(error)}); "
            "put tokenizer.json and tokenizer_config.json beside config.json"
        ) from error


def pick_device(name: str) -> Any:
    """Return the torch device; `auto` is the first GPU, else Apple's, else the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        has_mps = getattr(torch.backends, "mps", None) and torch.backends.mps.is_available()
        return torch.device("mps" if has_mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"model.device {name!r} is no device; use auto, cpu, cuda, cuda:1 or mps"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name!r} and torch sees no GPU; use auto or cpu")
    return device


def _with_adapter(model: Model, section: ModelSection) -> Model:
    peft = require("peft", "lora", "training a LoRA adapter")
    lora = section.lora
    with _plain_errors("the LoRA adapter does not fit the model"):
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules=lora.targets,
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(model, config)


def _switch_dropout_off(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Attention layers hold their rate as a plain number.
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # What peft and transformers deprecate of each other is nothing a user can act on.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Reference:
    """The policy that training started from, for the KL term.

    Under an adapter it is the model with the adapter switched off, else a frozen copy: make it
    before a checkpoint is loaded.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._copy = None
        if not loaded.has_adapter:
            self._copy = copy.deepcopy(loaded.model).eval().requires_grad_(False)

    @contextmanager
    def model(self) -> Iterator[Model]:
        """Yield the reference; the policy must not be used meanwhile."""
        if self._copy is not None:
            yield self._copy
        else:
            with self._loaded.model.disable_adapter():
                yield self._loaded.model


def merged(loaded: LoadedModel) -> Model:
    """Return an ordinary model of transformers, the adapter folded into its weights."""
    return loaded.model.merge_and_unload() if loaded.has_adapter else loaded.model
