"""Commands that run the pieces: up, controller, worker, demo. They end with 0 on SIGINT or SIGTERM."""

import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rlbus.cli.lora import FrontendUrl, frontend_of
from rlbus.cli.options import HttpHost, HttpPort, Json, Namespace, Url, checked, roots_of, run_command
from rlbus.cli.output import ExitCode, Output
from rlbus.cli.services import (
    PLANE,
    check_installed,
    end_of_worker,
    log_as_service,
    supervised,
    terminated_as_interrupted,
    until_stopped,
)
from rlbus.config import DEFAULT_NAMESPACE, BusConfig
from rlbus.errors import BrokenError, ConfigError
from rlbus.schemas import worker_id

if TYPE_CHECKING:
    from rlbus.workers.agent import Agent
    from rlbus.workers.engines.base import Engine
    from rlbus.workers.supervisor.environment import Named
    from rlbus.workers.system.settings import SystemConfig

worker_app = typer.Typer(
    help="Run a worker: an inference engine with its agent on the bus.", no_args_is_help=True, rich_markup_mode=None
)

Component = Annotated[
    str | None,
    typer.Option(
        "--component", "-c", metavar="NAME", help="Part of the fleet. [env: RLBUS_COMPONENT] [default: backend]"
    ),
]
InstanceId = Annotated[
    str | None,
    typer.Option("--instance-id", metavar="ID", help="64-bit number. [env: RLBUS_INSTANCE_ID] [default: random]"),
]
SystemHost = Annotated[
    str | None,
    typer.Option(
        "--system-host",
        metavar="HOST",
        help="Address of its HTTP surface; one that others reach needs RLBUS_SYSTEM_TOKEN. "
        "[env: RLBUS_SYSTEM_HOST] [default: 127.0.0.1]",
    ),
]
SystemPort = Annotated[
    int | None,
    typer.Option(
        "--system-port",
        metavar="PORT",
        min=-1,
        max=65535,
        help="Port of its HTTP surface; 0 takes a free one, -1 has none. [env: RLBUS_SYSTEM_PORT] [default: 0]",
    ),
]
WeightRoots = Annotated[
    list[str] | None,
    typer.Option(
        "--weight-root",
        metavar="DIR",
        help="Folder below which `rlbus update` may load; may be repeated. [env: RLBUS_WEIGHT_ROOTS, with : between]",
    ),
]
LoraRoots = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-root",
        metavar="DIR",
        help="Folder below which adapters may be loaded from; may be repeated. [env: RLBUS_LORA_ROOTS, with : between]",
    ),
]


def up(
    port: Annotated[int, typer.Option(help="Port of the server; 0 takes a free one.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Token that clients need. [env: RLBUS_TOKEN] [default: generated]")
    ] = None,
    store_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where JetStream keeps its data. [default: temporary]")
    ] = None,
    http_host: HttpHost = None,
    http_port: HttpPort = None,
    frontend_url: FrontendUrl = None,
    namespace: Namespace = None,
    json: Json = False,
) -> None:
    """Start an embedded NATS server and a controller.

    Prints the URL for workers and trainers, and runs until Ctrl-C.
    """
    out = Output(json)
    log_as_service()

    async def serve() -> ExitCode:
        from rlbus.controller.app import serve as serve_controller
        from rlbus.controller.http.config import HttpConfig
        from rlbus.controller.service import Settings
        from rlbus.server import EmbeddedServer
        from rlbus.workers.addresses import ELSEWHERE, WILDCARDS, advertised_host, reachable_host, reachable_url

        advertised = advertised_host(os.environ)
        http = HttpConfig.from_env(host=http_host, port=http_port)
        at: dict[str, str] = {}
        name = namespace or os.environ.get("RLBUS_NAMESPACE") or DEFAULT_NAMESPACE
        secret = token or os.environ.get("RLBUS_TOKEN") or None
        settings = Settings(frontend=frontend_of(frontend_url))
        async with EmbeddedServer(store_dir=store_dir, port=port, host=host, token=secret) as server:
            config = BusConfig(url=server.url, namespace=name)
            known_at = reachable_host(host, advertised, ELSEWHERE) if host in WILDCARDS else host
            url = server.url_at(known_at)

            is_told = False

            def tell() -> None:
                if json:
                    out.document({"url": url, "namespace": name, "pid": os.getpid()} | at)
                out.line(f"rlbus is up. In other terminals:\n\n  export RLBUS_URL={url}")
                if at:
                    out.line(f"  # over HTTP: {at['http_url']}")
                if name != DEFAULT_NAMESPACE:
                    out.line(f"  export RLBUS_NAMESPACE={name}")
                out.line("  rlbus worker fake        # or: rlbus worker torch DIR, rlbus worker vllm MODEL")
                out.line("  rlbus status\n\nCtrl-C ends it.")

            def on_ready(_controller: object) -> None:
                nonlocal is_told
                if is_told:  # it lost the lease for a while, and leads again
                    return
                is_told = True
                with out.aside():
                    tell()

            def on_http(base: str) -> None:
                at["http_url"] = reachable_url(base, advertised, ELSEWHERE)

            serving = serve_controller(config, settings=settings, on_ready=on_ready, http=http, on_http=on_http)
            return await supervised(serving, server, out)

    run_command(out, lambda: until_stopped(serve()))


