"""Whether the workers' own HTTP addresses answer: asked in parallel within bounds, however many ask for the list."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import httpx

# What is asked for. Any answer below 500 will do: a server is there; how it is, its heartbeats say.
PROBE_PATH = "/live"
# How long one address may take, and the whole of one question, in seconds.
PROBE_S = 2.0
PASS_S = 5.0
# At the same time, over all who ask. Source: Dynamo's DEFAULT_MAX_CONCURRENT_PROBES.
MAX_CONCURRENT = 32
# For so long an answer is good for others who ask, in seconds.
FRESH_S = 1.0
# Addresses that are remembered; the oldest go first.
MAX_KNOWN = 16_384


@dataclass(slots=True)
class _Probe:
    task: "asyncio.Task[str | None]"
    began_s: float


class Prober:
    """Probes addresses, each once at a time. `aclose` at the end.

    No credentials are sent: an address is whatever a worker announced. Redirects aren't followed, bodies aren't read.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        limits = httpx.Limits(max_connections=MAX_CONCURRENT, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(transport=transport, limits=limits, trust_env=False, follow_redirects=False)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        # In the order in which they began.
        self._known: OrderedDict[str, _Probe] = OrderedDict()

    async def probe(self, urls: Collection[str]) -> dict[str, str | None]:
        """For each address what is wrong with it, None if it answers; within PASS_S. Cancel: probes go on."""
        probes = {url: self._begin(url) for url in urls}
        if probes:
            await asyncio.wait({p.task for p in probes.values()}, timeout=PASS_S)
        late = f"not probed within {PASS_S:g} s: too many don't answer"
        return {url: p.task.result() if p.task.done() else f"{url}: {late}" for url, p in probes.items()}

    async def aclose(self) -> None:
        """End what runs. Idempotent. Cancel: connections are dropped."""
        tasks = [p.task for p in self._known.values()]
        self._known.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _begin(self, url: str) -> _Probe:
        loop = asyncio.get_running_loop()
        known = self._known.get(url)
        if known is not None and (not known.task.done() or loop.time() - known.began_s < FRESH_S):
            return known
        self._known.pop(url, None)
        # Those that still run stay, so that they end with this object: they are the newest.
        while len(self._known) >= MAX_KNOWN and self._known[next(iter(self._known))].task.done():
            self._known.popitem(last=False)
        begun = self._known[url] = _Probe(loop.create_task(self._ask(url)), loop.time())
        return begun

    async def _ask(self, url: str) -> str | None:
        async with self._slots:
            try:
                async with asyncio.timeout(PROBE_S), self._client.stream("GET", url + PROBE_PATH) as answer:
                    status = answer.status_code
            except TimeoutError:
                return f"{url} doesn't answer within {PROBE_S:g} s"
            # Whatever it is, it is that worker's row that shows it: hosts come as workers announce them, and of odd
            # ones httpx raises more than its own errors (idna's, UnicodeError).
            except Exception as exc:  # noqa: BLE001
                return f"{url} doesn't answer: {exc or type(exc).__name__}"
        return None if status < 500 else f"{url} answers with status {status}"
