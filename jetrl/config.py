"""The whole configuration of a run: typed, small, and checked before anything is loaded.

A run is described by one YAML file plus `key=value` overrides. Unknown keys are refused with the nearest known name, so
a typo never becomes a silently ignored option. The resolved configuration is saved in the run folder. This module
imports no torch: `jetrl --help`, editors and launchers can load it in milliseconds.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

FlowName = Literal["fp8", "bf16", "fp8_rollout"]
KVCacheName = Literal["bf16", "fp8"]
DeviceName = Literal["auto", "cpu", "cuda"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would read `steps: yes` as 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("a truth value where a number or a text is wanted; put a text such as 'on' in quotes")
        return value


class TaskConfig(_Section):
    """What is asked and how an answer is judged."""

    name: str = Field(default="arithmetic", description="arithmetic, countdown, math, reasoning_gym:NAME or path.py:function")
    data: str | list[str] | None = Field(
        default=None, description="training problems: JSONL, parquet, or a Hugging Face dataset NAME:SUBSET@SPLIT; or several"
    )
    eval_data: str | list[str] | None = Field(
        default=None, description="held-out problems, one source or several; default: a disjoint part of `data`"
    )
    template: Literal["raw", "chat"] = Field(default="raw", description="plain text, or the tokenizer's chat template")
    shots: int = Field(default=0, ge=0, le=64, description="worked examples put before each prompt")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the task itself")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="longer prompts are left out and counted")


class RolloutConfig(_Section):
    """How completions are sampled, and what the engine may hold at once."""

    prompts_per_step: int = Field(default=16, ge=1, description="prompts of one step")
    group_size: int = Field(default=8, ge=1, description="completions per prompt")
    max_completion_tokens: int = Field(default=256, ge=1, description="limit of a completion")
    temperature: float = Field(default=1.0, gt=0.0, description="divides the logits, in sampling and in training")
    max_sequences: int = Field(default=256, ge=1, description="sequences decoded together")
    max_batch_tokens: int | None = Field(
        default=None, ge=1, description="tokens of one engine step, prefill chunks included; default: 2048, 8192 on a GPU"
    )
    cache_tokens: int | None = Field(
        default=None, ge=1, description="KV cache size; default: all running sequences at full length, or what fits on the GPU"
    )
    block_size: int = Field(default=64, ge=1, description="tokens of one KV cache block")


class AlgorithmConfig(_Section):
    """GRPO and its options. The defaults are DAPO's: token-mean loss, a wider upper clip, no KL."""

    advantage: Literal["grpo", "dr_grpo"] = Field(default="grpo", description="dr_grpo: no division by the group's deviation")
    loss: Literal["token_mean", "sequence_mean", "dr_grpo"] = Field(
        default="token_mean", description="how token losses are averaged"
    )
    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0, description="the importance ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(default=0.28, ge=0.0, description="and above at 1 + clip_high")
    kl_coef: float = Field(default=0.0, ge=0.0, description="weight of the k3 KL to the initial model")
    importance_cap: float | None = Field(
        default=None, gt=0.0, description="truncated importance sampling; only in flow fp8_rollout"
    )
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps on each batch of rollouts")
    mask_truncated: bool = Field(default=False, description="take completions that hit the length limit out of the loss")


class OptimizerConfig(_Section):
    """AdamW on high-precision masters, and how its memory is spent."""

    lr: float = Field(default=1e-6, gt=0.0, description="peak learning rate")
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="AdamW: decay of the mean")
    beta2: float = Field(default=0.99, ge=0.0, lt=1.0, description="AdamW: decay of the mean square")
    eps: float = Field(default=1e-8, gt=0.0, description="AdamW: added to the root of the mean square")
    weight_decay: float = Field(default=0.0, ge=0.0, description="AdamW: of matrices only")
    grad_clip: float = Field(default=1.0, gt=0.0, description="maximum L2 norm of the whole gradient")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warmup")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="what follows the warmup: constant, or to 0 by the end"
    )
    moments: Literal["fp32", "fp8", "int8"] = Field(
        default="fp32", description="AdamW's moments; fp8 and int8, through torchao, take a quarter of the memory"
    )
    masters: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="the optimizer's copy of the weights; bf16 rounds stochastically, with quantised moments only",
    )
    microbatch_tokens: int = Field(default=8192, ge=1, description="tokens of one forward and backward pass")
    recompute_layers: int | None = Field(
        default=None, ge=0, description="layers that the backward computes anew; default: none, on a GPU as many as memory asks"
    )


class EvalConfig(_Section):
    """Held-out evaluation: avg@k and pass@k before, during and after training."""

    every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only before and after")
    prompts: int = Field(default=64, ge=0, description="held-out prompts; 0 turns evaluation off")
    samples: int = Field(default=1, ge=1, description="k of avg@k and pass@k")
    temperature: float | None = Field(default=None, ge=0.0, description="default: the rollout's; 0 is greedy")