def controller(
    url: Url = None,
    namespace: Namespace = None,
    single: Annotated[
        bool,
        typer.Option("--single", help="Without lease and journal, for a server without JetStream. Start only one."),
    ] = False,
    http_host: HttpHost = None,
    http_port: HttpPort = None,
    frontend_url: FrontendUrl = None,
    json: Json = False,
) -> None:
    """Run the controller of a namespace.

    Started a second time, it stands by, and takes over when the first one is gone.
    """
    out = Output(json)
    log_as_service()
    is_told = False

    async def serve() -> None:
        config = BusConfig.from_env(url=url, namespace=namespace)
        from rlbus.controller.app import serve as serve_controller
        from rlbus.controller.http.config import HttpConfig

        at: dict[str, str] = {}
        from rlbus.controller.service import Settings
        from rlbus.workers.addresses import advertised_host, reachable_url

        advertised = advertised_host(os.environ)

        def on_http(base: str) -> None:
            at["http_url"] = reachable_url(base, advertised, config.url)

        def tell(role: str, line: str) -> None:
            nonlocal is_told
            also = f", over HTTP on {at['http_url']}" if at else ""
            with out.aside():
                if json and not is_told:
                    out.document({"namespace": config.namespace, "pid": os.getpid(), "role": role} | at)
                out.line(f"controller of namespace {config.namespace} {line} on {config.url}{also}; Ctrl-C ends it")
            is_told = True

        await serve_controller(
            config,
            settings=Settings(frontend=frontend_of(frontend_url)),
            on_ready=lambda _: tell("leader", "is up"),
            on_standby=lambda lease: tell("standby", f"stands by for {lease.name}"),
            is_single=single,
            http=HttpConfig.from_env(host=http_host, port=http_port),
            on_http=on_http,
        )

    run_command(out, lambda: until_stopped(serve()))


def demo(
    engine: Annotated[str, typer.Option(help="torch, or vllm.")] = "torch",
    workers: Annotated[int, typer.Option(help="How many engines.", min=1)] = 2,
    updates: Annotated[
        int, typer.Option(help="How many training steps; from 20 on the reward has to grow.", min=1)
    ] = 20,
    json: Annotated[bool, typer.Option("--json", help="Only the last line, one JSON document, on stdout.")] = False,
) -> None:
    """Train a tiny model on real engines.

    Rollouts come from the engines, weights reach them through rlbus, and every step is checked.
    """
    out = Output(json)

    async def work() -> ExitCode:
        from rlbus.demo.run import main

        try:
            with terminated_as_interrupted():
                return ExitCode(await main(engine=engine, workers=workers, updates=updates, as_json=json))
        except BrokenError as exc:
            # A piece of its own failed: "nothing there" would send the user looking for a server.
            return out.error(exc, ExitCode.FAILED)

    run_command(out, work)


NoRestart = Annotated[
    bool,
    typer.Option("--no-restart", help="One process that ends when its engine dies, for a supervisor of your own."),
]


