"""`mpjax serve`: a server with OpenAI's protocol."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import ipaddress
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from mpjax.cli import listening, options, output, processes
from mpjax.serve.garbage import short_collections

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from starlette.applications import Starlette

    import mpjax

NAME = "serve"
EPILOG = """\b
Examples:
  mpjax serve --model Qwen3-8B-AWQ --precision W4A16KV8
  mpjax serve --model Qwen3-8B-AWQ --slots 8 --speculate ngram:4:3
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "def f(x):", "max_tokens": 32, "temperature": 0}'

\b
POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings,
/v1/score, /v1/rerank, /tokenize and /detokenize, GET /v1/models, /health and
/metrics. With --max-adapters, POST /v1/load_lora_adapter and
/v1/unload_lora_adapter. Texts come whole, or as server-sent events
("stream": true). Besides OpenAI's keys there are top_k, min_p,
repetition_penalty, min_tokens, stop_token_ids, allowed_token_ids, bad_words,
structured_outputs, priority and, for chats, chat_template_kwargs. suffix is
refused.
logprobs and top_logprobs are up to 20. With "echo" an answer also has the
prompt's log-probabilities, as lm_eval's local-completions needs:
  lm_eval --model local-completions --tasks arc_easy --model_args \\
    base_url=http://localhost:8000/v1/completions,model=NAME,\\
tokenizer=FOLDER,tokenized_requests=True

\b
The server listens on this machine alone unless --host says otherwise. Set
MPJAX_API_KEY to a key that clients have to give. It needs two packages:
pip install starlette uvicorn

\b
A model that is divided among the devices of two machines, a command on each:
  mpjax serve --model M --processes 2 --process 0 --coordinator 10.0.0.1:12355
  mpjax serve --model M --processes 2 --process 1 --coordinator 10.0.0.1:12355
