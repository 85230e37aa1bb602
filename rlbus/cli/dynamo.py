"""`rlbus worker dynamo`: a whole Dynamo fleet, adopted by one command."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlbus.cli.options import Json, checked, roots_of, run_command
from rlbus.cli.output import ExitCode, Output
from rlbus.cli.run import NoRestart, SystemHost, WeightRoots
from rlbus.cli.services import PLANE, check_installed, end_of_worker, log_as_service, notice
from rlbus.cli.sidecars import ApiKeyEnv, Bus, FleetName, Header, headers_of, key_of, verbosity
from rlbus.config import BusConfig

if TYPE_CHECKING:
    from rlbus.workers.dynamo.run import Where
    from rlbus.workers.system.settings import SystemConfig

Transfer = Annotated[
    bool | None,
    typer.Option(
        "--transfer/--no-transfer",
        help="Whether the workers' vLLM has rlbus's transfer backend. [default: workers of one rank are asked]",
    ),
]


def worker_dynamo(
    discovery: Annotated[
        list[str] | None,
        typer.Option("--discovery", metavar="URL", help="RL port of a Dynamo front end; may be repeated."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="System port of a Dynamo worker; may be repeated."),
    ] = None,
    bus: Bus = None,
    namespace: FleetName = None,
    component: Annotated[
        str | None, typer.Option("--component", "-c", metavar="NAME", help="Only this part of Dynamo's fleet.")
    ] = None,
    weight_root: WeightRoots = None,
    model_dir: Annotated[
        Path | None,
        typer.Option("--model-dir", metavar="DIR", help="Checkpoint of the model, if its name isn't its folder."),
    ] = None,
    transfer: Transfer = None,
    max_loras: Annotated[
        int | None,
        typer.Option(
            "--max-loras",
            metavar="N",
            min=1,
            help="Adapters that each worker has room for (its own --max-loras; on a CPU one less). "
            "Dynamo doesn't tell; without it they are given none.",
        ),
    ] = None,
    system_host: SystemHost = None,
    system_port: Annotated[
        int | None,
        typer.Option(
            "--system-port",
            metavar="PORT",
            min=-1,
            max=0,
            help="0: the HTTP surface of each worker takes a free port; -1: none has one. "
            "[env: RLBUS_SYSTEM_PORT] [default: 0]",
        ),
    ] = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    trust_host: Annotated[
        list[str] | None,
        typer.Option("--trust-host", metavar="HOST", help="Gets the credentials, too, if it is announced."),
    ] = None,
    no_restart: NoRestart = False,
    json: Json = False,
) -> None:
    """Put the workers of an NVIDIA Dynamo fleet on the bus, each as a worker of its own.

    New ones are adopted as they appear, and those that vanish leave. Start them with `--enable-rl`.
    """
    log_as_service()
    # One line for each of their calls would be most of the log.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    adoption = _Adoption(
        out=Output(json),
        discovery=tuple(discovery or ()),
        url=tuple(url or ()),
        bus=bus,
        namespace=namespace,
        component=component,
        roots=checked(Output(json), lambda: roots_of("--weight-root", weight_root)),
        model_dir=None if model_dir is None else model_dir.absolute(),
        transfer=transfer,
        max_loras=max_loras,
        system_host=system_host,
        system_port=system_port,
        api_key_env=api_key_env,
        header=tuple(header or ()),
        trust_host=tuple(trust_host or ()),
    )
    checked(adoption.out, lambda: check_installed("dynamo", "torch", PLANE))
    run_command(adoption.out, adoption.serve if no_restart else adoption.supervise)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adoption:
    """What the command was given, checked when it is used: what is wrong is said now, and not by another process."""

    out: Output
    discovery: tuple[str, ...]
    url: tuple[str, ...]
    bus: str | None
    namespace: str | None
    component: str | None
    roots: tuple[str, ...]
    model_dir: Path | None
    transfer: bool | None
    max_loras: int | None
    system_host: str | None
    system_port: int | None
    api_key_env: str | None
    header: tuple[str, ...]
    trust_host: tuple[str, ...]

    async def serve(self) -> ExitCode:
        """Adopt them here."""
        from rlbus.workers.config import AgentConfig
        from rlbus.workers.dynamo.copies import copies_dir
        from rlbus.workers.dynamo.engine import EngineOptions
        from rlbus.workers.dynamo.run import serve
        from rlbus.workers.dynamo.supervisor import sidecar_state_dir

        state_dir = sidecar_state_dir()
        copies = copies_dir(state_dir, os.environ)
        await serve(
            self._config(),
            self._where(),
            config=AgentConfig.from_env(weight_roots=self.roots or None, state_dir=state_dir, lora_cache_dir=copies),
            options=EngineOptions(self.model_dir, self.transfer, max_loras=self.max_loras),
            system=self._system(),
            on_ready=lambda: self._tell(os.getpid()),
            on_change=notice,
        )
        return ExitCode.OK

    async def supervise(self) -> ExitCode:
        """Adopt them in a process that is started again."""
        from rlbus.connecting import connect_bus
        from rlbus.workers.dynamo.supervisor import supervise

        self._where()
        self._system()
        await (await connect_bus(self._config(), name="rlbus-worker")).aclose()
        is_told: list[int] = []

        def on_ready(pid: int) -> None:
            if not is_told:
                self._tell(pid)
            is_told.append(pid)

        code = await supervise(
            self._arguments(), verbosity(), bus_config=self._config(), weight_roots=self.roots, on_ready=on_ready
        )
        return end_of_worker(code, "the sidecar of Dynamo", self.out)

    def _where(self) -> "Where":
        from rlbus.workers.dynamo.run import Where

        key, headers = key_of(self.api_key_env), headers_of(list(self.header))
        found = Where(self.discovery, self.url, self.component, key, headers, self.trust_host)
        found.sources()
        return found

    def _config(self) -> BusConfig:
        return BusConfig.from_env(url=self.bus, namespace=self.namespace)

    def _system(self) -> "SystemConfig":
        from rlbus.workers.dynamo.run import checked_system
        from rlbus.workers.system.settings import SystemConfig

        return checked_system(SystemConfig.from_env(host=self.system_host, port=self.system_port))

    def _arguments(self) -> list[str]:
        given = (
            ("--discovery", self.discovery),
            ("--url", self.url),
            ("--header", self.header),
            ("--trust-host", self.trust_host),
        )
        arguments = [part for name, values in given for value in values for part in (name, value)]
        single: list[tuple[str, object]] = [("--component", self.component), ("--model-dir", self.model_dir)]
        single += [("--api-key-env", self.api_key_env), ("--system-host", self.system_host)]
        single += [("--system-port", self.system_port), ("--max-loras", self.max_loras)]
        arguments += [part for name, value in single if value is not None for part in (name, str(value))]
        if self.transfer is not None:
            arguments.append("--transfer" if self.transfer else "--no-transfer")
        return arguments

    def _tell(self, pid: int) -> None:
        namespace = self._config().namespace
        with self.out.aside():
            if self.out.is_json:
                self.out.document({"namespace": namespace, "pid": os.getpid(), "worker_pid": pid})
            self.out.line(f"adopts Dynamo's workers into namespace {namespace}; Ctrl-C ends it")
