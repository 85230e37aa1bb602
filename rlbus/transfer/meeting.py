"""Where the members of a group find each other: a TCP store that the trainer hosts, and who has come to it.

Everybody writes its presence before the group is formed, so that a member that never comes can be named, and leaves
the address at which it takes connections, by which the group's own sockets can be told from all others.
"""

import ipaddress
import socket
import time
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rlbus.errors import ConfigError, TransferError
from rlbus.schemas import GroupPlan
from rlbus.transfer.bounded import GiveUp

# (host, port)
Address = tuple[str, int]

# Pause between two looks at the store, in seconds: short at first, since members usually come together.
_FIRST_POLL_S = 0.002
_MAX_POLL_S = 0.05
# One attempt to reach the store, before the next.
_CONNECT_S = 2.0
_BACKLOG = 1024
# Missing ranks that an error names.
_MAX_NAMED = 8


def host_store(host: str, port: int = 0) -> TCPStore:
    """Bind a store on `host`, and on nothing else, at a port that the system picks (0). It lives as long as the object.

    Raises:
        ConfigError: a wildcard address, which nobody could connect to by name. TransferError: it can't be bound.
    """
    name = host.strip("[]")
    if name in ("", "*") or _is_wildcard(name):
        raise ConfigError("host", host, "give the address at which workers reach this machine, not a wildcard")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise TransferError("host the rendezvous", f"can't bind {host} port {port}: {exc}") from exc
    bound = listener.getsockname()[1]
    # TCPStore alone would bind every interface; it takes our socket instead, and owns it from here on.
    return TCPStore(name, bound, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def local_host(plan: GroupPlan) -> str:
    """The address of this machine from which it reaches the rendezvous, where the other members can reach it.

    Raises:
        TransferError: the host doesn't resolve, or there is no way to it.
    """
    place = plan.rendezvous
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            place.host.strip("[]"), place.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # UDP: only asks for the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise TransferError(_operation(plan), f"no way to the rendezvous at {place.host}: {exc}") from exc


def _operation(plan: GroupPlan) -> str:
    return f"join group {plan.epoch}"


class Meeting:
    """One member's view of the store of one group. All calls block; the native ones without a time-out of their own,
    so that this belongs in a thread that can be left behind.
    """

    def __init__(self, plan: GroupPlan, rank: int, deadline: float, give_up: GiveUp) -> None:
        self._plan = plan
        self._rank = rank
        self._deadline = deadline
        self._give_up = give_up
        self._operation = _operation(plan)
        self._store = self._reach()
        # Epoch and id are part of it: a retry at the same rendezvous never sees keys of an earlier attempt.
        self._prefix = f"{plan.rendezvous.prefix}/{plan.group_id}/{plan.epoch}"
        self._keys = PrefixStore(f"{self._prefix}/members", self._store)

    def store_for_group(self) -> PrefixStore:
        """The store under a prefix of this group's own."""
        return PrefixStore(f"{self._prefix}/group", self._store)

    def remaining_s(self) -> float:
        """Seconds until the deadline.

        Raises: TransferError: it has passed, or the join was given up.
        """
        self._give_up.check(self._operation)
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TransferError(self._operation, f"not formed within {self._plan.timeout_s:g} s")
        return remaining

    def appear(self, address: Address) -> None:
        """Write that this rank is here, and where it takes connections.

        Raises: TransferError: somebody else has come as this rank.
        """
        mine = f"{address[0]} {address[1]}"
        held = self._keys.compare_set(str(self._rank), "", mine).decode()
        if held != mine:
            text = f"{self.describe([self._rank])} is already there, from {held.replace(' ', ' port ')}"
            raise TransferError(self._operation, text)

    def wait_for_all(self) -> dict[int, Address]:
        """Return when every rank has appeared: where each takes connections.

        Raises: TransferError: not all came in time; names the missing.
        """
        missing = list(range(self._plan.world_size))
        pause_s = _FIRST_POLL_S
        while missing:
            missing = [rank for rank in missing if not self._keys.check([str(rank)])]
            if not missing:
                break
            self._give_up.check(self._operation)
            if time.monotonic() > self._deadline:
                text = f"{self.describe(missing)} never came within {self._plan.timeout_s:g} s"
                raise TransferError(self._operation, text)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _MAX_POLL_S)
        found: dict[int, Address] = {}
        for rank in range(self._plan.world_size):
            host, _, port = self._keys.get(str(rank)).decode().rpartition(" ")
            found[rank] = (host, int(port))
        return found

    def describe(self, ranks: Iterable[int]) -> str:
        """Ranks by the names of who should hold them."""
        names = [self._name(rank) for rank in ranks]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return ", ".join(names[:_MAX_NAMED]) + more

    def _name(self, rank: int) -> str:
        if rank < self._plan.num_trainer_ranks:
            return f"rank {rank} of the trainer"
        for span in self._plan.spans:
            if span.first <= rank < span.first + span.num_ranks:
                return f"rank {rank} of {span.component}/{span.instance_id}"
        return f"rank {rank}"

    def _reach(self) -> TCPStore:
        """Connect to the store. TCPStore's own constructor retries well beyond its time-out when nobody listens, so a
        plain connection is tried first.
        """
        place = self._plan.rendezvous
        host = place.host.strip("[]")
        while True:
            self._give_up.check(self._operation)
            # Whoever is late, on a busy machine, looks once more: why the store can't be reached has to be said.
            left_s = max(self._deadline - time.monotonic(), _MAX_POLL_S)
            try:
                with socket.create_connection((host, place.port), timeout=min(_CONNECT_S, left_s)):
                    break
            except OSError as exc:
                if time.monotonic() + _MAX_POLL_S > self._deadline:
                    text = f"the rendezvous at {place.host} port {place.port} can't be reached: {exc}"
                    raise TransferError(self._operation, text) from exc
                time.sleep(_MAX_POLL_S)
        limit = timedelta(seconds=self.remaining_s())
        return TCPStore(host, place.port, is_master=False, wait_for_workers=False, timeout=limit)
