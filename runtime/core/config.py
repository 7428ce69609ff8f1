"""Every option, declared once: name, default, help and check. The command line, the README's table and
/server_info are made from this dataclass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapless.runtime.core.errors import ConfigError

CHAT_TEMPLATES = ("chatml", "gemma", "llama-3", "mistral")  # that come with us
TOOL_FORMATS = ("auto", "hermes", "llama3", "mistral", "qwen25")
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), low: float | None = None, secret: bool = False
) -> Any:
    """A field with its help; `choices` or the least value are checked in `ServerConfig.__post_init__`.

    A `secret` (a key, or where it lies) is never shown.
    """
    metadata = {"help": help, "choices": choices, "low": low, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    model_path: str = option("demo", "Hugging Face directory, GGUF file, `demo` or `toy`")
    served_model_name: str = option("", "name in the API; empty: the model path")
    host: str = option("127.0.0.1", "address to bind; the default is for this machine alone")
    port: int = option(30000, "port to bind; 0 picks a free one", low=0)
    device: str = option(
        "auto",
        "where the model runs; auto: the CPU; cuda: not yet tried on a GPU; sim: a simulated GPU, for the toy model",
        choices=("auto", "cpu", "cuda", "sim"),
    )
    sim_device: str = option("H100", "GPU that --device sim simulates", choices=("A100", "H100", "H200"))
    sim_model: str = option(
        "llama-3-8b",
        "whose step times --device sim takes: gemma-3-270m, qwen3-0.6b, llama-3-8b, llama-3-70b, or a model's path",
    )
    dtype: str = option(
        "auto",
        "weights and KV; auto: bfloat16 where the device has instructions for it",
        choices=("auto", "bfloat16", "float32"),
    )
    attention_backend: str = option(
        "auto", "native: compiled C kernels; torch: portable", choices=("auto", "native", "torch")
    )
    cpu_threads: int = option(0, "threads of the CPU device; 0: one a core", low=0)
    context_length: int = option(0, "longest prompt plus output, tokens; 0: the model's own", low=0)
    page_size: int = option(16, "tokens in a KV page, 1 to 64", low=1)
    max_total_tokens: int = option(0, "tokens in the KV pool; 0: from --mem-fraction-static", low=0)
    mem_fraction_static: float = option(
        0.5, "share of the free memory after loading that the KV pool may take"
    )
    max_running_requests: int = option(256, "requests in one batch", low=1)
    max_queued_requests: int = option(8192, "requests alive at once in the server; more get 503", low=1)
    chunked_prefill_size: int = option(512, "prompt tokens of one request in a step", low=1)
    max_num_batched_tokens: int = option(1024, "tokens in a step, decode and prefill together", low=1)
    schedule_policy: str = option(
        "lpm",
        "order of the queue: longest cached prefix first (it ages), heaviest prefix tree first, first come, "
        "longest output first, random, priority (higher first; it preempts for pages)",
        choices=("lpm", "dfs-weight", "fcfs", "lof", "random", "priority"),
    )
    disable_radix_cache: bool = option(False, "do not reuse prefixes")
    radix_eviction_policy: str = option(
        "lru",
        "which unused prefix goes first: least recently used, least often used, segmented LRU, "
        "lowest priority, oldest",
        choices=("lru", "lfu", "slru", "priority", "fifo"),
    )
    preemption: str = option(
        "recompute",
        "what becomes of a preempted request's KV: computed again, moved to host memory, or the cheaper of the two",
        choices=("recompute", "swap", "auto"),
    )
    swap_space: float = option(4.0, "GiB of host memory for the KV of preempted requests", low=0)
    disable_overlap_schedule: bool = option(False, "wait for each step before preparing the next")
    num_scheduler_steps: int = option(1, "device steps launched from one composition of the batch", low=1)
    chat_template: str = option(
        "",
        "template of /v1/chat/completions: chatml, gemma, llama-3, mistral, or a Jinja file; empty: the model's own",
    )
    tool_call_parser: str = option(
        "auto",
        "form in which the model calls tools; auto: seen from the chat template; qwen25 is hermes by SGLang's name",
        choices=TOOL_FORMATS,
    )
    trace: str = option("", "file to write a Chrome trace of the loop and the device to")
    stream_interval: int = option(1, "least number of new tokens between two events of a stream", low=1)
    incremental_streaming_output: bool = option(
        False, "stream deltas; default: cumulative text, as SGLang does"
    )
    grammar_backend: str = option(
        "llguidance",
        "what keeps an output to a JSON schema, regex or EBNF; none: such requests are refused, and loading is faster",
        choices=("llguidance", "none"),
    )
    grammar_timeout: float = option(5.0, "seconds that checking one grammar may take", low=0.1)
    watchdog_timeout: float = option(300.0, "seconds after which a device step counts as hung; fatal", low=1)
    drain_timeout: float = option(30.0, "seconds that open requests get to finish after SIGTERM", low=0)
    max_body_bytes: int = option(16 << 20, "largest HTTP request body", low=1024)
    max_batch_requests: int = option(1024, "largest batch in one HTTP request", low=1)
    strict_fields: bool = option(False, "refuse requests with unknown fields; default: ignore those")
    api_key: str = option(
        "",
        "key that clients must send, on every route but /health; better GAPLESS_API_KEY or --api-key-file: "
        "an argument shows in the process list until the server has started",
        secret=True,
    )
    api_key_file: str = option("", "file that holds the API key", secret=True)
    admin_api_key: str = option(
        "",
        "key for flushes, aborts of all requests and the like; without it they take the API key, and are off on an "
        "address other than loopback; better GAPLESS_ADMIN_API_KEY or --admin-api-key-file",
        secret=True,
    )
    admin_api_key_file: str = option("", "file that holds the admin key", secret=True)
    random_seed: int = option(0, "seed of requests that bring none; 0: from the system")
    toy: str = option("", "knobs of the toy model, KEY=VALUE,...")
    log_level: str = option("info", "least level logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, name = getattr(self, item.name), flag(item.name)
            choices, low = item.metadata["choices"], item.metadata["low"]
            if type(value) not in _TYPES[str(item.type)]:
                raise ConfigError(f"{name} {value!r}: must be of type {item.type}", param=item.name)
            if choices and value not in choices:
                raise ConfigError(f"{name} {value!r}: must be one of {', '.join(choices)}", param=item.name)
            if low is not None and not value >= low:
                raise ConfigError(f"{name} {value}: must be at least {low:g}", param=item.name)
        self._check_together()

    def _check_together(self) -> None:
        def refuse(message: str, param: str) -> None:
            raise ConfigError(message, param=param)

        if self.device == "sim" and self.model_path != "toy":
            refuse("--device sim computes no model: give --model-path toy", "device")
        if self.page_size > 64:
            refuse(f"--page-size {self.page_size}: must be at most 64", "page_size")
        if self.port > 65535:
            refuse(f"--port {self.port}: must be at most 65535", "port")
        if not 0 < self.mem_fraction_static < 1:
            refuse(
                f"--mem-fraction-static {self.mem_fraction_static}: must be between 0 and 1",
                "mem_fraction_static",
            )
        if self.max_num_batched_tokens < self.max_running_requests:
            refuse(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than --max-running-requests "
                f"{self.max_running_requests}: a step must hold one token of every running request",
                "max_num_batched_tokens",
            )
        if self.toy and self.model_path != "toy":
            refuse(f"--toy {self.toy}: only for --model-path toy, not {self.model_path}", "toy")
        if self.model_path == "toy" and self.device == "cuda":
            refuse("--device cuda: the toy model runs on the CPU (or on --device sim)", "device")
        if self.chat_template not in ("", *CHAT_TEMPLATES) and not Path(self.chat_template).is_file():
            refuse(
                f"--chat-template {self.chat_template}: neither a file nor one of {', '.join(CHAT_TEMPLATES)}",
                "chat_template",
            )
        if self.max_total_tokens and self.max_total_tokens < self.page_size:
            refuse(
                f"--max-total-tokens {self.max_total_tokens} is less than --page-size {self.page_size}",
                "max_total_tokens",
            )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    def public(self) -> dict[str, Any]:
        """The options that may be shown to anyone: all but the secrets."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata["secret"]}

    def without_secrets(self) -> ServerConfig:
        return ServerConfig(**self.public())


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