@worker_app.command("fake")
def worker_fake(
    world_size: Annotated[int, typer.Option(help="Ranks that it pretends to have.", min=1)] = 1,
    url: Url = None,
    namespace: Namespace = None,
    component: Component = None,
    instance_id: InstanceId = None,
    weight_root: WeightRoots = None,
    system_host: SystemHost = None,
    system_port: SystemPort = None,
    lora_root: LoraRoots = None,
    no_restart: NoRestart = False,
    json: Json = False,
) -> None:
    """Run an engine that only pretends: to try rlbus out, and for tests."""

    def make() -> "Engine":
        from rlbus.workers.engines.fake import FakeEngine

        return FakeEngine(world_size=world_size)

    worker = _Worker(url, namespace, component, instance_id, weight_root, json, lora_root, system_host, system_port)
    if no_restart:
        worker.run(make)
    else:
        worker.supervise(("fake", "--world-size", str(world_size), *worker.system_arguments))


@worker_app.command("torch")
def worker_torch(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model.", exists=True, file_okay=False)],
    ranks: Annotated[int, typer.Option(help="Processes, each with its own copy of the model.", min=1)] = 1,
    max_loras: Annotated[int, typer.Option(help="Adapters that it holds at once.", min=1, max=256)] = 8,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address of /v1/completions, which asks nobody for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of /v1/completions; 0 takes a free one.", min=0, max=65535)] = 0,
    url: Url = None,
    namespace: Namespace = None,
    component: Component = None,
    instance_id: InstanceId = None,
    weight_root: WeightRoots = None,
    system_host: SystemHost = None,
    system_port: SystemPort = None,
    lora_root: LoraRoots = None,
    no_restart: NoRestart = False,
    json: Json = False,
) -> None:
    """Run the small torch engine on a model folder. Needs `pip install "rlbus[torch]"`.

    It is started again when it dies or hangs.
    """

    def make() -> "Engine":
        from rlbus.workers.config import AgentConfig
        from rlbus.workers.engines.torch_engine import TorchEngine

        announced = worker.reachable_host(host)
        return TorchEngine(
            model,
            num_ranks=ranks,
            host=host,
            port=port,
            advertise_host=announced,
            roots=AgentConfig.from_env(weight_roots=worker.roots or None).weight_roots,
            max_loras=max_loras,
        )

    worker = _Worker(url, namespace, component, instance_id, weight_root, json, lora_root, system_host, system_port)
    checked(Output(json), lambda: check_installed("torch", "torch", (*PLANE, "safetensors")))
    if no_restart:
        worker.run(make)
        return
    roots = [part for root in worker.roots for part in ("--weight-root", root)]
    options = ("--ranks", str(ranks), "--host", host, "--port", str(port), "--max-loras", str(max_loras), *roots)
    worker.supervise(("torch", str(model.absolute()), *options, *worker.system_arguments))


@worker_app.command("vllm", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker_vllm(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL [VLLM OPTIONS]", help="A folder, or a name that vLLM knows.")],
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="As of the other commands.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", metavar="NAME", help="The fleet.")] = None,
    component: Annotated[str | None, typer.Option("--component", metavar="NAME", help="Part of the fleet.")] = None,
    instance_id: InstanceId = None,
    weight_root: WeightRoots = None,
    lora_root: LoraRoots = None,
    small: Annotated[bool, typer.Option("--small", help="Leave room for others on a machine without a GPU.")] = False,
    json: Json = False,
) -> None:
    """Start a vLLM server that is on the bus, and start it again when it dies.

    Everything that isn't listed below goes to vLLM as it is. Give MODEL first.
    """
    worker = _Worker(url, namespace, component, instance_id, weight_root, json, lora_root)

    async def serve(bus_config: BusConfig, named: "Named") -> int:
        from rlbus.workers.vllm_server.supervisor import supervise

        return await supervise(
            model,
            ctx.args,
            bus_config=bus_config,
            named=named,
            weight_roots=worker.roots,
            lora_roots=worker.lora_roots,
            is_small=small,
            on_start=lambda: worker.tell(os.getpid(), "starts; `rlbus workers` shows when it is there"),
        )

    if model.startswith("-"):
        worker.fail(ConfigError("MODEL", model, "give the model first, then vLLM's options"))
    from rlbus.workers.vllm_server.supervisor import is_cpu_build

    checked(Output(json), is_cpu_build)
    worker.run_supervised(serve)