"""


class LogLevel(enum.StrEnum):
    """The lowest level of log lines that are written."""

    debug = enum.auto()
    info = enum.auto()
    warning = enum.auto()
    error = enum.auto()


Name = Annotated[
    str | None,
    typer.Option(show_default=False, help="The model's name for clients; its folder's by default."),
]
Slots = Annotated[
    int | None,
    typer.Option(min=1, show_default="64, on a CPU 8", help="The most requests at a time."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        show_default="the model's positions",
        help="The most tokens of a request, its prompt's and new ones.",
    ),
]
CompileFirst = Annotated[
    bool,
    typer.Option(
        "--compile-first",
        help="Compile all programs before listening, so that no request waits for it.",
    ),
]
MaxWaiting = Annotated[
    int, typer.Option(min=1, help="Requests that may wait; others are refused (503).")
]
MaxBody = Annotated[
    int, typer.Option(min=1, help="The most bytes of a body; longer ones are refused (413).")
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="MPJAX_API_KEY", show_default=False, help="Key that clients have to give."),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        show_default="none",
        help="A web page's origin (https://example.org) whose scripts may read answers; may "
        "be repeated.",
    ),
]
MaxAdapters = Annotated[
    int,
    typer.Option(
        min=0,
        help="Adapters that there may be at once, of which clients load and unload some from "
        "folders of this machine; 0: they may not.",
    ),
]
MaxAdapterRank = Annotated[
    int, typer.Option(min=1, help="The rank for which memory is reserved with --max-adapters.")
]
IgnoreUnknown = Annotated[
    bool,
    typer.Option(
        "--ignore-unknown",
        help="Ignore keys of requests that the server does not know; else they are refused.",
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option(
        help="What is logged to stderr: with info, a line for each request; with warning, for "
        "those that are refused or fail; with error, for those that fail."
    ),
]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="Write each line of the log as an object of JSON.")
]


def command(
    model: options.Model = None,
    precision: options.PrecisionText = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    name: Name = None,
    slots: Slots = None,
    cache_memory: options.CacheMemory = None,
    max_tokens: MaxTokens = None,
    chunk_tokens: options.ChunkTokens = None,
    max_gap: options.MaxGap = None,
    compile_first: CompileFirst = False,
    speculate: options.Speculate = None,
    max_waiting: MaxWaiting = 1000,
    max_body: MaxBody = 8 << 20,
    api_key: ApiKey = None,
    allow_origin: AllowOrigin = None,
    ignore_unknown: IgnoreUnknown = False,
    adapter: options.AdapterList = None,
    max_adapters: MaxAdapters = 0,
    max_adapter_rank: MaxAdapterRank = 16,
    log_level: LogLevelOption = LogLevel.info,
    log_json: LogJson = False,
    dtype: options.ComputeDtype = None,
    max_positions: options.MaxPositions = None,
    devices: options.DeviceCount = 1,
    experts: options.Experts = options.ExpertsKind.divided,
    process_count: processes.Count = 1,
    process: processes.Number = 0,
    coordinator: processes.Coordinator = None,
) -> None:
    """Serve a model under OpenAI's protocol."""
    _require_usage(host, api_key)
    if process_count > 1 and max_adapters:
        raise ValueError("--max-adapters needs one process: name the adapters with --adapter")
    sockets = [] if process else listening.bind(host, port)
    try:
        if (leader := processes.join(process_count, process, coordinator)) and devices == 1:
            devices = processes.all_devices()
        head = options.head_options(speculate)
        lm = options.load(model, precision, dtype, max_positions, devices, experts, **head)
        if max_adapters:
            lm.reserve_adapters(max_adapters, max_adapter_rank)
        from mpjax.loading import find_folder

        for own, folder in options.parse_adapters(adapter).items():
            lm.add_adapter(own, find_folder(folder))
        lm.require_tokenizer()

        import mpjax
        from mpjax.serve.application import Limits, application

        engine = mpjax.Engine(
            lm,
            slots=slots,
            cache_memory=cache_memory,
            max_tokens=max_tokens,
            chunk_tokens=chunk_tokens,
            max_gap=max_gap,
            speculate=options.parse_speculate(speculate),
        )
        if compile_first:
            with output.status("Compiling"):
                engine.compile()
        if leader is not None and process:
            processes.follow(engine, leader)
            return
        if leader is not None:
            engine.lead(leader)
        limits = Limits(max_waiting, max_body, api_key, ignore_unknown, max_adapters)
        name = name or lm.source.resolve().name
        served = application(engine, name, limits, origins=allow_origin or ())
        url = listening.listen(sockets, host)
        with _log(log_level, log_json), short_collections():
            at_once = f"{engine.slots} requests at a time, a cache of {engine.capacity:,} tokens"
            logging.getLogger("mpjax.serve").info(f"{name}: {at_once}; listening on {url}")
            _run(served, sockets, engine)
    finally:
        listening.close(sockets)


def _require_usage(host: str, api_key: str | None) -> None:
    """Raises an error for a missing package or empty key; notes a public host without a key."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"the server needs {package}, which is missing: pip install starlette uvicorn"
            )
    if api_key == "":
        raise typer.BadParameter("--api-key is empty: give a key, or leave it out")
    if api_key is None and not _is_loopback(host):
        output.note(f"mpjax: anybody who reaches {host} can use the model: no API key is set")


class _Notes(logging.Handler):
    """Writes each log record as a note."""

    def emit(self, record: logging.LogRecord) -> None:
        output.note(self.format(record))


@contextlib.contextmanager
def _log(level: LogLevel, as_json: bool) -> Iterator[None]:
    """Writes the logs of all libraries to stderr, and the server's from a level on."""
    from mpjax.serve.logs import LOGGER, Lines

    handler = _Notes(level.upper())
    handler.setFormatter(Lines(as_json))
    logging.getLogger().addHandler(handler)
    LOGGER.setLevel(level.upper())
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _run(served: Starlette, sockets: Sequence[socket.socket], engine: mpjax.Engine) -> None:
    """Serves until Ctrl-C or a signal, or until one of several processes is lost.

    Exits with code 1 if the server could not start, or a process is lost.
    """
    import uvicorn

    async def look() -> None:
        server.should_exit |= engine.lost_process is not None

    config = uvicorn.Config(
        served,
        log_config=None,
        log_level="warning",
        access_log=False,
        callback_notify=look,
        timeout_notify=1,
    )
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):  # requests are finished by then
        server.run(sockets=list(sockets))
    if engine.lost_process is not None:
        processes.leave(engine.lost_process)
    if not server.started:
        raise typer.Exit(1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