class RunConfig(_Section):
    """One run of `jetrl train`."""

    model: str = Field(
        default="demo", description="a Hugging Face folder or hub id, `smollm2`, or `demo`, the model that ships with jetrl"
    )
    flow: FlowName = Field(default="fp8", description="precision flow: fp8, bf16, or the mismatched baseline fp8_rollout")
    kv_cache: KVCacheName = Field(
        default="bf16", description="keys and values, and attention's products: bf16, or fp8 (training's forward too)"
    )
    device: DeviceName = Field(
        default="auto", description="where the model runs: `auto` takes a Hopper GPU if there is one, else the `cpu`; or `cuda`"
    )
    steps: int = Field(default=100, ge=1, description="steps of the run: rollout, then training on it")
    seed: int = Field(default=0, ge=0, description="decides problems, their order and every sample")
    folder: str | None = Field(default=None, description="run folder; default: runs/<time>-<flow>")
    save_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0: only the last")
    on_mismatch: Literal["stop", "continue"] = Field(default="stop", description="what a mismatch in an exact flow does")
    loggers: list[Literal["tensorboard", "wandb", "trackio"]] | None = Field(
        default=None, description="where metrics go besides the run folder's files; default: tensorboard where it is installed"
    )
    task: TaskConfig = Field(default_factory=TaskConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        r, a = self.rollout, self.algorithm
        if r.group_size == 1:
            raise ValueError(
                "rollout.group_size is 1: a group of one has advantage 0 and nothing would be learned. Use 2 or more."
            )
        if a.importance_cap is not None and self.flow != "fp8_rollout":
            raise ValueError(
                f"algorithm.importance_cap is {a.importance_cap} in flow {self.flow!r}, where rollout and trainer agree to "
                "the bit and there is nothing to correct. Remove it, or use flow=fp8_rollout."
            )
        if self.optimizer.masters == "bf16" and self.optimizer.moments == "fp32":
            raise ValueError(
                "optimizer.masters is 'bf16' with optimizer.moments 'fp32': who has room for FP32 moments has it for FP32 "
                "masters. Use optimizer.moments=fp8 (or int8), or optimizer.masters=fp32."
            )
        if r.prompts_per_step % a.updates_per_step:
            raise ValueError(
                f"rollout.prompts_per_step ({r.prompts_per_step}) must be a multiple of algorithm.updates_per_step "
                f"({a.updates_per_step}), so that each update gets whole groups."
            )
        longest = self.task.max_prompt_tokens + r.max_completion_tokens
        if r.cache_tokens is not None and r.cache_tokens < longest:
            raise ValueError(
                f"rollout.cache_tokens is {r.cache_tokens}, but one sequence can need {longest} (task.max_prompt_tokens "
                f"{self.task.max_prompt_tokens} + rollout.max_completion_tokens {r.max_completion_tokens}). Raise "
                f"cache_tokens to {longest} or more, or lower the other two."
            )
        return self


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the configuration, in the order in which it is declared."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys += known_keys(annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _sections() -> list[str]:
    fields = RunConfig.model_fields.items()
    return [name for name, info in fields if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)]


def _nearest(key: str) -> str:
    """The known key or section that `key` most likely meant: same last name first, then the most similar spelling."""
    keys = known_keys()
    leaf = key.rsplit(".", 1)[-1]
    leaves = [known.rsplit(".", 1)[-1] for known in keys]
    if leaf in leaves:
        return keys[leaves.index(leaf)]
    section = key.partition(".")[0]
    near = difflib.get_close_matches(leaf, [*leaves, *_sections()], n=1, cutoff=0.6)
    if near:
        same = [k for k, known in zip(keys, leaves, strict=True) if known == near[0]] or near
        return next((k for k in same if k.startswith(section + ".")), same[0])
    within = [k for k in keys if k.startswith(section + ".")] or keys
    return difflib.get_close_matches(key, within, n=1, cutoff=0.0)[0]


def _set_dotted(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        child = tree.get(parent)
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            raise ValueError(f"override {key!r}: {parent!r} is {child!r}, not a section")
        tree = child
    tree[leaf] = value


_CUTS_THE_SUPPORT = ("top_p", "top_k", "min_p")  # known elsewhere; log-probabilities of a cut support are not the policy's


def _explain(error: ValidationError, source: str) -> str:
    lines = [f"{source} is not a valid configuration:"]
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        seen = "" if not key else f" (seen: {item['input']!r})"
        if item["loc"][-1:] in [(name,) for name in _CUTS_THE_SUPPORT]:
            lines.append(
                f"  {key} is refused: it samples from another distribution than the one that is trained. Leave it out."
            )
        elif item["type"] == "extra_forbidden":
            lines.append(f"  unknown key {key!r}; did you mean {_nearest(key)!r}?")
        elif key in _sections():
            first = next(k for k in known_keys() if k.startswith(key + "."))
            lines.append(f"  {key} is a section: give its keys, for instance {first}=...{seen}")
        else:
            where = f"{key}: " if key else ""
            lines.append(f"  {where}{item['msg'].removeprefix('Value error, ')}{seen}")
    return "\n".join(lines)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-5` as a text and takes the last of two equal keys; here it is a number, and they are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_SCIENTIFIC = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))


def _read_yaml(text: str, source: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from None
    finally:
        loader.dispose()


def parse_config(tree: dict[str, Any], source: str = "config") -> RunConfig:
    """Build a RunConfig from nested dictionaries. Raises ValueError that names each bad key and what is wanted."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ValueError(_explain(error, source)) from None


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file and apply `key=value` overrides (dotted keys, YAML values).

    Raises ValueError for a missing file, a file that is not a mapping, an override without `=`, and any bad key or value.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no configuration file at {str(path)!r}. Give the path of a YAML file, e.g. configs/quickstart.yaml")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); a YAML file is wanted") from None
    tree = _read_yaml(text, str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}; a mapping of keys to values is wanted")
    for override in overrides or []:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"override {override!r} is not key=value; write, for instance, flow=bf16")
        _set_dotted(tree, key.strip(), _read_yaml(value, f"override {override!r}"))
    for section in _sections():  # a section whose lines are all commented out
        if section in tree and tree[section] is None:
            tree[section] = {}
    return parse_config(tree, str(path))


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved configuration, every default included, as YAML."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    Path(path).write_text(text, encoding="utf-8")