class _Worker:
    """One worker of the command line, in this process or supervised by it."""

    def __init__(
        self,
        url: str | None,
        namespace: str | None,
        component: str | None,
        instance_id: str | None,
        weight_roots: list[str] | None,
        json: bool,
        lora_roots: list[str] | None = None,
        system_host: str | None = None,
        system_port: int | None = None,
    ) -> None:
        self._url = url
        self._namespace = namespace
        self._component = component
        self._instance_id = instance_id
        self._json = json
        self._out = Output(json)
        self._is_told = False
        self._who = ""
        self._system_host = system_host
        self._system_port = system_port
        self.roots = checked(self._out, lambda: roots_of("--weight-root", weight_roots))
        self.lora_roots = checked(self._out, lambda: roots_of("--lora-root", lora_roots))
        log_as_service()

    @property
    def system_arguments(self) -> tuple[str, ...]:
        """The options of its HTTP surface, for a process of its own."""
        given = (("--system-host", self._system_host), ("--system-port", self._system_port))
        return tuple(text for name, value in given if value is not None for text in (name, str(value)))

    def _system(self) -> "SystemConfig":
        from rlbus.workers.system.settings import SystemConfig

        return SystemConfig.from_env(host=self._system_host, port=self._system_port)

    def reachable_host(self, listens_on: str) -> str:
        """What it announces as the host of a server that listens there: RLBUS_ADVERTISE_HOST, or the way to the bus."""
        from rlbus.workers.addresses import reachable_host

        return reachable_host(listens_on, self._system().advertise_host, self._config().url)

    def fail(self, error: ConfigError) -> NoReturn:
        """End with an error before anything was started."""

        async def refuse() -> ExitCode:
            raise error

        run_command(self._out, refuse)

    def tell(self, worker_pid: int, line: str) -> None:
        """Say, once, that it is there."""
        if self._is_told:
            return
        self._is_told = True
        namespace = self._config().namespace
        document = {"worker": self._who, "namespace": namespace, "pid": os.getpid(), "worker_pid": worker_pid}
        with self._out.aside():
            if self._json:
                self._out.document(document)
            self._out.line(f"worker {self._who} of namespace {namespace} {line}")

    def run(self, make: Callable[[], "Engine"]) -> None:
        """In this process until it is stopped, or its engine dies."""

        async def serve() -> ExitCode:
            from rlbus.workers.config import AgentConfig
            from rlbus.workers.run import serve as serve_worker

            def on_ready(agent: "Agent") -> None:
                self._who = worker_id(agent.descriptor.component, agent.descriptor.instance_id)
                self.tell(os.getpid(), "is up; Ctrl-C ends it")

            await serve_worker(
                make(),
                self._config(),
                component=self._component,
                instance_id=self._instance_id,
                config=AgentConfig.from_env(weight_roots=self.roots or None, lora_roots=self.lora_roots or None),
                system=self._system(),
                on_ready=on_ready,
            )
            return ExitCode.OK

        run_command(self._out, serve)

    def supervise(self, arguments: Sequence[str]) -> None:
        """As a process of its own, `rlbus worker <arguments>`, which is started again when it dies or hangs."""
        level = logging.getLogger().level
        verbosity = 2 if level <= logging.DEBUG else 0

        async def serve(bus_config: BusConfig, named: "Named") -> int:
            from rlbus.workers.supervisor.worker import own_command, supervise_worker

            return await supervise_worker(
                own_command(arguments, verbosity),
                bus_config=bus_config,
                named=named,
                weight_roots=self.roots,
                lora_roots=self.lora_roots,
                on_ready=lambda pid: self.tell(pid, "is up; Ctrl-C ends it"),
            )

        self.run_supervised(serve)

    def run_supervised(self, serve: "Callable[[BusConfig, Named], Coroutine[Any, Any, int]]") -> None:
        """Look whether the bus is there, since an engine may take a minute to start, and run it under supervision."""

        async def watched() -> ExitCode:
            from rlbus.connecting import connect_bus
            from rlbus.workers.supervisor.environment import Named

            bus_config = self._config()
            self._system()  # a wrong setting is told before anything starts
            named = Named.of(self._component, self._instance_id)
            self._who = worker_id(named.identity.component, named.identity.instance_id)
            await (await connect_bus(bus_config, name="rlbus-worker")).aclose()
            return end_of_worker(await serve(bus_config, named), self._who, self._out)

        run_command(self._out, watched)

    def _config(self) -> BusConfig:
        return BusConfig.from_env(url=self._url, namespace=self._namespace)
